"""Micro-batches from ratios, and the comparison of a step with numbers worked by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Step = Callable[..., tuple[Tensor, list[Tensor]]]
Rows = Sequence[Sequence[float]]
TOLERANCE = 1e-12


def micro_batch(
    w: Rows,
    advantages: Sequence[float],
    logprobs: Rows | None = None,
    correction: Rows | None = None,
    ref: Rows | None = None,
) -> dict[str, Tensor]:
    """Completions from their ratios; `correction` is pi_old/mu, `ref` is ref/pi, log pi is -1 if not given."""
    width = max(len(row) for row in w)

    def tensor(rows: Rows, fill: float) -> Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.float64)

    current = tensor(logprobs or [[-1.0] * len(row) for row in w], 0.0)
    old = current - tensor(w, 1.0).log()
    batch = {
        "logprobs": current,
        "old_logprobs": old,
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "token_mask": tensor([[1.0] * len(row) for row in w], 0.0).bool(),
    }
    if correction is not None:
        batch["sampler_logprobs"] = old - tensor(correction, 1.0).log()
    if ref is not None:
        batch["ref_logprobs"] = current + tensor(ref, 1.0).log()
    return batch


def check(result: tuple[Tensor, list[Tensor]], loss: float, *gradients: Sequence[float]) -> None:
    """Fails unless these are the loss and the gradients: a row for each completion, without its padding."""
    value, parts = result
    rows = [row for part in parts for row in part]
    torch.testing.assert_close(value, torch.tensor(loss, dtype=torch.float64), rtol=0, atol=TOLERANCE)
    for row, given in zip(rows, gradients, strict=True):
        expected = torch.tensor([*given, *[0.0] * (len(row) - len(given))], dtype=torch.float64)
        torch.testing.assert_close(row, expected, rtol=0, atol=TOLERANCE)
