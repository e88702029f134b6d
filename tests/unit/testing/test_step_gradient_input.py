"""Inputs that `step_gradient` refuses, and the key that its errors name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.problems import problem_of
from torch import Tensor

from grpox.errors import ConfigError, Problem
from grpox.testing import step_gradient


def good() -> dict[str, Tensor]:
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    names = ("logprobs", "old_logprobs", "sampler_logprobs", "ref_logprobs", "entropy")
    tensors = dict.fromkeys(names, zeros)
    return {**tensors, "advantages": torch.ones(2).double(), "token_mask": torch.ones(2, 3).bool()}


def refused(loss: Any = "dapo", micro_batches: Any = None, **options: Any) -> Problem:
    """The only problem."""
    options = {"max_completion_length": 3, **options}
    return problem_of(step_gradient, loss, [good()] if micro_batches is None else micro_batches, **options)


def test_the_good_input_is_taken() -> None:
    loss, (gradient,) = step_gradient("dapo", [good()], beta=0.1, max_completion_length=3)
    assert loss.item() == pytest.approx(-1, abs=1e-12)
    assert (loss.dtype, gradient.dtype, gradient.shape) == (torch.float64, torch.float64, (2, 3))


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("loss.clip_hihg", {"loss": {"name": "dapo", "clip_hihg": 0.28}}),
        ("loss.cap", {"loss": {"name": "cispo", "cap": 0}}),
        ("loss", {"loss": {"clip_low": 0.2}}),
        ("loss", {"loss": None}),
        ("correction.cap", {"correction": {"name": "none", "cap": 2.0}}),
        ("beta", {"beta": -0.1}),
        ("beta", {"beta": math.inf}),
        ("beta", {"beta": "0.1"}),
        ("kl", {"kl": "k4"}),
        ("max_completion_length", {"max_completion_length": 0}),
        ("max_completion_length", {"max_completion_length": "4"}),
        ("world_size", {"world_size": 0}),
        ("world_size", {"world_size": 1.5}),
        ("micro_batches", {"micro_batches": []}),
        ("micro_batches", {"micro_batches": good()}),
        ("micro_batches[0]", {"micro_batches": [[1.0]]}),
        ("entropy_coef", {"entropy_coef": -0.1}),
        ("top_entropy_quantile", {"top_entropy_quantile": 1.5}),
        ("off_policy_mask_threshold", {"off_policy_mask_threshold": -1.0}),
        ("off_policy_mask_threshold", {"off_policy_mask_threshold": math.inf}),
    ],
)
def test_settings_out_of_range(options: dict[str, Any], key: str) -> None:
    assert refused(**options).key == key


@pytest.mark.parametrize(
    ("options", "key", "near"),
    [
        ({"loss": "dapoo"}, "loss", "dapo"),
        ({"correction": "token_truncate"}, "correction", "token-truncate"),
        ({"micro_batches": [{**good(), "entrop": 0}]}, "micro_batches[0].entrop", "entropy"),
    ],
    ids=["loss", "correction", "tensor"],
)
def test_a_misspelt_name_is_told_with_the_nearest(options: dict[str, Any], key: str, near: str) -> None:
    problem = refused(**options)
    assert (problem.key, problem.nearest) == (key, near)


@pytest.mark.parametrize(
    ("missing", "options"),
    [
        *((name, {"beta": 0.1}) for name in ("logprobs", "advantages", "token_mask", "ref_logprobs")),
        ("entropy", {"entropy_coef": 0.1}),
        ("entropy", {"top_entropy_quantile": 0.5}),
    ],
)
def test_a_missing_tensor_is_named_with_its_micro_batch(missing: str, options: dict[str, float]) -> None:
    second = good()
    del second[missing]
    assert refused(micro_batches=[good(), second], **options).key == f"micro_batches[1].{missing}"


@pytest.mark.parametrize("value", [0.5, math.nan])
def test_a_mask_of_other_numbers_is_refused(value: float) -> None:
    problem = refused(micro_batches=[{**good(), "token_mask": torch.full((2, 3), value)}])
    assert (problem.key, problem.what) == ("micro_batches[0].token_mask", "holds something else than 0 and 1")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("logprobs", (2, 3, 1)),
        ("old_logprobs", (1, 3)),
        ("sampler_logprobs", (3, 2)),
        ("ref_logprobs", (2,)),
        ("entropy", ()),
        ("advantages", (2, 1)),
        ("advantages", (1,)),
        ("token_mask", (2,)),
    ],
)
def test_a_wrong_shape_is_refused_even_where_it_would_broadcast(name: str, shape: tuple[int, ...]) -> None:
    problem = refused(micro_batches=[{**good(), name: torch.zeros(shape)}])
    assert problem.key == f"micro_batches[0].{name}"
    assert str(shape) in problem.what + str(problem.given)


LOSSES = """
from grpox.contracts import LossOutput, Reduction

class Weighted:
    reduction = Reduction.SEQUENCE_SUM
    needs = ("rewards", "sequence_ids")
    def per_token(self, inputs):
        weight = inputs.rewards.sum(1) * inputs.sequence_ids
        return LossOutput(-weight[:, None] * inputs.logprobs)

class Referred(Weighted):
    needs = ("reference_logprobs",)
    def per_token(self, inputs):
        return LossOutput((inputs.logprobs - inputs.reference_logprobs).square())

class Tabular(Weighted):
    needs = ("columns",)
"""


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("losses.py").write_text(LOSSES)


def micro_batch(**tensors: Any) -> dict[str, Tensor]:
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
    return {"logprobs": logprobs, "advantages": torch.ones(2), "token_mask": torch.ones(2, 2), **tensors}


def gradient(loss: str, batch: dict[str, Tensor]) -> list[list[float]]:
    _, [made] = step_gradient({"path": f"losses.py:{loss}"}, [batch], max_completion_length=2)
    rows: list[list[float]] = made.tolist()
    return rows


def test_rewards_numbers_and_a_reference_without_a_penalty_reach_the_loss(losses: None) -> None:
    rewards = torch.tensor([[0.5, 1.0], [0.25, 0.0]])
    batch = micro_batch(rewards=rewards, sequence_ids=torch.tensor([2, 4]))
    # -(0.5 + 1) * 2 and -0.25 * 4, each over two sequences
    assert gradient("Weighted", batch) == [[-1.5, -1.5], [-0.5, -0.5]]
    reference = torch.tensor([[-2.0, -2.0], [-0.5, -1.0]])
    assert gradient("Referred", micro_batch(ref_logprobs=reference)) == [[1.0, 0.0], [0.0, -2.0]]


REWARDS, REWARDS_OF_3 = {"rewards": torch.ones(2, 1)}, {"rewards": torch.ones(3, 1)}


@pytest.mark.parametrize(
    ("loss", "tensors", "key"),
    [
        ("Weighted", {"sequence_ids": torch.arange(2)}, "micro_batches[0].rewards"),
        ("Weighted", {**REWARDS, "sequence_ids": torch.arange(3)}, "micro_batches[0].sequence_ids"),
        ("Weighted", {**REWARDS_OF_3, "sequence_ids": torch.ones(2)}, "micro_batches[0].rewards"),
        ("Referred", {}, "micro_batches[0].ref_logprobs"),
        ("Tabular", {}, "loss"),
    ],
)
def test_what_is_missing_or_of_another_shape_is_refused(
    losses: None, loss: str, tensors: dict[str, Tensor], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        gradient(loss, micro_batch(**tensors))
    assert key in [problem.key for problem in caught.value.problems]
