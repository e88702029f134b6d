"""The work that benchmarks of updates and steps do: lengths as in real runs, and groups of which some teach.

Completions of a real run differ much in length, and many groups are all right or all wrong, so that nothing is
learnt from them. Both decide what padding, sorting and skipping are worth; so they are made here, the same for
whoever is compared.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

from grpox.contracts import Rollout

INFORMATIVE = 0.6
"""The part of the groups whose rewards differ, as in a run that is neither hopeless nor done."""


def varied_lengths(count: int, longest: int, seed: int) -> list[int]:
    """Lengths of `count` completions: their mean is a third of `longest`, which one of them has.

    The squares of evenly spread numbers: many short ones, few long. Every seed gives the same in another order.
    """
    lengths = [max(1, round(longest * ((place + 0.5) / count) ** 2)) for place in range(count)]
    lengths[-1] = longest
    random.Random(seed).shuffle(lengths)
    return lengths


def is_informative(group: int) -> bool:
    """Tell whether group `group` of a run has differing rewards: a share `INFORMATIVE` of groups does, evenly
    spread."""
    return floor(round((group + 1) * INFORMATIVE, 9)) > floor(round(group * INFORMATIVE, 9))


@dataclass(frozen=True)
class Step:
    """The rollouts of one optimizer step in row order, and an advantage for each."""

    rollouts: Sequence[Rollout]
    advantages: Sequence[float]

    @property
    def tokens(self) -> int:
        """Tokens of prompts and completions, without padding."""
        return sum(len(r.prompt_ids) + len(r.completion_ids) for r in self.rollouts)


def step_of(prompts: Sequence[Sequence[int]], number: int, groups: int, samples: int, longest: int) -> Step:
    """Step `number` of a run over `prompts`, its completions made of tokens that the prompts hold."""
    pool = [token for prompt in prompts for token in prompt]
    lengths = varied_lengths(groups * samples, longest, seed=number)
    rng = random.Random(number)
    rollouts, advantages = [], []
    for row, length in enumerate(lengths):
        group, sample = divmod(row, samples)
        prompt = prompts[(number * groups + group) % len(prompts)]
        completion = tuple(rng.choices(pool, k=length))
        rollouts.append(Rollout(group, sample, tuple(prompt), completion, "stop", 0))
        teaches = is_informative(number * groups + group)
        advantages.append((1.0 if sample % 2 else -1.0) if teaches else 0.0)
    return Step(rollouts, advantages)
