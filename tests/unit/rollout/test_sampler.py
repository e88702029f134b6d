"""Sampling and scoring with doubles: order, refusals, and what reaches the reward functions."""

import math
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch

from grpox.config import EvaluationConfig, SamplingConfig
from grpox.contracts import Prompt, Rollout, TrainerState
from grpox.data.prompts import PromptSet
from grpox.errors import RunFailed
from grpox.rollout.advantages import BatchScaler
from grpox.rollout.collector import Collector, Scorer, sample_and_score
from grpox.rollout.rewards import NamedReward
from grpox.rollout.sampler import CompletionSampler, PrefetchedBatch, SampleRequest, rollout_problem
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World
from grpox.training.assembly import EvaluationInputs
from grpox.training.evaluation import Evaluation
from grpox_advantages.configs import GroupConfig
from grpox_advantages.scalers import Group

ALONE = World(0, 1, torch.device("cpu"))
STATE = TrainerState(global_step=0, max_steps=1, epoch=0.0)


class Letters:
    """A tokenizer of letters: a = 1, b = 2, ...; token 0 is special and without text."""

    chat_template = None

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [[ord(letter) - 96 for letter in text] for text in texts]}

    def batch_decode(self, sequences, skip_special_tokens=False):
        return ["".join(chr(96 + i) for i in ids if i) for ids in sequences]


class Scripted:
    """Answers every prompt with its own letter, repeated sample + 1 times, in random order; notes its calls."""

    def __init__(self, version=0):
        self.version, self.calls, self.asked = version, [], []

    def sync(self, weights, version):
        list(weights)
        self.calls.append(f"sync {version}")

    def generate(self, prompts, sampling, seed, call="generate"):
        self.calls.append(call)
        self.asked.append((prompts, sampling, seed))
        rollouts = [
            Rollout(p.group_id, s, p.token_ids, p.token_ids[:1] * (s + 1), "stop", self.version)
            for p in prompts
            for s in range(p.num_samples)
        ]
        random.Random(seed).shuffle(rollouts)
        return rollouts

    def begin(self, *given):
        return self.generate(*given, call="begin")

    def wake(self):
        self.calls.append("wake")

    def sleep(self):
        self.calls.append("sleep")


def engine():
    return SimpleNamespace(steps=0, weights=lambda: iter([("w", torch.zeros(1))]))


def prompt_set(column="prompt"):
    rows = datasets.Dataset.from_dict({"prompt": list("abc"), "answer": ["aa", "b", "x"]})
    return PromptSet(rows, column, Letters())


def equals(completions, answer, **_):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def collector(generator, *rewards):
    sampler = CompletionSampler(engine(), generator, ALONE, seed=0)
    scaler = Group(GroupConfig(ddof=0, eps=0))
    return Collector(sampler, Scorer(rewards), prompt_set(), scaler, SamplingConfig(), 3)


def collected(made, *given, **options):
    """A generation batch and its metrics."""
    batch = made.collect(*given, **options)
    return batch, made.metrics(batch)


def test_rows_are_in_group_order_whatever_the_order_of_completion():
    batch, metrics = collected(collector(Scripted(), NamedReward("equals", equals)), 0, [2, 0], STATE)
    assert [(r.group_id, r.sample) for r in batch.rollouts] == [(g, s) for g in range(2) for s in range(3)]
    # Prompt "c" never gives "x"; prompt "a" gives a, aa, aaa, of which the second is right.
    assert batch.rewards[:, 0].tolist() == [0, 0, 0, 0, 1, 0]
    assert batch.scaled.values.tolist() == pytest.approx([0, 0, 0, -(0.5**0.5), 2**0.5, -(0.5**0.5)])
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["rewards/equals/mean"] == metrics["reward"] == pytest.approx(1 / 6)
    # One right of six: sum of squares 5/6, over 5.
    assert metrics["rewards/equals/std"] == metrics["reward_std"] == pytest.approx((1 / 6) ** 0.5)
    assert metrics["completions/mean_length"] == 2
    assert "rewards/equals/errors" not in metrics


