"""The advantages of pass@k training in closed form, over all sets of k among the completions of a group.

    fail = C(n_wrong, k) / C(n, k)                           the share of sets without a right completion
    std  = sqrt(fail (1 - fail))                             of the reward of a set: 1 if one is right, else 0

    A_right = fail / std                                     every set with it is rewarded
    A_wrong = (fail - C(n_wrong-1, k-1) / C(n-1, k-1)) / std     a set with it fails if its others are wrong too

This module imports no torch: both numbers depend on three counts.
"""

from __future__ import annotations

from math import comb, sqrt


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
