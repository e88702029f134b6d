"""pass@k: the chance that at least one of k completions is right, estimated without bias from n of them.

Chen et al., Evaluating Large Language Models Trained on Code (arXiv 2107.03374), equation 1:
pass@k = E over prompts of 1 - C(n - c, k) / C(n, k), where c of n completions are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def pass_at_k(n: int, c: int, k: int) -> float:
    """The share of the C(n, k) choices of k completions that hold a right one.

    Counted in whole numbers and divided once, so that nothing can overflow or cancel: the result is the float
    nearest to it.

    Args:
        n: completions of the prompt, at least k.
        c: those that are right.
        k: at least 1.

    Raises:
        ValueError: the numbers do not fit together.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} completions, {c} of them right")
    choices = comb(n, k)
    return (choices - comb(n - c, k)) / choices


def mean_pass_at_k(prompts: Sequence[tuple[int, int]], k: int) -> float | None:
    """The mean over `prompts`, (n, c) of each; those with fewer than k completions are left out.

    Returns:
        None where none is left.
    """
    found = [pass_at_k(n, c, k) for n, c in prompts if n >= k]
    return sum(found) / len(found) if found else None