def test_rewards_that_differ_by_rounding_only_make_a_flat_group():
    def rounding(completions, **_):
        return [0.1 + 0.2 if len(c) == 1 else 0.3 for c in completions]

    batch, metrics = collected(collector(Scripted(), NamedReward("rounding", rounding)), 0, [0], STATE)
    assert metrics["frac_reward_zero_std"] == 1
    assert batch.scaled.values.tolist() == [0, 0, 0]


def broken_on_long(completions, **_):
    return [math.nan if len(c) > 1 else 1.0 for c in completions]


def test_failed_completions_are_counted_and_told_once(logged):
    made = collector(Scripted(), NamedReward("broken", broken_on_long, on_error="abstain"))
    for generation in range(2):
        _, metrics = collected(made, generation, [0, 1], STATE)
        assert metrics["rewards/broken/errors"] == 4
        assert metrics["rewards/broken/abstained"] == pytest.approx(2 / 3)
    told = logged()
    assert told.count("warning") == 1
    assert "reward 'broken' returned nan (float) for completion 1" in told


def test_a_batch_on_which_every_function_abstains_is_told_once_by_name(logged):
    def silent(prompts, **_):
        return [None if prompt == "a" else 1.0 for prompt in prompts]

    made = collector(Scripted(), NamedReward("first", silent), NamedReward("second", silent))
    made.collect(0, [1], STATE)
    assert logged() == ""
    made.collect(1, [0], STATE)
    batch, metrics = collected(made, 2, [0], STATE)
    assert batch.scaled.values.tolist() == [0] * 3
    assert not any(math.isnan(value) for value in metrics.values())
    assert "reward" not in metrics
    told = logged()
    assert told.count("warning: no completion of generation batch 1 has a reward") == 1
    assert "(first, second)" in told
    assert told.count("warning") == 1
    other = collector(Scripted(), NamedReward("first", silent))
    other.sampler.world = Beside(1, 1, ALONE.device)
    other.collect(0, [0, 0], STATE)  # the groups from the rank's number on are its own
    assert logged() == ""  # only rank 0 says so


def on_two_ranks(work):
    """Call work(world) on two ranks at once; return what each returns."""
    given, meeting = [[], []], threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: work(ThreadedWorld(rank, given, meeting)), range(2)))


class ThreadedWorld:
    """One of two ranks, two threads that meet in `gather`."""

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


def test_errors_logs_and_warnings_of_all_ranks_come_together(logged):
    """Group 0 is scored on rank 0, group 1 on rank 1, where alone something fails."""

    def breaks_on_b(prompts, log_metric, **_):
        log_metric("loss", float(len(prompts)) + ("b" in prompts))
        return [math.inf if prompt == "b" else 1.0 for prompt in prompts]

    def step(world):
        made = collector(Scripted(), NamedReward("breaks", breaks_on_b, on_error="abstain"))
        made.sampler.world = world
        return collected(made, 0, [0, 1], STATE)

    for batch, metrics in on_two_ranks(step):
        assert metrics["rewards/breaks/errors"] == 3
        assert batch.logged == {"loss": {"breaks": 3.5}}
    assert logged().count("warning: reward 'breaks' returned inf") == 1


def test_an_evaluation_counts_errors_over_its_batches_and_keeps_its_own_names(logged):
    def judge(completions, prompts, log_metric, **_):
        log_metric("accuracy", 7.0)
        return [math.nan if prompt == "a" else 0.5 for prompt in prompts]

    made = collector(Scripted(), NamedReward("judge", judge, on_error="abstain"))
    for named in ("judge", None):
        config = EvaluationConfig(path="heldout.jsonl", batch_size=2, accuracy=named)
        sets = [EvaluationInputs("", prompt_set(), made.scorer.rewards)]
        metrics = Evaluation(made.sampler, sets, config, SamplingConfig(), False, made.scorer.warn).evaluate(
            STATE
        )
        assert metrics["rewards/judge/mean"] == 0.5
        assert metrics.get("accuracy") == (0.5 if named else None)
        assert metrics["judge/accuracy"] == 7.0
    assert metrics["rewards/judge/errors"] == 1
    assert "reward 'judge' logs 'accuracy', a metric of the trainer's" in logged()


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (lambda rewards: 1 / 0, r"raised ZeroDivisionError: division by zero \(test_sampler.py:\d+\)"),
        (lambda rewards: rewards, r"returned \(6, 1\); one number per completion is \(6,\)"),
        (lambda rewards: rewards[:, 0] / 0, "returned nan for a completion"),
        (lambda rewards: rewards[:, 0] - math.inf, "returned -inf for a completion"),
    ],
)
def test_an_advantage_that_is_none_is_named(scale, told):
    class Mine:
        def scale(self, rewards, weights, group_ids):
            return scale(rewards)

    made = collector(Scripted(), NamedReward("equals", equals))
    made.scaler = BatchScaler(Mine())
    with pytest.raises(RunFailed, match=f"advantage 'Mine' {told}"):
        made.collect(0, [2, 0], STATE)


