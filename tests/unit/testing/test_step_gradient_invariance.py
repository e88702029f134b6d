"""The same rows give the same loss and gradient, however they are split, ordered and padded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from support.reference.batches import (
    ROWS,
    MicroBatch,
    T,
    joined,
    ragged_batch,
    split,
    take,
    widened,
    with_garbage,
    with_token_advantages,
)
from torch import Tensor

from grpox.testing import step_gradient

TOLERANCE = 1e-12
ALL = list(range(len(ROWS)))
EMPTY = next(i for i, row in enumerate(ROWS) if row.tokens == 0)

GLOBAL: tuple[Mapping[str, Any], ...] = (
    {"loss": "grpo"},
    {"loss": "grpo", "beta": 0.2, "kl": "k3", "correction": "token-truncate"},
    {"loss": {"name": "grpo", "level": "sequence", "clip_high": 0.28}, "correction": "sequence-mask"},
    {"loss": "dr_grpo", "beta": 0.2, "kl": "k1"},
    {"loss": {"name": "dr_grpo", "delta": 2.0}, "correction": "sequence-truncate"},
    {"loss": "dapo"},
    {"loss": {"name": "dapo", "clip_high": 0.28, "level": "sequence"}, "beta": 0.2, "kl": "unbiased"},
    {"loss": "cispo", "beta": 0.2, "kl": "k2", "correction": "token-mask"},
    {"loss": "sapo", "beta": 0.2, "correction": "geometric-mask"},
    {"loss": "grpo", "top_entropy_quantile": 0.4, "off_policy_mask_threshold": 0.4, "beta": 0.2},
    {"loss": "dapo", "entropy_coef": 0.1, "top_entropy_quantile": 0.2, "correction": "token-truncate"},
)
SPLITS: Mapping[str, Sequence[Sequence[int]]] = {
    "halves": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]],
    "uneven": [[0], [1, 2, 3, 4, 5, 6], [7, 8], [9]],
    "a row each": [[i] for i in ALL],
    "an empty micro-batch last": [[i for i in ALL if i != EMPTY], [EMPTY]],
    "an empty micro-batch first": [[EMPTY], [9, 8], [i for i in ALL if i not in (EMPTY, 9, 8)]],
    "another order": [[6, 3, 9, 0, 7, 2, 5, 8, 1, 4]],
}

each_global = pytest.mark.parametrize("options", GLOBAL, ids=lambda options: str(dict(options)))


def run(batch: MicroBatch, parts: Sequence[Sequence[int]], options: Mapping[str, Any], ranks: int = 1) -> Any:
    """Loss and gradient f64[B, T] in the order of `batch`, whose rows are split into `parts`."""
    options = {"max_completion_length": 16, **options}
    loss, gradients = step_gradient(micro_batches=split(batch, parts), world_size=ranks, **options)
    return loss, joined(gradients, parts)


def same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SPLITS)
@each_global
def test_any_split_into_micro_batches_and_ranks(options: Mapping[str, Any], name: str, ranks: int) -> None:
    """Ranks take turns: most splits give them different numbers of micro-batches, some give one none."""
    batch = ragged_batch()
    same(run(batch, SPLITS[name], options, ranks), run(batch, [ALL], options))


@each_global
def test_micro_batches_may_be_padded_and_padded_differently(options: Mapping[str, Any]) -> None:
    batch = ragged_batch()
    loss, gradient = run(batch, [ALL], options)
    wide_loss, wide_gradient = run(widened(batch, 5), [ALL], options)
    same((wide_loss, wide_gradient[:, :T]), (loss, gradient))
    assert not wide_gradient[:, T:].any()
    halves = [take(batch, ALL[:4]), widened(take(batch, ALL[4:]), 3)]
    options = {"max_completion_length": 16, **options}
    got_loss, (first, second) = step_gradient(micro_batches=halves, world_size=2, **options)
    assert second.shape == (6, T + 3)
    same((got_loss, torch.cat([first, second[:, :T]])), (loss, gradient))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e4, -1e4])
@each_global
def test_masked_positions_do_not_matter(options: Mapping[str, Any], garbage: float) -> None:
    """In any input, nor does the advantage of a completion without tokens; the gradient is exactly 0 there."""
    batch = ragged_batch()
    dirty = with_garbage(batch, garbage)
    loss, gradient = run(dirty, [ALL[:4], ALL[4:]], options, ranks=2)
    same((loss, gradient), run(batch, [ALL], options))
    assert torch.equal(gradient[~batch["token_mask"]], torch.zeros(int((~batch["token_mask"]).sum())).double())


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e4])
@pytest.mark.parametrize("loss", ["sapo", "cispo", {"name": "grpo", "level": "sequence"}], ids=str)
def test_masked_advantages_of_tokens_do_not_matter(loss: Any, garbage: float) -> None:
    """At the sequence level w is shared: a NaN at one position could reach every token of the row."""
    batch = with_token_advantages(ragged_batch())
    same(run(with_garbage(batch, garbage), [ALL], {"loss": loss}), run(batch, [ALL], {"loss": loss}))


def test_bnpo_in_one_micro_batch_is_dapo() -> None:
    batch = ragged_batch()
    same(run(batch, [ALL], {"loss": "bnpo", "beta": 0.1}), run(batch, [ALL], {"loss": "dapo", "beta": 0.1}))


LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo")
CORRECTIONS = ("token-truncate", "token-mask", "sequence-truncate", "sequence-mask", "geometric-mask")
KLS = ("k1", "k2", "k3", "unbiased")


@pytest.mark.parametrize("loss", [*LOSSES, {"name": "grpo", "level": "sequence"}], ids=str)
def test_old_logprobs_may_be_left_out(loss: Any) -> None:
    batch = ragged_batch()
    batch["old_logprobs"] = batch["logprobs"].clone()
    options = {"loss": loss, "beta": 0.3, "kl": "unbiased", "correction": "token-mask"}
    value, gradient = run(batch, [ALL], options)
    del batch["old_logprobs"]
    without, gradient_without = run(batch, [ALL], options)
    assert without == value
    assert torch.equal(gradient_without, gradient)


@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        *((loss, {}) for loss in (*LOSSES, {"name": "dapo", "level": "sequence", "delta": 2.0})),
        *(("grpo", {"correction": c, "beta": 0.1, "kl": kl}) for c in CORRECTIONS for kl in KLS),
    ],
    ids=str,
)
def test_a_step_without_tokens_is_exactly_zero(loss: Any, options: dict[str, Any], garbage: float) -> None:
    batch = ragged_batch()
    batch["token_mask"] = torch.zeros_like(batch["token_mask"])
    batch, options = with_garbage(batch, garbage), {"loss": loss, **options}
    for ranks in (1, 2):
        value, gradient = run(batch, [ALL[:4], ALL[4:]], options, ranks)
        assert value.item() == 0
        assert torch.equal(gradient, torch.zeros(len(ALL), T, dtype=torch.float64))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bnpo_with_a_row_in_each_micro_batch_is_grpo(ranks: int) -> None:
    """The row without tokens included: it is a micro-batch and a completion, and both count."""
    batch = ragged_batch()
    same(
        run(batch, SPLITS["a row each"], {"loss": "bnpo", "beta": 0.1}, ranks),
        run(batch, [ALL], {"loss": "grpo", "beta": 0.1}),
    )
