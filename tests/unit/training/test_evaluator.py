"""Evaluations with doubles: what is sampled, with which seeds, and what they leave untouched."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import torch

from grpox.config import EvaluationConfig, EvaluationSamplingConfig, SamplingConfig
from grpox.contracts import Prompt, Rollout, TrainerState
from grpox.data.prompts import PromptSet
from grpox.rollout.rewards import NamedReward
from grpox.rollout.sampler import CompletionSampler
from grpox.runtime.logs import WarnOnce, get_logger
from grpox.runtime.world import World
from grpox.training.assembly import EvaluationInputs
from grpox.training.evaluation import Evaluation

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
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_completion_length) == (
        0.5,
        0.5,
        7,
        4,
    )
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


def test_the_random_numbers_of_the_process_go_on_as_if_nothing_was_evaluated() -> None:
    def next_numbers(evaluated: bool) -> tuple[float, float, float]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        if evaluated:
            evaluation(Recording()).evaluate(state())
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    assert next_numbers(True) == next_numbers(False)


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