# -- what a generator is asked for, and when -------------------------------------------------------------


@dataclass(frozen=True)
class Beside(World):
    """A rank whose others have nothing to tell."""

    def gather(self, items):
        return list(items)


EQUALS = NamedReward("equals", equals)
WARM = SamplingConfig(temperature=0.5)


def sampler_of(generator, rank=0, size=1, seed=0, **options):
    return CompletionSampler(engine(), generator, Beside(rank, size, ALONE.device), seed, **options)


def request_of(indices, num_samples, stream, seeds=None, prompts=None):
    return SampleRequest(prompts or prompt_set(), indices, num_samples, WARM, stream, seeds)


def sampled(sampler, *request, prefetched=None, rewards=(EQUALS,), **more):
    """The rows of a request, and what the functions logged."""
    return sample_and_score(sampler, Scorer(rewards), request_of(*request, **more), STATE, prefetched)


@pytest.mark.parametrize(
    ("rank", "size", "groups"), [(0, 1, [0, 1, 2]), (0, 2, [0, 2]), (1, 2, [1]), (3, 4, [])]
)
def test_each_rank_samples_every_so_manyth_group(rank, size, groups):
    generator, indices = Scripted(), [2, 0, 1]
    rows, _ = sampled(sampler_of(generator, rank, size), indices, 3, (0, 4))
    [(requests, sampling, _)] = generator.asked
    assert requests == [Prompt(group, (indices[group] + 1,), 3, row=indices[group]) for group in groups]
    assert sampling == WARM
    assert [(row.rollout.group_id, row.rollout.sample) for row in rows] == [
        (group, sample) for group in groups for sample in range(3)
    ]


def test_a_rank_without_groups_reads_nothing_of_the_data():
    prompts = prompt_set()
    prompts.rows = prompts.token_ids = lambda *_: pytest.fail("read")
    assert sampled(sampler_of(Scripted(), 3, 4), [2, 0, 1], 3, (0, 4), prompts=prompts) == ([], {})


def test_prompts_with_seeds_of_their_own_keep_them_on_every_rank():
    generator = Scripted()
    sampled(sampler_of(generator, 1, 2), [2, 0, 1, 1], 1, (1, 0), seeds=[5, 6, 7, 8])
    assert [(p.group_id, p.seed) for p in generator.asked[0][0]] == [(1, 6), (3, 8)]


def test_draws_follow_from_seed_stream_and_rank_as_they_always_have():
    def seed_of(seed, stream, rank):
        generator = Scripted()
        sampled(sampler_of(generator, rank, 2, seed), [0, 1], 2, stream)
        sampler_of(generator, rank, 2, seed).prefetch(request_of([0, 1], 2, stream))
        (_, _, drawn), (_, _, prefetched) = generator.asked
        assert drawn == prefetched
        return drawn

    given = [(7, (0, 3), 1), (7, (0, 3), 0), (7, (0, 4), 1), (7, (2, 0, 3), 1), (8, (0, 3), 1)]
    found = [seed_of(*each) for each in given]
    assert len(set(found)) == 5
    # Another would be another run of the same run file.
    assert found[0] == np.random.SeedSequence([7, 0, 3, 1]).generate_state(1)[0]


