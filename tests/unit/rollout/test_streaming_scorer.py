"""Groups scored while others are generated: when, by whom, what comes of it, and what ends it."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from contextvars import ContextVar
from dataclasses import replace

import pytest
from support.patience import patient
from test_sampler import ALONE, STATE, engine

from grpox.config import SamplingConfig
from grpox.contracts import Rollout, ScoredRollout
from grpox.errors import RunFailed
from grpox.rollout import streaming_scorer
from grpox.rollout.collector import Scorer, sample_and_score
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.scoring import RewardNotes, join_scores
from grpox.rollout.sampler import CompletionSampler, SampleRequest

WHO: ContextVar[str] = ContextVar("WHO", default="nobody")


class Prompts:
    """Prompt i is "p<i>"; a completion is read as its number of tokens."""

    conversational = False

    def token_ids(self, index):
        return (index,)

    def rows(self, indices):
        return [f"p{index}" for index in indices], {"answer": [index % 2 + 1 for index in indices]}

    def completion_texts(self, token_ids):
        return [str(len(ids)) for ids in token_ids]


def rollout(group, sample, version=0):
    return Rollout(group, sample, (group,), (7,) * (sample + 1), "stop", version)


class Streaming:
    """Yields what `script` yields; sample s has s + 1 tokens."""

    def __init__(self, script):
        self.script = script

    def generate(self, prompts, sampling, seed):
        return self.script(prompts)

    def sync(self, weights, version): ...
    def wake(self): ...
    def sleep(self): ...


def in_order(*places):
    return lambda prompts: iter([rollout(*place) for place in places])


def shuffled(seed):
    def script(prompts):
        places = [(p.group_id, sample) for p in prompts for sample in range(p.num_samples)]
        random.Random(seed).shuffle(places)
        return (rollout(*place) for place in places)

    return script


def sampler(script, *rewards, streaming=True):
    named = [r if isinstance(r, NamedReward) else NamedReward(r.__name__, r) for r in rewards]
    return CompletionSampler(engine(), Streaming(script), ALONE, 0), Scorer(named, streaming)


def sampled(made, groups=2, size=2, prompts=None):
    """The rows of a sampler and its scorer, and what the functions logged."""
    request = SampleRequest(prompts or Prompts(), range(groups), size, SamplingConfig(), (0, 0))
    return sample_and_score(*made, request, STATE)


def scorer():
    """The thread that scores, while there is one."""
    return next((t for t in threading.enumerate() if t.name == "grpox-early-scoring"), None)


def wait_for_scorer():
    if (thread := scorer()) is not None:
        thread.join(5)


def length(completions, **_):
    return [float(text) for text in completions]


def test_without_streaming_and_for_single_completions_all_are_scored_in_one_call_at_the_end():
    calls = []

    def reward(prompts, **_):
        calls.append(list(prompts))
        return [0.0] * len(prompts)

    def script(prompts):
        yield from (rollout(0, 0), rollout(0, 1), rollout(1, 0))
        assert scorer() is None
        yield rollout(1, 1)

    sampled(sampler(script, reward, streaming=False))
    sampled(sampler(shuffled(0), reward), groups=3, size=1)
    assert calls == [["p0", "p0", "p1", "p1"], ["p0", "p1", "p2"]]


# -- What a call is given ----------------------------------------------------------------------------------


def test_groups_that_are_whole_while_a_call_runs_are_scored_together_after_it_in_order_of_group():
    """Each call has the columns of its groups, and tells each completion its own."""
    calls, begun, free = [], threading.Semaphore(0), threading.Semaphore(0)

    def gated(prompts, answer, completion_ids, log_extra, **_):
        places = [f"{prompt}/{len(ids)}" for prompt, ids in zip(prompts, completion_ids, strict=True)]
        calls.append((places, answer))
        log_extra("place", places)
        begun.release()
        assert free.acquire(timeout=patient(5))
        return [float(len(ids)) for ids in completion_ids]

    def script(prompts):
        yield from (rollout(3, 1), rollout(2, 0))
        assert not calls  # no group is whole
        yield rollout(2, 1)
        assert begun.acquire(timeout=patient(5))
        yield from (rollout(0, 0), rollout(3, 0), rollout(1, 0), rollout(1, 1))
        assert len(calls) == 1
        free.release()
        assert begun.acquire(timeout=patient(5))
        yield rollout(0, 1)  # the last of its group
        free.release(2)

    rows, _ = sampled(sampler(script, gated), groups=4)
    assert calls == [
        (["p2/1", "p2/2"], [1, 1]),
        (["p1/1", "p1/2", "p3/1", "p3/2"], [2, 2, 2, 2]),
        (["p0/1", "p0/2"], [1, 1]),
    ]
    assert [row.extra["place"] for row in rows] == [f"p{group}/{n}" for group in range(4) for n in (1, 2)]
    assert [next(iter(row.rewards.values())) for row in rows] == [1, 2] * 4


def test_calls_are_joined_in_order_of_group_and_their_metrics_weighed_by_completions():
    def part(*groups, **metrics):
        rollouts = [rollout(group, sample) for group in groups for sample in range(2)]
        rows = [ScoredRollout(each, "", "", {}, 0.0, 0.0) for each in rollouts]
        logged = {name: {"f": value} for name, value in metrics.items()}
        return rows, RewardNotes(logged, {"first": f"group {groups[0]}", f"of {groups[0]}": "told"})

    rows, notes = join_scores([part(2, all=1.0, once=7.0), part(0, 3, 4, all=5.0), part(1)])
    assert [row.rollout for row in rows] == [rollout(g, s) for g in range(5) for s in range(2)]
    assert notes.warnings == {"first": "group 0", "of 0": "told", "of 1": "told", "of 2": "told"}
    # (2 * 1 + 6 * 5) / 8, where calls alike would make 3.
    assert notes.logged == {"all": {"f": 4.0}, "once": {"f": 7.0}}


@pytest.mark.parametrize("seed", range(3))
def test_rows_and_metrics_are_those_of_one_call_whatever_the_order_of_completion(seed):
    def right(completions, answer, log_metric, log_extra, **_):
        log_extra("gold", answer)
        log_metric("mean_gold", sum(answer) / len(answer))
        return [float(int(text) == gold) for text, gold in zip(completions, answer, strict=True)]

    async def partial(completions, **_):
        await asyncio.sleep(0)
        return [None if text == "1" else 0.5 for text in completions]

    early = sampled(sampler(shuffled(seed), right, partial), groups=4, size=3)
    late = sampled(sampler(shuffled(seed + 1), right, partial, streaming=False), groups=4, size=3)
    assert [replace(row, advantage=0.0) for row in early[0]] == [replace(row, advantage=0.0) for row in late[0]]
    assert [[*row.rewards.values()] for row in early[0][:3]] == [[1, None], [0, 0.5], [0, 0.5]]
    assert early[1] == {"mean_gold": {"right": pytest.approx(1.5)}}
    assert late[1] == {"mean_gold": {"right": 1.5}}


def test_a_function_sees_the_trainers_context_and_what_reads_data_is_not_run_in_the_scoring_thread():
    seen, readers = [], []

    def reward(completions, **_):
        seen.append(WHO.get())
        return [0.0] * len(completions)

    class Reading(Prompts):
        def completion_texts(self, token_ids):
            readers.append(threading.current_thread())
            return super().completion_texts(token_ids)

    token = WHO.set("trainer")
    sampled(sampler(shuffled(0), reward), prompts=Reading())
    WHO.reset(token)
    assert set(seen) == {"trainer"}
    assert readers == [threading.current_thread()] * 2


# -- Failures ----------------------------------------------------------------------------------------------


def breaks_on_p0(prompts, **_):
    if prompts[0] == "p0":
        raise ValueError("no")
    return [1.0] * len(prompts)


def test_a_failure_ends_the_run_at_the_next_rollout_and_closes_what_generates():
    reached = []

    def script(prompts):
        try:
            yield from (rollout(0, 0), rollout(0, 1))
            wait_for_scorer()
            yield rollout(1, 0)
            reached.append("more")
        finally:
            reached.append("closed")

    with pytest.raises(RunFailed, match="reward 'breaks_on_p0' raised ValueError: no") as caught:
        sampled(sampler(script, breaks_on_p0))
    assert isinstance(caught.value.__cause__, ValueError)
    assert reached == ["closed"]


def test_a_failure_of_the_last_group_ends_the_run_when_generation_is_over():
    with pytest.raises(RunFailed, match="raised ValueError: no"):
        sampled(sampler(in_order((1, 0), (1, 1), (0, 0), (0, 1)), breaks_on_p0))


def test_what_is_no_failure_of_a_function_is_raised_as_it_is(monkeypatch):
    def broken(*_):
        raise OSError("disk")

    monkeypatch.setattr(streaming_scorer, "score_rollouts", broken)
    with pytest.raises(OSError, match="disk"):
        sampled(sampler(shuffled(0), length))


@pytest.mark.parametrize(
    ("places", "told"),
    [
        ([(5, 0), (5, 1)], r"\(group 5, sample 0\) that was not asked for"),
        ([(0, 2)], r"\(group 0, sample 2\) that was not asked for"),
        ([(0, 1), (0, 1)], r"\(group 0, sample 1\) twice"),
        ([(0, 0), (0, 1), (0, 1)], r"\(group 0, sample 1\) twice"),
        ([(0, 0, 3), (0, 1), (1, 0), (1, 1)], "of policy version 3, the policy is at version 0"),
        ([(0, 0), (0, 1), (1, 0)], "3 of 4 rollouts asked for: 1 missing, such as group_id 1 sample 1"),
    ],
)
def test_rollouts_that_were_not_asked_for_are_refused(places, told):
    with pytest.raises(RunFailed, match=told):
        sampled(sampler(in_order(*places), length))
    wait_for_scorer()
    assert scorer() is None


# -- The main thread ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["fail", "abstain"])
def test_a_function_that_needs_the_main_thread_gets_whole_batches_there_from_then_on(logged, on_error):
    calls, others = [], []

    def guarded(prompts, **_):
        calls.append((threading.current_thread() is threading.main_thread(), len(prompts)))
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.signal(signal.SIGALRM, before)
        return [float(prompt[1:]) for prompt in prompts]

    def other(prompts, **_):
        others.append(len(prompts))
        return [2.0] * len(prompts)

    def script(prompts):
        yield from (rollout(0, 0), rollout(0, 1))
        wait_for_scorer()
        yield from (rollout(1, 0), rollout(1, 1))

    made = sampler(script, NamedReward("guarded", guarded, on_error=on_error), other)
    for _ in range(2):
        rows, _ = sampled(made)
        assert [[*row.rewards.values()] for row in rows] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert calls == [(False, 2), (True, 4), (True, 4)]
    assert others == [2, 4, 4]
    told = logged()
    assert told.count("reward 'guarded' sets a signal handler") == 1
    assert "failures are only counted" not in told


# -- Interrupts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "told"),
    [(KeyboardInterrupt, KeyboardInterrupt), (SystemExit, RunFailed), (ConnectionError, ConnectionError)],
)
def test_what_ends_generation_stops_the_call_and_starts_no_other(error, told):
    begun, cancelled, calls = threading.Event(), threading.Event(), []

    async def endless(prompts, **_):
        calls.append(prompts[0])
        begun.set()
        try:
            await asyncio.sleep(10_000)
        finally:
            cancelled.set()

    def script(prompts):
        yield from (rollout(0, 0), rollout(0, 1))
        assert begun.wait(patient(5))
        yield from (rollout(1, 0), rollout(1, 1))
        raise error

    with pytest.raises(told):
        sampled(sampler(script, endless))
    assert cancelled.is_set()
    wait_for_scorer()
    assert scorer() is None
    assert calls == ["p0"]


INTERRUPTED = """
import asyncio, os, sys, threading, time
from grpox.contracts import Prompt, Rollout
from grpox.rollout.streaming_scorer import StreamingScorer
from grpox.rollout.rewards.named import NamedReward, call_together
from grpox.rollout.rewards.scoring import RewardInputs

