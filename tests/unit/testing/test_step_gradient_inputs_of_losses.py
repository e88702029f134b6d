"""`step_gradient` with a loss that needs rewards or numbers of sequences: their shapes, and what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpox.errors import ConfigError
from grpox.testing import step_gradient

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


@pytest.fixture(autouse=True)
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


def test_rewards_and_numbers_reach_the_loss() -> None:
    rewards = torch.tensor([[0.5, 1.0], [0.25, 0.0]])
    batch = micro_batch(rewards=rewards, sequence_ids=torch.tensor([2, 4]))
    # -(0.5 + 1) * 2 and -0.25 * 4, each over two sequences
    assert gradient("Weighted", batch) == [[-1.5, -1.5], [-0.5, -0.5]]


def test_the_reference_reaches_the_loss_without_a_penalty() -> None:
    reference = torch.tensor([[-2.0, -2.0], [-0.5, -1.0]])
    assert gradient("Referred", micro_batch(ref_logprobs=reference)) == [[1.0, 0.0], [0.0, -2.0]]


@pytest.mark.parametrize(
    ("loss", "tensors", "key"),
    [
        ("Weighted", {"sequence_ids": torch.arange(2)}, "micro_batches[0].rewards"),
        (
            "Weighted",
            {"rewards": torch.ones(2, 1), "sequence_ids": torch.arange(3)},
            "micro_batches[0].sequence_ids",
        ),
        (
            "Weighted",
            {"rewards": torch.ones(3, 1), "sequence_ids": torch.arange(2)},
            "micro_batches[0].rewards",
        ),
        ("Referred", {}, "micro_batches[0].ref_logprobs"),
        ("Tabular", {}, "loss"),
    ],
)
def test_what_is_missing_or_of_another_shape_is_refused(
    loss: str, tensors: dict[str, Tensor], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        gradient(loss, micro_batch(**tensors))
    assert key in [problem.key for problem in caught.value.problems]
