"""Numbers at tokens that the model did not write change nothing, to the last bit.

Prompts within a group may differ, because environments may begin each episode otherwise.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.small_models import far, gradient_of
from test_packing import ALL_OFF, WORLD
from test_policy_terms import expected, small_model, update

from grpox.contracts import Rollout, Turn
from grpox.data.schedule import MicroBatchPlan, StepPlan
from grpox.policy.attention import set_attention
from grpox.policy.batch import Sample, samples_of
from grpox.training.generation_feed import keep_reported
from grpox.update.step_statistics import StepStatistics

Fill = Callable[[int], np.ndarray]
"""Number of values -> f32 of them, which lie where the model did not write."""
FILLS: dict[str, Fill] = {
    "nan": lambda count: np.full(count, np.nan, np.float32),
    "inf": lambda count: np.full(count, -np.inf, np.float32),
    "huge": lambda count: np.full(count, 1e30, np.float32),
    "random": lambda count: np.random.default_rng(count).normal(-2, 3, count).astype(np.float32),
}
MODES: dict[str, dict[str, Any]] = {
    "full logits": ALL_OFF,
    "padded": {"prefix_sharing": False, "packing": False},
    "packed": {"prefix_sharing": False, "packing": True},
    "shared": {"prefix_sharing": True},
    "budget": {"prefix_sharing": True, "max_tokens_per_micro_batch": 40},
}


def episodes(by_token: bool = False) -> list[list[Sample]]:
    """Two micro-batches of two groups of four: two turns each, and an observation between them.

    Half of a group begin as the data does, the others each with an observation of their own behind it.
    """
    rng = random.Random(3)

    def ids(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, 100) for _ in range(rng.randint(least, most)))

    made = []
    for _ in range(2):
        rollouts, advantages = [], []
        for row in range(8):
            prompt = (5, 6, 7 + row // 4) + (() if row % 4 < 2 else ids(1, 3))
            parts = ids(1, 3), ids(1, 2), ids(1, 4)
            begin = len(parts[0]) + len(parts[1])
            completion = sum(parts, ())
            mask = tuple(place != 1 for place, part in enumerate(parts) for _ in part)
            turns = (Turn(0, len(parts[0]), "stop", 0), Turn(begin, len(completion), "stop", 0))
            logprobs = tuple(rng.uniform(-6, -3) if own else math.nan for own in mask)
            rollouts.append(Rollout(row // 4, row % 4, prompt, completion, "stop", 0, logprobs, mask, turns))
            own = np.array([rng.choice([-1.3, 0.7]) for _ in completion], np.float32)
            advantages.append(
                np.where(mask, own, 0).astype(np.float32) if by_token else rng.choice([-1.3, 0.7])
            )
        made.append(samples_of(rollouts, advantages))
    return made


def later(micro_batches: list[list[Sample]], fill: Fill) -> list[list[Sample]]:
    """As in a second pass: old and reference log-probabilities, which have `fill` where nobody trains."""
    for sample in itertools.chain.from_iterable(micro_batches):
        masked = torch.from_numpy(~sample.token_mask)
        count = int(masked.sum())
        for name, value, change in (("old_logprobs", -4.6, -1.5), ("reference_logprobs", -4.7, 0.0)):
            values = torch.full((len(sample.completion),), value, dtype=torch.float64)
            values[::2] += change
            values[masked] = torch.from_numpy(fill(count)).double()
            setattr(sample, name, values)
    return micro_batches


def filled(micro_batches: list[list[Sample]], fill: Fill) -> list[list[Sample]]:
    """Replace what the generator reported where it did not sample."""
    for sample in itertools.chain.from_iterable(micro_batches):
        sample.sampler_logprobs[~sample.token_mask] = fill(int((~sample.token_mask).sum()))
        if isinstance(sample.advantage, np.ndarray):
            sample.advantage = np.where(sample.token_mask, sample.advantage, fill(len(sample.advantage)))
    return micro_batches


class Outcome:
    """Results of a step: gradient, metrics, statistics, and pi_old of the tokens that are trained on."""

    def __init__(
        self, micro_batches: list[list[Sample]], loss: str, correction: str, packed: bool = False, **train: Any
    ) -> None:
        band = {"low": 0.0, "high": 1e6} if correction.endswith("mask") else {}  # keeps something
        names = ("ratio", "kl_old", "entropy", "advantages", "reward", "advantage", "length")
        statistics = StepStatistics({(name, "gather"): "a test" for name in names})
        model = small_model()
        if packed:
            set_attention(model, "grpox_varlen")
        chosen = {"name": correction, **band}
        taken = update(model, loss, correction=chosen, statistics=statistics, **train)
        self.mode = taken.engine.mode
        taken.score_old(micro_batches[1:])
        self.metrics = taken.step(micro_batches[:1])
        plan = StepPlan(1, (MicroBatchPlan(0, 0, range(8), 8),))
        reduced = statistics.reduce(plan, micro_batches[:1], WORLD)
        self.statistics = {name: values.numpy() for (name, _), values in reduced.items()}  # type: ignore[union-attr]
        self.gradient = gradient_of(model)
        self.old = [
            sample.old_logprobs[torch.from_numpy(sample.token_mask)]
            for sample in itertools.chain.from_iterable(micro_batches)
            if sample.old_logprobs is not None
        ]

    def assert_same(self, other: Outcome) -> None:
        assert self.metrics == other.metrics  # equal to the last bit; none is NaN
        assert self.gradient.numpy().tobytes() == other.gradient.numpy().tobytes()
        for name, values in self.statistics.items():
            assert values.tobytes() == other.statistics[name].tobytes(), name
        assert len(self.old) == len(other.old) == 16
        assert all(
            one.numpy().tobytes() == two.numpy().tobytes() for one, two in zip(self.old, other.old, strict=True)
        )


CASES = [
    ("grpo", "token-truncate", "full logits", {"beta": 0.1, "entropy_coef": 0.3}),
    ("dapo", "sequence-mask", "padded", {"off_policy_mask_threshold": 1.0, "entropy_coef": 0.3}),
    ("cispo", "geometric-mask", "packed", {"beta": 0.1, "kl": "unbiased"}),
    ("gspo-token", "sequence-truncate", "shared", {"beta": 0.1, "top_entropy_quantile": 0.3}),
    ("dr_grpo", "token-mask", "budget", {"entropy_coef": 0.3}),
]


@pytest.mark.parametrize("is_later", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize(("loss", "correction", "mode", "terms"), CASES, ids=[case[2] for case in CASES])
def test_a_step_is_the_same_to_the_last_bit(
    loss: str, correction: str, mode: str, terms: dict[str, Any], is_later: bool
) -> None:
    outcomes = []
    for fill in FILLS.values():
        micro_batches = filled(episodes(by_token=mode == "shared"), fill)
        if is_later:
            later(micro_batches, fill)
        else:
            terms = {name: value for name, value in terms.items() if name != "beta"}  # needs a reference
        outcomes.append(Outcome(micro_batches, loss, correction, mode == "packed", **MODES[mode], **terms))
    first = outcomes[0]
    assert first.mode.packed == (mode == "packed")
    assert bool(first.mode.shared_width) == (mode in ("shared", "budget"))
    assert all(math.isfinite(value) for value in first.metrics.values())
    assert first.metrics["mismatch/missing_logprobs"] == 0  # of the model's own tokens none is missing
    assert float(first.gradient.norm()) > 0
    for outcome in outcomes[1:]:
        first.assert_same(outcome)


def test_the_generators_own_log_probabilities_as_pi_old_need_none_where_it_did_not_sample() -> None:
    outcomes = []
    for fill in (FILLS["nan"], FILLS["random"]):
        micro_batches = filled(episodes(), fill)
        keep_reported([*micro_batches[0], *micro_batches[1]], 0, WORLD.device)
        outcomes.append(Outcome(micro_batches, "grpo", "none", **MODES["shared"]))
    outcomes[0].assert_same(outcomes[1])
    assert outcomes[0].metrics["ratio/mean"] != 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
def test_groups_of_different_prompts_have_the_gradient_of_the_reference(loss: str, mode: str) -> None:
    """The reference computes each sequence by itself, over the model's own tokens."""
    micro_batches = later(episodes(), FILLS["nan"])
    clean = later(
        filled(episodes(), lambda count: np.zeros(count, np.float32)), lambda n: np.zeros(n, np.float32)
    )
    wanted, value = expected(clean[:1], loss, beta=0.1)
    found = Outcome(copy.deepcopy(micro_batches), loss, "none", mode == "packed", beta=0.1, **MODES[mode])
    assert far(found.gradient, wanted) < 1e-6
    assert found.metrics["loss"] == pytest.approx(value, rel=1e-6)
    lengths = [int(sample.token_mask.sum()) for sample in micro_batches[0]]
    assert found.statistics["length"].tolist() == lengths


def test_a_completion_that_ran_out_of_room_is_left_out_whole_and_counts_as_its_own_length() -> None:
    rollouts = [
        Rollout(0, place, (1,), (2, 3, 4), reason, 0, None, (True, False, True), (Turn(0, 1, "stop", 0),))
        for place, reason in enumerate(("stop", "length", "budget", "turns", "done", "error"))
    ]
    samples = samples_of(rollouts, [1.0] * 6, mask_truncated=True)
    assert [int(sample.token_mask.sum()) for sample in samples] == [2, 0, 0, 2, 2, 2]
    assert [sample.model_length for sample in samples] == [2] * 6