async def endless(completions, **_):
    try:
        os.write(1, b"waiting\\n")
        await asyncio.sleep(10_000)
    finally:
        print("stopped", flush=True)

async def twice(completions, **_):
    os.write(1, b"waiting\\n")
    await asyncio.gather(asyncio.sleep(10_000), asyncio.sleep(10_000))

def hangs(completions, **_):
    os.write(1, b"waiting\\n")
    time.sleep(10_000)

rewards = [NamedReward(f.__name__, f) for f in (hangs, endless, twice)]
try:
    if sys.argv[1] == "at once":
        call_together(rewards, {"completions": ["c"]}, 1)
    arguments = {"prompts": ["p"], "completions": ["c"]}
    read = lambda rollouts: RewardInputs(rollouts, ["c"], arguments)  # noqa: E731
    with StreamingScorer(rewards, range(2), 1, read, None) as early:
        for group in range(2):
            early.arrived(Rollout(group, 0, (1,), (2,), "stop", 0))
        if sys.argv[1] == "generating":
            threading.Event().wait()
        early.result()
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("phase", ["at once", "generating", "scoring"])
def test_an_interrupt_ends_the_process_though_a_function_hangs(phase):
    process = subprocess.Popen(
        [sys.executable, "-X", "dev", "-c", INTERRUPTED, phase],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore::DeprecationWarning"},
    )
    try:
        assert [process.stdout.readline() for _ in range(3)] == ["waiting\n"] * 3
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=patient(20))
    finally:
        process.kill()
    assert (process.returncode, out, errors) == (130, "stopped\n", "")