def test_a_generator_is_awake_from_before_it_generates_until_its_memory_is_needed():
    sleeping, staying = Scripted(), Scripted()
    sampler = sampler_of(sleeping)
    sampler.release()  # nothing was sampled yet: the engine has no memory to give
    for _ in range(2):
        sampled(sampler, [0], 2, (0, 0))
    for _ in range(2):
        sampler.release()
    assert sleeping.calls == ["sync 0", "wake", "generate", "wake", "generate", "sleep"]
    sampler = sampler_of(staying, sleeps=False)
    sampled(sampler, [0], 2, (0, 0))
    sampler.release()
    assert staying.calls == ["sync 0", "wake", "generate"]


@pytest.mark.parametrize(("version", "taken"), [(1, False), (2, True), (3, True), (4, True), (5, False)])
def test_what_was_begun_may_be_of_any_weights_from_then_until_now(version, taken):
    generator = Scripted(version=version)
    sampler = sampler_of(generator)
    sampler.engine.steps = 4
    prefetched = PrefetchedBatch(2, iter(generator.generate([Prompt(0, (1,), 2)], WARM, 0)))
    if taken:
        sampled(sampler, [0], 2, (0, 1), prefetched=prefetched)
    else:
        with pytest.raises(RunFailed, match=f"policy version {version}, the policy is at version 4 and"):
            sampled(sampler, [0], 2, (0, 1), prefetched=prefetched)


def test_what_is_left_out_on_another_rank_has_all_bring_the_weights():
    """This rank has all its samples; the other says that it wants some."""

    class Wanting(Beside):
        def gather(self, items):
            return [*items, True] if items == [False] else list(items)

    generator = Scripted()
    sampler = sampler_of(generator)
    sampler.world = Wanting(0, 2, ALONE.device)
    prefetched = PrefetchedBatch(0, iter(generator.generate([Prompt(0, (1,), 2)], WARM, 0)))
    generator.asked.clear()
    sampled(sampler, [0, 1], 2, (0, 1), prefetched=prefetched)
    assert generator.calls == ["generate", "sync 0", "wake", "generate"]
    assert [prompts for prompts, *_ in generator.asked] == [[]]


def test_samples_that_are_there_stay_as_they_are_when_their_group_is_drawn_again():
    generator = Scripted(version=1)
    sampler = sampler_of(generator)
    sampler.engine.steps = 1
    there = [Rollout(0, 1, (1,), (9, 9), "stop", 0), *generator.generate([Prompt(1, (2,), 2, None)], WARM, 0)]
    generator.asked.clear()
    rows, _ = sampled(sampler, [0, 1], 2, (0, 1), prefetched=PrefetchedBatch(0, iter(there)))
    [(requests, sampling, _)] = generator.asked
    assert (requests, sampling) == ([Prompt(0, (1,), 2, row=0)], WARM)
    assert [(row.completion, row.rollout.policy_version) for row in rows] == [
        ("a", 1), ("ii", 0), ("b", 1), ("bb", 1)
    ]  # fmt: skip


def test_weights_that_a_generator_refuses_are_gathered_to_the_end_for_the_other_ranks():
    gathered = []

    def weights():
        for name in "abc":
            gathered.append(name)
            yield name, torch.zeros(1)

    class Refusing(Scripted):
        def sync(self, weights, version):
            next(weights)
            raise RunFailed("no room")

    sampler = sampler_of(Refusing())
    sampler.engine.weights = weights
    with pytest.raises(RunFailed, match="no room"):
        sampler.sync()
    assert gathered == ["a", "b", "c"]
    assert sampler.synced_version is None
    assert sampler.times.failed == "sync"


def test_phases_are_told_to_the_times_that_were_given():
    times, seen, generator = PhaseTimes(), [], Scripted()

    def watched(function):
        def watching(*given, **arguments):
            seen.append(times.now()[0])
            return function(*given, **arguments)

        return watching

    for name in ("sync", "generate", "begin", "sleep"):
        setattr(generator, name, watched(getattr(generator, name)))
    sampler = sampler_of(generator, times=times)
    sampled(sampler, [0], 2, (0, 0), rewards=[NamedReward("watched", watched(equals))])
    assert seen == ["sync", "generate", "reward"]
    sampler.release()
    sampler.prefetch(request_of([0], 2, (0, 0)))
    assert seen[3:] == ["generate"] * 3  # sleep, and begin, which calls generate here
    assert sampler.times is times


