"""Sampling and scoring with doubles: order, refusals, and what reaches the reward functions."""

import math
import random
import threading
from types import SimpleNamespace

import datasets
import pytest
import torch

from grpox.collect import Collector, Sampler
from grpox.config import EvaluationConfig, SamplingConfig
from grpox.contracts import Rollout, TrainerState
from grpox.data.prompts import PromptSet
from grpox.errors import RunFailed
from grpox.evaluation import Evaluator
from grpox.rewards import NamedReward
from grpox.world import World
from grpox_advantages.configs import GroupConfig
from grpox_advantages.scalers import Group

ALONE = World(0, 1, torch.device("cpu"))
STATE = TrainerState(global_step=0, max_steps=1, epoch=0.0)


class Letters:
    """A tokenizer of letters: a = 1, b = 2, ..."""

    chat_template = None

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [[ord(letter) - 96 for letter in text] for text in texts]}

    def batch_decode(self, sequences, skip_special_tokens=False):
        return ["".join(chr(96 + i) for i in ids) for ids in sequences]


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
    return Collector(sampler, prompt_set(), Group(GroupConfig(ddof=0, eps=0)), SamplingConfig(), 3)


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
    assert batch.logged == {"longest": {"telling": 3}}
    assert [row.extra for row in made.scored(batch)] == [{"length": 1}, {"length": 2}, {"length": 3}]


def test_rewards_that_differ_by_rounding_only_make_a_flat_group():
    def rounding(completions, **_):
        return [0.1 + 0.2 if len(c) == 1 else 0.3 for c in completions]

    batch = collector(Scripted(), NamedReward("rounding", rounding)).collect(0, [0], STATE)
    assert batch.metrics["frac_reward_zero_std"] == 1
    assert batch.advantages.tolist() == [0, 0, 0]


def broken_on_long(completions, **_):
    return [math.nan if len(c) > 1 else 1.0 for c in completions]


def test_failed_completions_are_counted_and_told_once(capsys):
    made = collector(Scripted(), NamedReward("broken", broken_on_long, on_error="abstain"))
    for generation in range(2):
        batch = made.collect(generation, [0, 1], STATE)
        assert batch.metrics["rewards/broken/errors"] == 4
        assert batch.metrics["rewards/broken/abstained"] == pytest.approx(2 / 3)
    told = capsys.readouterr().err
    assert told.count("warning: reward 'broken' returned nan (float) for completion 1") == 1
    assert told.count("warning") == 1


def test_a_function_that_may_abstain_by_failing_logs_zero_errors_and_another_none():
    abstaining = NamedReward("abstaining", equals, on_error="abstain")
    metrics = collector(Scripted(), abstaining, NamedReward("failing", equals)).collect(0, [0], STATE).metrics
    assert metrics["rewards/abstaining/errors"] == 0
    assert "rewards/failing/errors" not in metrics


def test_a_batch_on_which_every_function_abstains_is_told_once_by_name(capsys):
    def silent(prompts, **_):
        return [None if prompt == "a" else 1.0 for prompt in prompts]

    made = collector(Scripted(), NamedReward("first", silent), NamedReward("second", silent))
    made.collect(0, [1], STATE)
    assert capsys.readouterr().err == ""
    made.collect(1, [0], STATE)
    made.collect(2, [0], STATE)
    told = capsys.readouterr().err
    assert told.count("warning: no completion of generation batch 1 has a reward") == 1
    assert "(first, second)" in told
    assert told.count("warning") == 1


class ThreadedWorld:
    """Two ranks as two threads that meet in `gather`."""

    size, device = 2, torch.device("cpu")

    def __init__(self, rank, given, meeting):
        self.rank, self.given, self.meeting = rank, given, meeting

    @property
    def is_main(self):
        return self.rank == 0

    def gather(self, items):
        self.given[self.rank] = list(items)
        self.meeting.wait(5)
        gathered = [item for part in self.given for item in part]
        self.meeting.wait(5)
        return gathered


def test_errors_logs_and_warnings_of_all_ranks_come_together(capsys):
    """Group 0 is scored on rank 0, group 1 on rank 1, where alone something fails."""

    def breaks_on_b(prompts, log_metric, **_):
        log_metric("loss", float(len(prompts)) + ("b" in prompts))
        return [math.inf if prompt == "b" else 1.0 for prompt in prompts]

    given, meeting, batches = [[], []], threading.Barrier(2), {}

    def run(rank):
        reward = NamedReward("breaks", breaks_on_b, on_error="abstain")
        made = collector(Scripted(), reward)
        made.sampler.world = ThreadedWorld(rank, given, meeting)
        batches[rank] = made.collect(0, [0, 1], STATE)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [batches[rank].metrics["rewards/breaks/errors"] for rank in range(2)] == [3, 3]
    assert [batches[rank].logged for rank in range(2)] == [{"loss": {"breaks": 3.5}}] * 2
    assert capsys.readouterr().err.count("warning: reward 'breaks' returned inf") == 1


def test_an_evaluation_counts_errors_over_its_batches_and_keeps_its_own_names(capsys):
    def judge(completions, prompts, log_metric, **_):
        log_metric("accuracy", 7.0)
        return [math.nan if prompt == "a" else 0.5 for prompt in prompts]

    sampler = collector(Scripted(), NamedReward("judge", judge, on_error="abstain")).sampler
    config = EvaluationConfig(path="heldout.jsonl", batch_size=2)
    metrics = Evaluator(sampler, prompt_set(), config, SamplingConfig()).evaluate(STATE)
    assert metrics["accuracy"] == metrics["rewards/judge/mean"] == 0.5
    assert metrics["judge/accuracy"] == 7.0
    assert metrics["rewards/judge/errors"] == 1
    assert "reward 'judge' logs 'accuracy', a metric of the trainer's" in capsys.readouterr().err


def test_standard_deviations_are_over_n_minus_1_of_the_whole_batch():
    metrics = collector(Scripted(), NamedReward("equals", equals)).collect(0, [2, 0], STATE).metrics
    # One right of six: sum of squares 5/6, over 5.
    assert metrics["rewards/equals/std"] == pytest.approx((1 / 6) ** 0.5)
    assert metrics["reward_std"] == pytest.approx((1 / 6) ** 0.5)


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (lambda rewards, *_: 1 / 0, r"raised ZeroDivisionError: division by zero \(test_collect.py:\d+\)"),
        (lambda rewards, *_: rewards, r"returned \(6, 1\); one number per completion is \(6,\)"),
        (lambda rewards, *_: [0.0] * 6, "returned list"),
        (lambda rewards, *_: rewards[:, 0] / 0, "returned nan for a completion"),
    ],
)
def test_an_advantage_that_is_none_is_named(scale, told):
    class Mine:
        def scale(self, *arguments):
            return scale(*arguments)

    made = collector(Scripted(), NamedReward("equals", equals))
    made.scaler = Mine()
    with pytest.raises(RunFailed, match=f"advantage 'Mine' {told}"):
        made.collect(0, [2, 0], STATE)
