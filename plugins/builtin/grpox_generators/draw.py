"""The draw of each next token, and its log-probability.

Drawn by the inverse of the cumulated probabilities: one uniform number a row, where torch.multinomial makes a
random number for each token of the vocabulary, which on CPU takes longer than the model's attention.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LogitsProcessor


class NoProbabilities(Exception):
    """The scores of a row are no distribution: not finite, or every token forbidden."""


class Draw(LogitsProcessor):  # type: ignore[misc]
    """Draws each next token; must be the last processor of a generate() that takes the largest score.

    A row's random numbers do not depend on which other rows still run.

    Args:
        rows: N, completions of the batch.
        length: T, the longest that a completion may get.
        greedy: take the likeliest token instead.
        device: of the scores.
        uniform: gives N uniform numbers, f64[N, 1], for each token; default: those of torch's global state.
    """

    def __init__(
        self,
        rows: int,
        length: int,
        greedy: bool,
        device: torch.device,
        uniform: Callable[[], Tensor] | None = None,
    ) -> None:
        self.greedy = greedy
        self._uniform = uniform
        self.logprobs = torch.zeros(rows, length, device=device)
        """f32[N, T], of the tokens drawn; 0 where none was."""
        self._running = torch.arange(rows, device=device)
        self._drawn = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores f32[B, V] of the rows that still run, the drawn token's raised above all others.

        Raises:
            NoProbabilities: there is nothing to draw from.
        """
        probabilities = scores.softmax(dim=-1)
        sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
        if not sums[:, -1].isfinite().all():
            raise NoProbabilities
        tokens = scores.argmax(dim=-1, keepdim=True) if self.greedy else self._inverse(sums)
        # Where one token of many is likely, the float32 softmax's own sum is off by 1e-5.
        drawn = probabilities.gather(-1, tokens) / sums[:, -1:]
        self.logprobs[self._running, self._drawn] = drawn.log().squeeze(-1).float()
        self._drawn += 1
        return scores.scatter_(-1, tokens, torch.inf)

    def keep(self, kept: Tensor) -> None:
        """Go on with the rows bool[B] of those of the last call."""
        self._running = self._running[kept]

    def _inverse(self, sums: Tensor) -> Tensor:
        """Tokens i64[B, 1] of cumulated probabilities f64[B, V].

        A uniform number is at most 1 - 2^-53, so what is looked for is less than the last sum, and the first
        sum above it is that of a token of positive probability.
        """
        if self._uniform is None:
            uniform = torch.rand(len(self.logprobs), 1, dtype=torch.float64, device=sums.device)
        else:
            uniform = self._uniform()
        return torch.searchsorted(sums, uniform[self._running] * sums[:, -1:], right=True)