# -- a generation batch ----------------------------------------------------------------------------------


def test_a_batch_is_as_old_as_its_oldest_rollout_and_its_staleness_is_a_mean():
    generator = Scripted(version=4)
    made = collector(generator, EQUALS)
    _, plain = collected(collector(Scripted(), EQUALS), 0, [0], STATE)
    assert not any(name.startswith(("sampling/", "dynamic_sampling/")) for name in plain)
    made.prefetches, made.sampler.engine.steps = True, 4
    there = [Rollout(0, sample, (1,), (1,), "stop", version) for sample, version in ((0, 1), (1, 3))]
    batch, metrics = collected(made, 0, [0], STATE, PrefetchedBatch(1, iter(there)))
    assert [rollout.policy_version for rollout in batch.rollouts] == [1, 3, 4]
    assert metrics["sampling/staleness"] == pytest.approx((3 + 1 + 0) / 3)
    assert list(batch.indices) == [0]
    assert not batch.dropped


def test_a_scaler_is_given_rewards_weights_and_groups():
    given = []

    class Given:
        def scale(self, rewards, weights, group_ids):
            given.append((rewards.tolist(), weights.tolist(), group_ids.tolist()))
            rewards.numpy()[:] = 9.0  # its own copy
            return torch.arange(6.0)

    made = collector(Scripted(), NamedReward("equals", equals, 2.0), NamedReward("again", equals, -0.5))
    made.scaler = BatchScaler(Given())
    batch = made.collect(0, [2, 0], STATE)
    assert given == [([[0, 0]] * 4 + [[1, 1], [0, 0]], [2.0, -0.5], [0, 0, 0, 1, 1, 1])]
    assert batch.rewards.tolist() == given[0][0]
    assert batch.scaled.values.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.totals.tolist() == [0, 0, 0, 0, 1.5, 0]
    assert batch.totals.dtype == torch.float32


def test_observers_see_each_rollout_with_its_own_prompt_numbers_and_columns():
    batch = collector(Scripted(), NamedReward("equals", equals, 2.0)).collect(0, [2, 0], STATE)
    scored = batch.rows
    assert [s.rollout for s in scored] == batch.rollouts
    assert [(s.prompt, s.completion) for s in scored] == [
        (letter, letter * n) for letter in "ca" for n in (1, 2, 3)
    ]
    assert [s.reward for s in scored] == [0, 0, 0, 0, 2, 0]
    assert [s.rewards["equals"] for s in scored] == [0, 0, 0, 0, 1, 0]
    assert [s.advantage for s in scored] == batch.scaled.values.tolist()
    assert [s.columns for s in scored] == [{"answer": "x"}] * 3 + [{"answer": "aa"}] * 3
    assert [s.question for s in scored] == ["c"] * 3 + ["a"] * 3


# -- groups that are replaced ----------------------------------------------------------------------------


def test_a_flat_group_is_drawn_again_from_a_stream_of_its_round():
    """Prompt c never tells its completions apart; prompt a does."""
    generator, drawn = Scripted(), []

    def draw(count):
        drawn.append(count)
        return [2] if len(drawn) < 2 else [0]

    made = collector(generator, EQUALS)
    made.rounds, made.sampling = 3, WARM
    batch, metrics = collected(made, 4, [0, 2], STATE, draw=draw)
    assert drawn == [1, 1]
    seeds = [
        np.random.SeedSequence([0, *stream, 0]).generate_state(1)[0]
        for stream in ((0, 4), (2, 4, 1), (2, 4, 2))
    ]
    assert [seed for _, _, seed in generator.asked] == seeds
    assert "sleep" not in generator.calls  # between rounds it stays awake
    prompts = [Prompt(0, (1,), 3, row=0), Prompt(1, (3,), 3, row=2)]
    assert generator.asked[0][:2] == (prompts, WARM)
    made.prefetch(4, [0, 2])  # which draws as collecting does
    assert generator.asked.pop() == generator.asked[0]
    assert [requests[0].num_samples for requests, _, _ in generator.asked] == [3, 3, 3]
    assert batch.indices == [0, 0]
    assert [rollout.group_id for rollout in batch.rollouts] == [0, 0, 0, 1, 1, 1]
    assert len(batch.dropped) == 6
    assert metrics["frac_reward_zero_std"] == 0
    # Of the batch as it was first: one right of six.
    assert metrics["dynamic_sampling/first_reward"] == pytest.approx(1 / 6)
    assert metrics["dynamic_sampling/rounds"] == 2


