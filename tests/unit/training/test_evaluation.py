"""Evaluations: what is sampled with which seeds, and the metrics of completions whose scores are known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from grpox.config import EvaluationConfig, EvaluationSamplingConfig, SamplingConfig
from grpox.contracts import Episode, Prompt, Rollout, ScoredRollout, TrainerState, Turn
from grpox.data.prompts import PromptSet
from grpox.rollout.rewards import NamedReward
from grpox.rollout.sampler import CompletionSampler
from grpox.runtime.logs import WarnOnce, get_logger
from grpox.runtime.world import World
from grpox.training.assembly import EvaluationInputs
from grpox.training.evaluation import Evaluation, evaluation_metrics, outcomes_of, pass_at_k

ALONE = World(0, 1, torch.device("cpu"))


class Letters:
    """A tokenizer of letters: a = 1, b = 2, ..."""

    chat_template = None

    def __call__(self, texts: Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [[ord(letter) - 96 for letter in text] for text in texts]}

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]:
        return ["".join(chr(96 + i) for i in ids) for ids in sequences]


class Recording:
    """Answers each prompt with its letter, notes what it was asked for, and draws numbers of every library."""

    def __init__(self) -> None:
        self.asked: list[Prompt] = []
        self.sampling: list[SamplingConfig] = []
        self.slept = 0

    def sync(self, weights: Any, version: int) -> None: ...

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> list[Rollout]:
        self.asked += prompts
        self.sampling.append(sampling)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        return [
            Rollout(p.group_id, sample, p.token_ids, p.token_ids[:1], "stop", 0)
            for p in prompts
            for sample in range(p.num_samples)
        ]

    def wake(self) -> None: ...

    def sleep(self) -> None:
        self.slept += 1


def equals(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def evaluation(generator: Recording, rewards: Sequence[NamedReward] | None = None, **config: Any) -> Evaluation:
    engine: Any = SimpleNamespace(steps=0, weights=lambda: iter(()))
    of_training = NamedReward("training", lambda completions, **_: [9.0] * len(completions))
    rows = datasets.Dataset.from_dict({"prompt": list("abcde"), "answer": list("abxde")})
    sampler = CompletionSampler(engine, generator, ALONE, seed=3)
    single = EvaluationInputs("", PromptSet(rows, "prompt", Letters()), rewards or [of_training])
    chosen, sampling = (
        EvaluationConfig(path="heldout.jsonl", **config),
        SamplingConfig(top_p=0.5, max_completion_length=9),
    )
    return Evaluation(sampler, [single], chosen, sampling, False, WarnOnce(get_logger(__name__)))


def state(step: int = 0) -> TrainerState:
    return TrainerState(step, 10, 0.0)


def test_a_prompt_is_drawn_with_one_seed_whatever_the_batch_and_with_another_at_another_step() -> None:
    def seeds(step: int, batch_size: int) -> list[int | None]:
        generator = Recording()
        evaluation(generator, batch_size=batch_size).evaluate(state(step))
        return [prompt.seed for prompt in generator.asked]

    assert seeds(0, 2) == seeds(0, 5)
    assert len({*seeds(0, 5), *seeds(4, 5)}) == 10
    assert None not in seeds(0, 5)


def test_the_sampling_is_the_runs_but_for_what_the_evaluation_says() -> None:
    generator = Recording()
    own_keys = {"max_completion_length": 4, "top_k": 7}
    evaluation(generator, temperature=0.5, sampling=own_keys).evaluate(state())
    [sampling] = generator.sampling
    assert sampling == SamplingConfig(temperature=0.5, top_p=0.5, top_k=7, max_completion_length=4)
    own = EvaluationSamplingConfig(temperature=0.8)
    evaluation(generator, sampling=own).evaluate(state())
    assert generator.sampling[-1].temperature == 0.8


def test_every_key_of_sampling_may_be_another_and_with_the_same_bounds() -> None:
    own, runs = EvaluationSamplingConfig.model_fields, SamplingConfig.model_fields
    assert list(own) == list(runs)
    loose = {"temperature": "ge=0"}  # 0 is greedy
    for name in own:
        expected = [loose[name]] if name in loose else [repr(bound).lower() for bound in runs[name].metadata]
        given = [repr(bound).lower() for bound in own[name].metadata]
        assert len(given) == len(expected), name
        assert all(each in given[place] for place, each in enumerate(expected)), name


def test_rewards_of_its_own_take_the_place_of_the_runs() -> None:
    generator = Recording()
    assert evaluation(generator).evaluate(state())["rewards/training/mean"] == 9.0
    own = {"num_generations": 2, "temperature": 1.0, "pass_at_k": [2]}
    metrics = evaluation(generator, [NamedReward("equals", equals)], **own).evaluate(state())
    assert metrics["rewards/equals/mean"] == metrics["pass_at_2"] == 0.8
    assert "accuracy" not in metrics
    assert "rewards/training/mean" not in metrics
    assert [prompt.num_samples for prompt in generator.asked[-5:]] == [2] * 5


def test_progress_is_told_after_each_batch_and_the_generator_stays_awake() -> None:
    generator, told = Recording(), []
    evaluation(generator, batch_size=2).sample(state(), told.append)
    assert told == [2, 4, 5]
    assert generator.slept == 0


def test_what_functions_log_is_weighed_by_completions() -> None:
    def judge(completions: Sequence[str], log_metric: Any, **_: Any) -> list[float]:
        log_metric("size", len(completions))
        return [0.0] * len(completions)

    metrics = evaluation(Recording(), [NamedReward("judge", judge)], batch_size=3).evaluate(state())
    assert metrics["size"] == (3 * 3 + 2 * 2) / 5


def test_sets_are_reported_by_name_and_all_completions_together() -> None:
    """`easy` has 4 of 5 right, and its copy with other answers 1 of 2: together 5 of 7."""
    generator, told = Recording(), []
    easy = evaluation(generator, [NamedReward("equals", equals)], batch_size=2, accuracy="equals")
    rows = datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": ["a", "x"]})
    hard = EvaluationInputs("hard", PromptSet(rows, "prompt", Letters()), easy.sets[0].rewards)
    both = replace(easy, sets=[replace(easy.sets[0], name="easy"), hard])
    sampled = both.sample(state(), told.append)
    metrics = both.metrics(sampled)
    assert told == [2, 4, 5, 7]
    assert (metrics["easy/accuracy"], metrics["hard/accuracy"], metrics["accuracy"]) == (0.8, 0.5, 5 / 7)
    assert metrics["hard/completions/mean_length"] == 1.0
    # The prompt "a" of both sets is sampled with different seeds; the first set has those of a single one.
    seeds = [prompt.seed for prompt in generator.asked]
    assert len(set(seeds)) == 7
    alone = Recording()
    single = evaluation(alone, easy.sets[0].rewards, accuracy="equals").evaluate(state())
    assert single == {name[5:]: value for name, value in metrics.items() if name.startswith("easy/")}
    assert [prompt.seed for prompt in alone.asked] == seeds[:5]


Scores = tuple[float | None, ...]


LABELS = ("math", "short")
WEIGHTS = (1.0, 0.5)


def rows(*scores: Scores, samples: int = 1, labels: Sequence[str] = LABELS) -> list[ScoredRollout]:
    """Completions of 1, 2, 3, ... tokens, the first of which runs into its longest length."""
    made = []
    for number, own in enumerate(scores):
        reason = "stop" if number else "length"
        rollout = Rollout(number // samples, number % samples, (1,), (2,) * (number + 1), reason, 0)
        terms = [weight * score for weight, score in zip(WEIGHTS, own, strict=True) if score is not None]
        total = sum(terms) if terms else math.nan
        made.append(ScoredRollout(rollout, "", "", dict(zip(labels, own, strict=True)), total, math.nan))
    return made


def metrics(scored: list[ScoredRollout], labels: tuple[str, ...] = LABELS, **config: Any) -> dict[str, float]:
    rewards = [NamedReward(label, len, weight) for label, weight in zip(labels, WEIGHTS, strict=True)]
    return evaluation_metrics(scored, rewards, EvaluationConfig(path="heldout.jsonl", **config))


def test_means_deviations_lengths_and_the_weighted_sum() -> None:
    found = metrics(rows((1.0, 0.0), (0.0, None), (1.0, 1.0), (0.0, 0.0)))
    assert found["accuracy"] == found["rewards/math/mean"] == 0.5
    assert found["rewards/math/std"] == pytest.approx((4 * 0.25 / 3) ** 0.5)
    assert (found["rewards/short/mean"], found["rewards/short/abstained"]) == (pytest.approx(1 / 3), 0.25)
    totals = [1.0, 0.0, 1.5, 0.0]
    assert found["reward"] == sum(totals) / 4
    assert found["reward_std"] == pytest.approx((sum((t - 0.625) ** 2 for t in totals) / 3) ** 0.5)
    assert (found["completions/mean_length"], found["completions/clipped_ratio"]) == (2.5, 0.25)
    assert not any(name.startswith("pass_at") for name in found)
    assert metrics(rows((1.0, 0.25)), accuracy="short")["accuracy"] == 0.25


def test_pass_at_k_counts_the_right_ones_of_each_prompt() -> None:
    scored = rows((1.0, 0), (0.0, 0), (0.5, 0), (0.0, 0), *[(0.0, 0)] * 4, samples=4)
    found = metrics(scored, num_generations=4, pass_at_k=[1, 2, 4])
    # One of four right, and none of four: C(3, 2) of C(4, 2) pairs have no right one.
    assert [found[f"pass_at_{k}"] for k in (1, 2, 4)] == [0.125, 0.25, 0.5]
    assert metrics(scored, num_generations=4, pass_at_k=[1], right_at=0.5)["pass_at_1"] == 0.25
    assert found["accuracy"] == 1.5 / 8


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_what_counting_every_choice_gives(n: int) -> None:
    for c in range(n + 1):
        right = [place < c for place in range(n)]
        for k in range(1, n + 1):
            choices = [any(chosen) for chosen in combinations(right, k)]
            assert pass_at_k([(n, c)], k) == sum(choices) / len(choices)


def test_pass_at_k_of_many_completions_is_exact() -> None:
    assert pass_at_k([(10_000, 1)], 5_000) == 0.5  # C(10000, 5000) has 3,009 digits
    assert pass_at_k([(1_000_000, 1)], 1) == 1e-6  # 1 minus a float next to 1 would keep ten digits of it
    assert pass_at_k([(200, 101)], 100) == 1.0  # fewer than k are wrong
    assert pass_at_k([(4, 1), (4, 4), (1, 1)], 2) == (0.5 + 1) / 2  # without a prompt of one completion


def test_completions_without_a_score_are_neither_right_nor_wrong() -> None:
    scored = rows((1.0, 0), (None, 0), (0.0, 0), (1.0, 0), samples=2)
    found = metrics(scored, num_generations=2, pass_at_k=[1, 2])
    assert found["pass_at_1"] == (1 + 0.5) / 2
    assert found["pass_at_2"] == 1.0  # of the second prompt alone


def test_what_nothing_scored_has_no_made_up_value() -> None:
    found = metrics(rows((None, None), (None, None)), pass_at_k=[1])
    assert "reward" not in found
    assert "rewards/math/std" not in found
    assert all(math.isnan(found[name]) for name in ("accuracy", "rewards/math/mean", "pass_at_1"))
    assert found["rewards/math/abstained"] == 1.0


OF_EPISODES = ("environment", "short")


def episodes(*infos: dict[str, Any]) -> list[ScoredRollout]:
    """Completions of one turn each, whose environment reports these facts and a reward with a part ``mean``."""
    return [
        replace(
            row,
            rollout=replace(
                row.rollout,
                turns=(Turn(0, len(row.rollout.completion_ids), "stop", 0),),
                episode=Episode("calculator", (), rewards={"mean": 9.0}, info=info),
            ),
        )
        for row, info in zip(rows(*[(1.0, 0.0)] * len(infos), labels=OF_EPISODES), infos, strict=True)
    ]


def test_success_and_other_results_of_episodes_are_metrics_and_hide_none() -> None:
    infos = [
        {"success": True, "calls_without_carry": False},
        {"success": False, "calls_without_carry": True},
        {"success": True},
        {},
    ]
    found = metrics(episodes(*infos), OF_EPISODES)
    assert found["success"] == 0.5
    assert found["info/calls_without_carry"] == 0.5
    assert found["turns/mean"] == 1
    assert (found["rewards/environment/mean"], found["rewards/environment/part_mean"]) == (1.0, 9.0)
    assert "success" not in metrics(rows((1.0, 0.0)))
    assert not any(name.startswith(("turns/", "episodes/", "info/")) for name in metrics(rows((1.0, 0.0))))


def test_the_summary_names_results_by_when_they_were_measured() -> None:
    before = {"accuracy": 0.1, "success": 0.2, "info/calls_without_carry": 0.9, "turns/mean": 3.0}
    after = {"accuracy": 0.8, "success": 0.7, "info/calls_without_carry": 0.05, "info/accuracy": 4.0}
    assert outcomes_of(before, after) == {
        "accuracy_before": 0.1,
        "success_before": 0.2,
        "calls_without_carry_before": 0.9,
        "accuracy_after": 0.8,  # not what an environment calls so
        "success_after": 0.7,
        "calls_without_carry_after": 0.05,
    }
    by_name = outcomes_of({"rewards/size/mean": 0.1, "rewards/size/std": 1.0}, {"rewards/size/mean": 0.2})
    assert by_name == {"rewards/size/mean_before": 0.1, "rewards/size/mean_after": 0.2}
    assert outcomes_of({"accuracy": 0.1}, {"accuracy": 0.2}) == {"accuracy_before": 0.1, "accuracy_after": 0.2}
