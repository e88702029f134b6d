"""Sampling and scoring with doubles: order, refusals, and what reaches the reward functions."""

import math
import random
from types import SimpleNamespace

import datasets
import pytest
import torch

from grpox.collect import Collector, Sampler
from grpox.config import SamplingConfig
from grpox.contracts import Rollout, TrainerState
from grpox.errors import RunFailed
from grpox.prompts import PromptSet
from grpox.rewards import NamedReward
from grpox.world import World
from grpox_advantages.configs import ScaledConfig
from grpox_advantages.scalers import Group

ALONE = World(0, 1, torch.device("cpu"))
STATE = TrainerState(global_step=0, max_steps=1, epoch=0.0)


class Letters:
    """A tokenizer of letters: a = 1, b = 2, ..."""

    chat_template = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(letter) - 96 for letter in text]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(96 + i) for i in ids)


class Scripted:
    """Answers every prompt with its own letter, repeated sample + 1 times, in random order of completion."""

    def __init__(self, version=0, drop=False):
        self.version, self.drop = version, drop
        self.synced = []

    def sync(self, weights, version):
        self.synced.append((dict(weights), version))

    def generate(self, prompts, sampling, seed):
        rollouts = [
            Rollout(p.group_id, s, p.token_ids, p.token_ids[:1] * (s + 1), "stop", self.version)
            for p in prompts
            for s in range(p.num_samples)
        ]
        random.Random(seed).shuffle(rollouts)
        return rollouts[1:] if self.drop else rollouts

    def wake(self): ...
    def sleep(self): ...


def engine():
    return SimpleNamespace(steps=0, weights=lambda: iter([("w", torch.zeros(1))]))


def prompt_set(column="prompt"):
    rows = datasets.Dataset.from_dict({"prompt": list("abc"), "answer": ["aa", "b", "x"]})
    return PromptSet(rows, column, Letters())


def equals(completions, answer, **_):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def collector(generator, *rewards):
    sampler = Sampler(engine(), generator, rewards, ALONE, seed=0)
    return Collector(sampler, prompt_set(), Group(ScaledConfig(ddof=0, eps=0)), SamplingConfig(), 3)


def test_rows_are_in_group_order_whatever_the_order_of_completion():
    batch = collector(Scripted(), NamedReward("equals", equals)).collect(0, [2, 0], STATE)
    assert [(r.group_id, r.sample) for r in batch.rollouts] == [(g, s) for g in range(2) for s in range(3)]
    # Prompt "c" never gives "x"; prompt "a" gives a, aa, aaa, of which the second is right.
    assert batch.rewards[:, 0].tolist() == [0, 0, 0, 0, 1, 0]
    assert batch.advantages.tolist() == pytest.approx([0, 0, 0, -(0.5**0.5), 2**0.5, -(0.5**0.5)])
    assert batch.metrics["frac_reward_zero_std"] == 0.5
    assert batch.metrics["rewards/equals/mean"] == pytest.approx(1 / 6)


def test_rewards_are_summed_with_their_weights_and_abstentions_skipped():
    def abstains_on_c(prompts, **_):
        return [None if p == "c" else 1.0 for p in prompts]

    rewards = [NamedReward("equals", equals, 2.0), NamedReward("abstains", abstains_on_c, 0.5)]
    batch = collector(Scripted(), *rewards).collect(0, [2, 0], STATE)
    assert batch.totals.tolist() == [0, 0, 0, 0.5, 2.5, 0.5]
    assert batch.rewards[:3, 1].isnan().all()
    assert batch.metrics["rewards/abstains/abstained"] == 0.5


def test_a_batch_on_which_every_function_abstains_has_zero_advantage_and_no_nan_metric():
    nothing = NamedReward("nothing", lambda prompts, **_: [None] * len(prompts))
    batch = collector(Scripted(), nothing).collect(0, [0, 1], STATE)
    assert batch.advantages.tolist() == [0] * 6
    assert not any(math.isnan(value) for value in batch.metrics.values())
    assert "reward" not in batch.metrics


def test_a_rollout_of_other_weights_is_refused():
    with pytest.raises(RunFailed, match="policy version 7, the policy is at version 0"):
        collector(Scripted(version=7), NamedReward("equals", equals)).collect(0, [0], STATE)


def test_a_missing_rollout_is_refused():
    with pytest.raises(RunFailed, match="2 rollouts that are not the 3 asked for"):
        collector(Scripted(drop=True), NamedReward("equals", equals)).collect(0, [0], STATE)


def test_the_generator_is_synced_once_per_version():
    generator = Scripted()
    made = collector(generator, NamedReward("equals", equals))
    made.collect(0, [0], STATE)
    made.collect(1, [1], STATE)
    assert [version for _, version in generator.synced] == [0]
    made.sampler.engine.steps = generator.version = 1
    made.collect(2, [2], STATE)
    assert [version for _, version in generator.synced] == [0, 1]


def test_observers_see_texts_and_rewards_by_name():
    made = collector(Scripted(), NamedReward("equals", equals))
    scored = made.scored(made.collect(0, [0], STATE))
    assert [(s.prompt, s.completion, s.reward, s.rewards) for s in scored] == [
        ("a", "a", 0, {"equals": 0}),
        ("a", "aa", 1, {"equals": 1}),
        ("a", "aaa", 0, {"equals": 0}),
    ]


def test_what_a_reward_function_logs_reaches_metrics_and_observers():
    def telling(completions, log_metric, log_extra, **_):
        log_metric("longest", max(map(len, completions)))
        log_extra("length", [len(c) for c in completions])
        return [0.0] * len(completions)

    made = collector(Scripted(), NamedReward("telling", telling))
    batch = made.collect(0, [0], STATE)
    assert batch.metrics["longest"] == 3
    assert [row.extra for row in made.scored(batch)] == [{"length": 1}, {"length": 2}, {"length": 3}]


def test_rewards_that_differ_by_rounding_only_make_a_flat_group():
    def rounding(completions, **_):
        return [0.1 + 0.2 if len(c) == 1 else 0.3 for c in completions]

    batch = collector(Scripted(), NamedReward("rounding", rounding)).collect(0, [0], STATE)
    assert batch.metrics["frac_reward_zero_std"] == 1
    assert batch.advantages.tolist() == [0, 0, 0]