def test_a_first_reward_is_of_what_was_scored_and_of_nothing_there_is_none():
    def on_a(prompts, **_):
        return [None if prompt != "a" else 0.5 for prompt in prompts]

    made = collector(Scripted(), NamedReward("on_a", on_a))
    made.rounds = 1
    _, some = collected(made, 0, [0, 2], STATE, draw=lambda count: [2] * count)
    assert some["dynamic_sampling/first_reward"] == 0.5
    _, none = collected(made, 0, [1, 2], STATE, draw=lambda count: [2] * count)
    assert "dynamic_sampling/first_reward" not in none
    assert none["dynamic_sampling/rounds"] == 1


@pytest.mark.parametrize("method", ["sync", "wake", "generate", "sleep"])
def test_a_generator_that_exits_is_named(method):
    made = Scripted()
    exits = (lambda *_: (sys.exit(0) for _ in "a")) if method == "generate" else lambda *_: sys.exit(0)
    setattr(made, method, exits)
    run = collector(made, EQUALS)

    def step():
        run.collect(0, [0], STATE)
        run.sampler.release()

    with pytest.raises(RunFailed, match=r"generator 'Scripted' raised SystemExit: 0 \(test_sampler.py:\d+\)"):
        step()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "returned a NoneType"),
        (["text"], "yielded a str"),
        ([{"token_ids": (1,)}], "yielded a dict"),
    ],
)
def test_a_generator_that_gives_something_else_is_told_what_is_needed(answer, told):
    generator = Scripted()
    generator.generate = lambda *_: answer
    with pytest.raises(RunFailed, match=f"'Scripted' {told}.*an iterable of grpox.contracts.Rollout"):
        sampler_of(generator).sample(request_of([0], 2, (0,)))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"completion_ids": None}, "completion_ids is a NoneType"),
        ({"completion_ids": "12"}, "completion_ids has '1'"),
        ({"completion_ids": (2.0,)}, "completion_ids has 2.0"),
        ({"completion_ids": (-1,)}, "completion_ids has -1"),
        ({"completion_ids": ()}, "completion_ids is empty"),
        ({"completion_ids": (10,)}, "completion_ids has 10, but the model's tokens are 0 to 9"),
        ({"sampler_logprobs": (None, 0.0)}, "sampler_logprobs has None"),
    ],
)
def test_tokens_and_log_probabilities_that_are_none_are_named(changed, told):
    rollout = Rollout(0, 0, (1,), (9, 0), "stop", 0)
    assert not rollout_problem(rollout, vocabulary=10)
    assert not rollout_problem(replace(rollout, completion_ids=(10**6, 0)))
    assert rollout_problem(replace(rollout, **changed), vocabulary=10).startswith(told)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"completion_ids": (2, 10)}, "whose completion_ids has 10"),
        ({"prompt_ids": (9,)}, "whose prompt_ids are not the token_ids of its prompt"),
    ],
)
def test_a_sampler_refuses_a_rollout_by_group_and_sample_before_anybody_sees_it(changed, told):
    sound, seen = Rollout(0, 0, (1,), (9,), "stop", 0), []
    generator = Scripted()
    generator.generate = lambda *_: iter([sound, replace(sound, sample=1, **changed)])
    with pytest.raises(RunFailed, match=rf"'Scripted' .*\(group 0, sample 1\) {told}"):
        sampler_of(generator, vocabulary=10).sample(request_of([0], 2, (0,)), arrived=seen.append)
    assert seen == [sound]
