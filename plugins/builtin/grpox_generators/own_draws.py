"""Uniform numbers of prompts that have a seed of their own, whatever else is sampled with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpox.contracts import Prompt

AT_A_TIME = 64
"""Tokens for which a prompt's numbers are drawn at once. Another number would draw others."""


def own_uniform(prompts: Sequence[Prompt], device: torch.device) -> Callable[[], Tensor] | None:
    """What gives the numbers of each next token, a row for each completion of each prompt.

    Returns:
        None unless every prompt has a seed.
    """
    seeds = [prompt.seed for prompt in prompts if prompt.seed is not None]
    if not prompts or len(seeds) < len(prompts):
        return None
    return _OwnUniform(seeds, [prompt.num_samples for prompt in prompts], device)


class _OwnUniform:
    """One generator a prompt. They are the CPU's, so that every device samples the same."""

    def __init__(self, seeds: Sequence[int], sizes: Sequence[int], device: torch.device) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._sizes = sizes
        self._device = device
        self._numbers = torch.empty(sum(sizes), 0, dtype=torch.float64)
        """f64[N, S], S at most `AT_A_TIME`: of the tokens that come next."""

    def __call__(self) -> Tensor:
        """f64[N, 1], of the next token."""
        if not self._numbers.shape[1]:
            drawn = [
                torch.rand(size, AT_A_TIME, generator=generator, dtype=torch.float64)
                for generator, size in zip(self._generators, self._sizes, strict=True)
            ]
            self._numbers = torch.cat(drawn).to(self._device)
        now, self._numbers = self._numbers[:, :1], self._numbers[:, 1:]
        return now
