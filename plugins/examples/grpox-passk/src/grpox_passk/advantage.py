"""Pass@k training: a completion is worth what it adds to sets of k, of which one has to be right.

The numbers are those of `grpox_passk.closed_form`; here completions are told right from wrong and counted.
"""

from __future__ import annotations

import torch
from grpox.errors import ConfigError
from torch import Tensor

from grpox_passk.closed_form import passk_advantages
from grpox_passk.config import PasskAdvantageConfig


class PasskAdvantage:
    """Pass@k training with the analytical advantage (arXiv 2508.10751).

    A prompt that is often right is solved as far as sets of k can tell, and gives way to those that seldom are.
    """

    def __init__(self, config: PasskAdvantageConfig) -> None:
        self.config = config

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        """rewards f32[N, K] (NaN: that function abstained), weights f32[K], group_ids i64[N] -> f32[N].

        A completion that no function scored gets 0, and is in no set.

        Raises:
            ConfigError: a group is too small for k.
        """
        scored = ~rewards.isnan().all(dim=1)  # bool[N]
        total = (rewards.double() * weights.double()).nansum(dim=1)  # f64[N]
        right = scored & (total >= self.config.threshold)
        names, groups = torch.unique(group_ids, return_inverse=True)

        def count(rows: Tensor) -> list[int]:
            return torch.bincount(groups[rows], minlength=len(names)).tolist()

        sizes = torch.bincount(groups).tolist()
        pairs = [
            passk_advantages(of_right, of_wrong, self._k(size))
            for of_right, of_wrong, size in zip(count(right), count(scored & ~right), sizes, strict=True)
        ]
        of_group = total.new_tensor(pairs)[groups]  # f64[N, 2]: of a right one, of a wrong one
        advantages = torch.where(right, of_group[:, 0], of_group[:, 1])
        return torch.where(scored, advantages, 0.0).float()

    def _k(self, size: int) -> int:
        """Completions of a set, in a group of `size`, those that nobody scored included."""
        if self.config.k is None:
            return max(1, size // 4)
        if self.config.k > 1 and size <= self.config.k:
            raise ConfigError(
                f"a group of {size} completions has no two sets of k = {self.config.k} to compare",
                "advantage.k",
                given=f"k {self.config.k}, train.num_generations {size}",
                allowed=f"k below {size}, or more completions a prompt",
            )
        return self.config.k
