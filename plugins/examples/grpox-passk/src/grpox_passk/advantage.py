"""Pass@k training: a completion is worth what it adds to sets of k, of which one has to be right.

The advantages come in closed form, over all sets of k among the completions of a group:

    fail = C(n_wrong, k) / C(n, k)                           the share of sets without a right completion
    std  = sqrt(fail (1 - fail))                             of the reward of a set: 1 if one is right, else 0

    A_right = fail / std                                     every set with it is rewarded
    A_wrong = (fail - C(n_wrong-1, k-1) / C(n-1, k-1)) / std     a set with it fails if its others are wrong too
"""

from __future__ import annotations

from math import comb, sqrt

import torch
from grpox.errors import ConfigError
from torch import Tensor

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
        """Completions of a set, in a group of `size`, unscored ones included."""
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


def passk_advantages(right: int, wrong: int, k: int) -> tuple[float, float]:
    """The advantage of a right and of a wrong completion, equations 14 and 15 of arXiv 2508.10751.

    Each is the mean over the sets that it is in of (reward - mean) / std, and they add up to 0 over the group.
    Both are 0 where every set gets the same reward: none is right, fewer than k are wrong, or there is no set.
    """
    completions = right + wrong
    if right == 0 or wrong < k or completions <= k:
        return 0.0, 0.0
    fail = comb(wrong, k) / comb(completions, k)
    std = sqrt(fail * (1 - fail))
    fail_with_a_wrong_one = comb(wrong - 1, k - 1) / comb(completions - 1, k - 1)
    return fail / std, (fail - fail_with_a_wrong_one) / std
