"""Losses that need more inputs, on real ZeRO-3: the numbers of plain loops, on one rank and on two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from rank_scripts import relative_difference, results_of

if TYPE_CHECKING:
    import torch

SCRIPT = "loss_input_steps.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """24 rows as one micro-batch and as six, and the same on two ranks in two and six."""
    folder = tmp_path_factory.mktemp("inputs")
    one = results_of(SCRIPT, "24x1", "4x6", folder=folder)
    two = results_of(SCRIPT, "12x1", "4x3", folder=folder, ranks=2)
    return {
        "whole": one["24x1"],
        "six": one["4x6"],
        "two ranks": two["12x1"],
        "two ranks, six": two["4x3"],
    }


@pytest.fixture(scope="module")
def by_hand() -> dict[str, dict[str, torch.Tensor]]:
    """The gradients of each loss in float64, one sequence at a time, by transformers and torch alone."""
    import loss_input_steps as steps
    import torch

    config = steps.config_for("24x1", {})
    policy, reference = steps.load_model(config.model).double(), steps.reference_model(config).double()

    def distributions(model: torch.nn.Module, sample: Any) -> torch.Tensor:
        ids = torch.tensor([sample.prompt + sample.completion])
        logits = model(input_ids=ids).logits[0, len(sample.prompt) - 1 : -1]
        return torch.log_softmax(logits / steps.TEMPERATURE, dim=-1)

    def chosen(log_p: torch.Tensor, sample: Any) -> torch.Tensor:
        return torch.stack([log_p[place, token] for place, token in enumerate(sample.completion)])

    samples = steps.samples()
    counted = [sample for sample in samples if sample.token_mask.all()]
    tokens = sum(len(sample.completion) for sample in counted)
    totals: dict[str, Any] = {"reference": 0.0, "entropy": 0.0, "rewards": 0.0, "pairs": 0.0}
    means = {}
    for sample in counted:
        log_p = distributions(policy, sample)
        log_pi = chosen(log_p, sample)
        with torch.no_grad():
            log_ref = chosen(distributions(reference, sample), sample)
        surrogate = -sample.advantage * torch.exp(log_pi - log_pi.detach())
        rho = log_ref - log_pi
        totals["reference"] += (surrogate + 0.1 * (rho.exp() - rho - 1)).sum() / tokens
        totals["entropy"] += (surrogate + 0.1 * (log_p.exp() * log_p).sum(-1)).sum() / tokens
        totals["rewards"] -= (float(sample.rewards[0]) + 2 * float(sample.rewards[1])) * log_pi.sum() / tokens
        means[sample.sequence_id] = log_pi.mean()
    for better in counted:
        for worse in samples:
            if worse.group_id == better.group_id and worse.rewards[0] < better.rewards[0]:
                # A sequence without a token that counts has the mean 0.
                gap = means.get(worse.sequence_id, 0.0) - means[better.sequence_id]
                totals["pairs"] += torch.log1p(gap.exp()) / len(samples)
    gradients = {}
    for name, total in totals.items():
        parts = torch.autograd.grad(total, list(policy.parameters()), retain_graph=True)
        gradients[name] = dict(zip((key for key, _ in policy.named_parameters()), parts, strict=True))
    return gradients


SPLITS = ("whole", "six", "two ranks", "two ranks, six")


@pytest.mark.parametrize("split", SPLITS)
def test_the_gradient_is_that_of_plain_loops(
    results: dict[str, Any], by_hand: dict[str, Any], split: str
) -> None:
    """Also the core's own penalty and bonus, and pairs of a group however they are packed."""
    steps = results[split]
    for name in ("reference", "entropy", "rewards"):
        assert relative_difference(by_hand[name], steps[name]["gradient"]) < 1e-5, name
    assert relative_difference(steps["beta"]["gradient"], steps["reference"]["gradient"]) < 1e-6
    assert relative_difference(steps["bonus"]["gradient"], steps["entropy"]["gradient"]) < 1e-6
    assert steps["reference"]["metrics"]["kl"] == steps["beta"]["metrics"]["kl"] > 0
    assert "kl" not in steps["rewards"]["metrics"]
    pairs = {name: step for name, step in steps.items() if name.startswith("pairs, ")}
    assert len(pairs) == (2 if "six" in split else 5)
    for name, step in pairs.items():
        assert relative_difference(by_hand["pairs"], step["gradient"]) < 1e-5, name
        assert {size for sizes, _ in step["sizes"] for size in sizes} == {4}


def test_a_budget_makes_fillers_that_are_whole_groups(results: dict[str, Any]) -> None:
    calls = results["two ranks"]["pairs, budget"]["sizes"]
    assert any(is_filler for _, is_filler in calls)


def test_the_entropy_has_the_same_gradient_from_all_logits(results: dict[str, Any]) -> None:
    one, other = (results["whole"][name]["gradient"] for name in ("entropy", "entropy, all logits"))
    assert relative_difference(one, other) < 1e-5
