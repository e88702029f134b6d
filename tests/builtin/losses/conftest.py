"""Inputs of a loss from nested lists, in float32 and float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from grpox.contracts import LossInputs

Rows = Sequence[Sequence[float]]
MakeInputs = Callable[..., LossInputs]


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def make_inputs(dtype: torch.dtype) -> MakeInputs:
    def make(log_ratios: Rows, advantages: Rows, mask: Rows | None = None, old: float = -1.5) -> LossInputs:
        """Log-probabilities `old + log_ratio`; masked positions hold 0 everywhere, as the core gives."""
        token_mask = torch.ones(len(log_ratios), len(log_ratios[0])) if mask is None else torch.tensor(mask)
        token_mask = token_mask.bool()
        old_logprobs = torch.full(token_mask.shape, old, dtype=dtype).masked_fill(~token_mask, 0)
        difference = torch.tensor(log_ratios, dtype=dtype).masked_fill(~token_mask, 0)
        return LossInputs(
            logprobs=(old_logprobs + difference).requires_grad_(),
            old_logprobs=old_logprobs,
            advantages=torch.tensor(advantages, dtype=dtype).masked_fill(~token_mask, 0),
            token_mask=token_mask,
        )

    return make
