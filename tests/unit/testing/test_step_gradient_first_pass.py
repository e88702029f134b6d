"""A first pass, where pi is still pi_old, and a step in which every token is masked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.reference.batches import MicroBatch, T, ragged_batch, split, with_garbage

from grpox.testing import step_gradient

LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo")
KLS = ("k1", "k2", "k3", "unbiased")
CORRECTIONS = ("token-truncate", "token-mask", "sequence-truncate", "sequence-mask", "geometric-mask")
PARTS = [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
LENGTH = 16


def first_pass() -> MicroBatch:
    batch = ragged_batch()
    return {**batch, "old_logprobs": batch["logprobs"].clone(), "ref_logprobs": batch["logprobs"].clone()}


@pytest.mark.parametrize("kl", KLS[1:])
@pytest.mark.parametrize("loss", LOSSES)
def test_kl_of_a_policy_to_itself_and_its_gradient_are_zero(loss: str, kl: str) -> None:
    """But for k1, whose slope is 1 at every token (its mean over samples of pi is 0)."""
    batch = first_pass()
    plain = step_gradient(loss, [batch], max_completion_length=LENGTH)
    value, gradients = step_gradient(loss, [batch], beta=0.7, kl=kl, max_completion_length=LENGTH)
    assert value == plain[0]
    torch.testing.assert_close(gradients[0], plain[1][0], rtol=0, atol=1e-15)


@pytest.mark.parametrize("loss", [*LOSSES, {"name": "grpo", "level": "sequence"}], ids=str)
def test_old_logprobs_may_be_left_out(loss: Any) -> None:
    batch = first_pass()
    options: dict[str, Any] = {"beta": 0.3, "kl": "unbiased", "correction": "token-mask"}
    given = step_gradient(loss, [batch], **options, max_completion_length=LENGTH)
    del batch["old_logprobs"]
    value, gradients = step_gradient(loss, [batch], **options, max_completion_length=LENGTH)
    assert value == given[0]
    assert torch.equal(gradients[0], given[1][0])


# -- Nothing to train on ---------------------------------------------------------------------------------


WITHOUT_TOKENS = [
    *((loss, {}) for loss in (*LOSSES, {"name": "dapo", "level": "sequence", "delta": 2.0})),
    *(("grpo", {"correction": c, "beta": 0.1, "kl": kl}) for c in CORRECTIONS for kl in KLS),
]


@pytest.mark.parametrize("garbage", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("loss", "options"), WITHOUT_TOKENS, ids=str)
def test_a_step_without_tokens_is_exactly_zero(
    loss: Any, options: dict[str, Any], ranks: int, garbage: float | None
) -> None:
    batch = ragged_batch()
    batch["token_mask"] = torch.zeros_like(batch["token_mask"])
    if garbage is not None:
        batch = with_garbage(batch, garbage)
    options = {**options, "max_completion_length": LENGTH, "world_size": ranks}
    value, gradients = step_gradient(loss, split(batch, PARTS), **options)
    assert value.item() == 0
    for gradient, part in zip(gradients, PARTS, strict=True):
        assert torch.equal(gradient, torch.zeros(len(part), T, dtype=torch.float64))
