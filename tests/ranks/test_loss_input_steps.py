"""Losses that need more inputs, on real ZeRO-3: the numbers of plain loops, on one rank and on two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from rank_scripts import results_of

if TYPE_CHECKING:
    import torch

SCRIPT = "loss_input_steps.py"
FEWER_PAIRS = ("regrouped", "budget without sharing")
PAIRS = ("regrouped", "scheduled", "all logits", "budget", "budget without sharing")


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
        "lora": one["lora"],
        "lora, two ranks": two["lora"],
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


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of two gradients, as a part of the first one's."""
    import torch

    assert one.keys() == other.keys()
    flat = [torch.cat([each[name].flatten().double() for name in one]) for each in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[0].norm())


SPLITS = ("whole", "six", "two ranks", "two ranks, six")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["reference", "entropy", "rewards"])
def test_the_gradient_is_that_of_plain_loops(
    results: dict[str, Any], by_hand: dict[str, Any], name: str, split: str
) -> None:
    assert difference(by_hand[name], results[split][name]["gradient"]) < 1e-5


@pytest.mark.parametrize(
    ("split", "packing"),
    [(split, packing) for split in SPLITS for packing in (PAIRS if "six" not in split else FEWER_PAIRS)],
)
def test_pairs_of_a_group_have_the_gradient_of_plain_loops_however_they_are_packed(
    results: dict[str, Any], by_hand: dict[str, Any], packing: str, split: str
) -> None:
    step = results[split][f"pairs, {packing}"]
    assert difference(by_hand["pairs"], step["gradient"]) < 1e-5
    assert {size for sizes, _ in step["sizes"] for size in sizes} == {4}


def test_a_budget_makes_fillers_that_are_whole_groups(results: dict[str, Any]) -> None:
    calls = results["two ranks"]["pairs, budget"]["sizes"]
    assert any(is_filler for _, is_filler in calls)


@pytest.mark.parametrize("split", SPLITS)
def test_the_penalty_and_the_bonus_of_a_loss_are_those_of_the_core(results: dict[str, Any], split: str) -> None:
    steps = results[split]
    assert difference(steps["beta"]["gradient"], steps["reference"]["gradient"]) < 1e-6
    assert difference(steps["bonus"]["gradient"], steps["entropy"]["gradient"]) < 1e-6
    assert steps["reference"]["metrics"]["kl"] == steps["beta"]["metrics"]["kl"] > 0
    assert "kl" not in steps["rewards"]["metrics"]


def test_the_entropy_has_the_same_gradient_from_all_logits(results: dict[str, Any]) -> None:
    one, other = (results["whole"][name]["gradient"] for name in ("entropy", "entropy, all logits"))
    assert difference(one, other) < 1e-5


def test_the_reference_of_adapters_is_the_model_without_them(results: dict[str, Any]) -> None:
    import loss_input_steps as steps
    import torch

    base = steps.plain_model().eval()
    for ranks in ("lora", "lora, two ranks"):
        found = results[ranks]["reference"]["reference"]
        assert len(found) == 24
        for sample in steps.samples():
            ids = torch.tensor([sample.prompt + sample.completion])
            with torch.no_grad():
                logits = base(input_ids=ids).logits[0, len(sample.prompt) - 1 : -1] / steps.TEMPERATURE
            expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.completion)[:, None])[:, 0]
            keep = torch.from_numpy(sample.token_mask)
            torch.testing.assert_close(found[sample.sequence_id][keep], expected[keep], atol=1e-5, rtol=0)
        beta, own = (results[ranks][name]["gradient"] for name in ("beta", "reference"))
        assert difference(beta, own) < 1e-6
