"""Reward functions, called as TRL users expect: arguments, scores, what they log and how they fail."""

import asyncio
import gc
import math
import re
import signal
import sys
import threading
import time
import weakref
from contextvars import ContextVar
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from faulty_rewards import exits, raises_an_interrupt, raises_without_a_text
from reward_tables import score
from support.handlers import handlers_kept
from support.patience import patient

from grpox.config import RewardRef
from grpox.contracts import FailedScore, TrainerState
from grpox.errors import ConfigError, RunFailed
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.call import defined_at
from grpox.rollout.rewards.isolation import bind_rewards
from grpox.rollout.rewards.named import RewardCall
from grpox.rollout.rewards.scoring import weighed_mean_logged, with_logged
from grpox.runtime.signals import Terminated, install_handlers

STATE = TrainerState(global_step=3, max_steps=10, epoch=0.5)
WHO: ContextVar[str] = ContextVar("WHO", default="nobody")
LIMIT = 0.2


def scored(*functions, completions=("ab", "abcd"), **columns):
    """Score with functions called f0, f1 ..., or with rewards that have a name."""
    rewards = [
        each if isinstance(each, NamedReward) else NamedReward(f"f{place}", each)
        for place, each in enumerate(functions)
    ]
    ids = [[1] * len(completion) for completion in completions]
    return score(rewards, ["p"] * len(completions), list(completions), ids, columns, STATE)


def abstaining(function, timeout=5.0):
    return NamedReward("judge", function, on_error="abstain", timeout=timeout)


def ones(completions, **_):
    return [1.0] * len(completions)


def broken(**_):
    raise OSError("down")


def line_of(function, offset=0):
    return f"test_reward_functions.py:{function.__code__.co_firstlineno + offset}"


# -- Arguments -------------------------------------------------------------------------------------------


def test_a_function_gets_everything_by_kwargs_and_otherwise_what_it_names():
    seen = {}

    def by_length(completions, **kwargs):
        seen.update(kwargs)
        return [float(len(c)) for c in completions]

    def against_column(completions, answer):
        return [1.0 if c == a else 0.0 for c, a in zip(completions, answer, strict=True)]

    assert scored(by_length, against_column, answer=["ab", "y"]).values == [[2.0, 4.0], [1.0, 0.0]]
    assert set(seen) == {"prompts", "completion_ids", "answer", "trainer_state", "log_metric", "log_extra"}
    assert seen["completion_ids"] == [[1, 1], [1, 1, 1, 1]]
    assert seen["trainer_state"] is STATE


def lacking(columns, *functions):
    """The problems of binding functions to data with these columns."""
    data = SimpleNamespace(column_names=columns, data="the data")
    refs = [RewardRef(path=f"mine.py:f{place}") for place in range(len(functions))]
    with pytest.raises(ConfigError) as caught:
        bind_rewards(refs, functions, data)
    return caught.value.problems


def test_a_column_that_the_data_lacks_is_named_with_the_nearest():
    [problem] = lacking(["answers"], ones, lambda completions, answer: completions)
    assert problem.what == "reward 'f1' needs column 'answer', which the data lacks"
    assert problem.nearest == "answers"


def test_a_dotted_name_reads_a_value_within_a_column():
    class Reads:
        reads_columns = ("model.truth.text", "a.b", "model.style")

        def __call__(self, completions, **columns):
            seen.update({name: columns[name] for name in self.reads_columns})
            return [0.0] * len(completions)

    seen = {}
    rows = [{"truth": {"text": "7"}}, {"truth": {"text": None}, "style": "rule"}, {"truth": "7"}, None]
    scored(Reads(), completions="cccc", **{"model": rows, "a.b": [1, 2, 3, 4], "a": [{"b": 5}] * 4})
    assert seen == {
        "model.truth.text": ["7", None, None, None],
        "a.b": [1, 2, 3, 4],
        "model.style": [None, "rule", None, None],
    }
    expected = [
        f"reward 'f0' needs column 'model.{name}', which the data lacks" for name in ("truth.text", "style")
    ]
    assert [problem.what for problem in lacking(["a"], Reads())] == expected


def test_what_one_function_does_to_its_arguments_reaches_nobody_else():
    changed, seen = threading.Event(), []

    def changes(completions, completion_ids, rows, **_):
        completions[0][0]["content"] = "changed"
        completions.append("more")
        completion_ids[0][0] = 99
        rows[0]["deep"]["list"].clear()
        changed.set()
        return [0.0, 0.0]

    def reads(completions, completion_ids, rows, **_):
        assert changed.wait(patient(30))
        seen.append((completions, completion_ids, rows))
        return [1.0, 1.0]

    completions = [[{"role": "assistant", "content": each}] for each in "ab"]
    ids, rows = [[1, 2], [3]], [{"deep": {"list": [1]}}, {"deep": {"list": [2]}}]
    rewards = [NamedReward("changes", changes), NamedReward("reads", reads)]
    score(rewards, ["p", "p"], completions, ids, {"rows": rows})
    as_given = (
        [[{"role": "assistant", "content": each}] for each in "ab"],
        [[1, 2], [3]],
        [{"deep": {"list": [1]}}, {"deep": {"list": [2]}}],
    )
    assert seen == [as_given]
    assert (completions, ids, rows) == as_given


def test_values_that_contain_themselves_or_are_nested_too_deeply_end_no_run():
    """A stream from Python can give them."""
    itself, deep, seen = [1], [], []
    itself.append(itself)
    for _ in range(100_000):
        deep = [deep]

    def changes(rows, **_):
        rows[0][0] = 99
        rows[2]["list"].append(2)
        seen.append(rows)
        return [1.0, 1.0, 1.0]

    rows = [itself, deep, {"list": [1]}]
    assert scored(changes, completions="ccc", rows=rows).values == [[1.0, 1.0, 1.0]]
    assert (itself[0], rows[2]) == (1, {"list": [1]})
    assert seen[0][0][1] is seen[0][0]
    assert seen[0][1] is deep


def test_nothing_holds_the_copies_that_a_function_was_given_once_it_has_returned():
    class Case:
        pass

    copies = []

    def reads(cases, **_):
        copies.append(weakref.ref(cases[0]))
        return [1.0]

    reward = NamedReward("reads", reads)  # which keeps its latest call
    scored(reward, completions="c", cases=[Case()])
    gc.collect()
    assert copies[0]() is None


# -- Scores ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "returned", [np.array([0.5, 2]), torch.tensor([0.5, 2.0]), [np.float32(0.5), 2], (0.5, 2)], ids=type
)
def test_numbers_of_numpy_and_torch_are_numbers(returned):
    assert scored(lambda **_: returned).values == [[0.5, 2.0]]


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ([1.0], "1 scores for 2 completions"),
        ([1.0, math.nan], "nan (float) for completion 1"),
        ([math.inf, 1.0], "inf (float) for completion 0"),
        ([1.0, 1e300], "1e+300 (float) for completion 1"),
        ([1.0, "1"], "'1' (str) for completion 1"),
        (0.5, "0.5 (float), not a list of 2 numbers"),
        (None, "None, not a list"),
        ({0: 1.0, 1: 1.0}, "{0: 1.0, 1: 1.0} (dict), not a list"),
        ("ab", "'ab' (str), not a list"),
    ],
)
def test_what_is_no_list_of_scores_is_refused_by_name(returned, told):
    with pytest.raises(RunFailed, match=re.escape(told)) as caught:
        scored(lambda **_: returned)
    assert "'f0'" in str(caught.value)


def test_an_empty_batch_calls_nothing():
    def never(**_):
        raise AssertionError("called")

    assert scored(never, completions=()).values == [[]]


def test_a_function_gives_the_reason_for_a_score_that_it_could_not_obtain():
    def partly(**_):
        return [0.5, FailedScore("the verifier is down"), None]

    with pytest.raises(RunFailed, match=r"'f0' has no score for completion 1: the verifier is down$"):
        scored(partly, completions="abc")
    table = scored(abstaining(partly), completions="abc")
    assert table.values == [[0.5, None, None]]
    assert table.failed == [[False, True, False]]
    assert "the verifier is down" in str(table.warnings)


# -- Threads and the event loop --------------------------------------------------------------------------


def test_functions_of_both_sorts_run_at_the_same_time_and_keep_the_order_of_the_rewards():
    """Each waits until all four have begun and those after it have ended."""
    begun, ended, deadline = set(), set(), time.monotonic() + patient(10)

    def may_end(place):
        assert time.monotonic() < deadline, f"begun are {begun}, ended {ended}"
        begun.add(place)
        return len(begun) == 4 and ended.issuperset(range(place + 1, 4))

    def ends(place, completions, log_metric):
        log_metric("value", place)
        ended.add(place)
        return [float(place)] * len(completions)

    def plain(place):
        def wait(completions, log_metric):
            while not may_end(place):
                time.sleep(0.01)
            return ends(place, completions, log_metric)

        return wait

    def awaited(place):
        async def wait(completions, log_metric):
            while not may_end(place):
                await asyncio.sleep(0.01)
            return ends(place, completions, log_metric)

        return wait

    table = scored(plain(0), awaited(1), plain(2), awaited(3))
    assert table.values == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert [*table.metrics["value"].items()] == [("f0", 0.0), ("f1", 1.0), ("f2", 2.0), ("f3", 3.0)]


def test_a_function_sees_the_callers_context_and_runs_in_a_daemon_thread_or_the_one_loop():
    seen, loops = [], set()

    def plain(completions, **_):
        seen.append((WHO.get(), threading.current_thread().daemon))
        return [0.0] * len(completions)

    async def later(completions, **_):
        loops.add(asyncio.get_running_loop())
        seen.append((WHO.get(), True))
        return [0.0] * len(completions)

    token = WHO.set("caller")
    scored(plain, later)
    scored(plain, later)  # a client that is made once meets the loop of its first use again
    WHO.reset(token)
    assert seen == [("caller", True)] * 4
    assert len(loops) == 1


def test_functions_run_where_a_loop_is_running_already_and_may_run_one_of_their_own():
    async def one(completions, **_):
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    def plain(completions, **_):
        return asyncio.run(one(completions))

    async def notebook():
        return scored(one, plain).values

    assert asyncio.run(notebook()) == [[1.0, 1.0]] * 2


def test_a_function_that_sets_signal_handlers_is_called_in_the_main_thread_from_then_on():
    threads = []

    def guarded(completions, **_):
        threads.append(threading.current_thread() is threading.main_thread())
        try:
            before = signal.signal(signal.SIGALRM, lambda *_: None)
        except ValueError as error:
            raise ValueError("no time limits in threads") from error  # as math-verify words it
        signal.signal(signal.SIGALRM, before)
        return [1.0] * len(completions)

    reward = NamedReward("guarded", guarded)
    for _ in range(2):
        table = scored(reward)
        assert table.values == [[1.0, 1.0]]
        assert "its timeout cannot be kept" in table.warnings["thread of guarded"]
    assert threads == [False, True, True]


def test_where_no_main_thread_asks_a_signal_handler_is_a_failure():
    told = []

    def elsewhere():
        try:
            scored(lambda **_: signal.signal(signal.SIGALRM, signal.SIG_DFL))
        except RunFailed as error:
            told.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "signal only works in main thread" in told[0]


# -- Time limits -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_coroutine_whose_turn_never_comes_is_closed():
    """Its function blocks beyond the timeout before it hands the coroutine over."""
    gate, made = threading.Event(), []

    async def never(completions, **_):
        return [0.0] * len(completions)

    def slow(**arguments):
        gate.wait(patient(5))
        made.append(never(**arguments))
        return made[0]

    reward = abstaining(slow, 0.1)
    scored(reward)
    gate.set()
    reward.latest._ended.wait(patient(5))
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        made[0].send(None)
    made.clear()
    gc.collect()


def test_one_that_blocks_the_loop_times_out_with_those_it_holds_up_and_they_end_after_it():
    gate = threading.Event()

    async def blocks(**_):
        gate.wait(patient(30))

    async def held_up(completions, **_):
        return [1.0] * len(completions)

    rewards = [
        NamedReward("blocks", blocks, on_error="abstain", timeout=0.1),
        NamedReward("held up", held_up, on_error="abstain", timeout=1.0),
    ]
    table = scored(*rewards)
    gate.set()
    assert table.failed[0] == [True, True]
    for reward in rewards:
        reward.latest._ended.wait(patient(5))
    assert scored(rewards[1]).values == [[1.0, 1.0]]


def test_a_function_that_hangs_is_given_up_and_neither_called_while_it_hangs_nor_heard_afterwards():
    gate, calls = threading.Event(), []

    def hangs(completions, log_metric):
        calls.append(len(completions))
        gate.wait(600)
        log_metric("late", 1.0)
        return [1.0] * len(completions)

    reward = abstaining(hangs, LIMIT)
    table = scored(reward, ones)
    first = reward.latest
    assert first.running
    assert table.values == [[None, None], [1.0, 1.0]]
    for fact in ("timeout of 0.2 s", "(test_reward_functions.py:"):
        assert fact in table.warnings["failure of judge"]

    reward.timeout = 600.0  # which nobody waits out again
    assert scored(reward).failed == [[True, True]]
    assert reward.latest.running
    assert calls == [2]

    gate.set()
    assert first._ended.wait(patient(10))
    assert (table.metrics, first.values, first.log.metrics) == ({}, [None, None], {})
    assert scored(reward).values == [[1.0, 1.0]]
    assert calls == [2, 2]


def test_an_async_function_that_takes_too_long_is_cancelled():
    cancelled = threading.Event()

    async def slow(**_):
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    reward = abstaining(slow, LIMIT)
    assert scored(reward).failed == [[True, True]]
    assert cancelled.is_set()
    assert not reward.latest.running
    assert "timeout of 0.2 s" in scored(reward).warnings["failure of judge"]  # called again


# -- Failures --------------------------------------------------------------------------------------------


async def leaves_later(**_):
    await asyncio.sleep(0)
    sys.exit(0)


async def leaves_in_a_task(**_):
    async def inner():
        sys.exit(3)

    await asyncio.create_task(inner())


async def cancels_itself(**_):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def interrupts_later(**_):
    await asyncio.sleep(0)
    raise KeyboardInterrupt


def fails_as_it_is_read(completions, **_):
    return ({}["gone"] for _ in completions)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (raises_an_interrupt, "raised KeyboardInterrupt"),
        (interrupts_later, "raised KeyboardInterrupt"),
        (raises_without_a_text, "raised Mute: its message cannot be read: ValueError"),
        (exits, "raised SystemExit: 0"),
        (leaves_later, "raised SystemExit: 0"),
        (leaves_in_a_task, "raised SystemExit: 3"),
        (cancels_itself, "raised CancelledError"),
        (fails_as_it_is_read, "raised KeyError: 'gone'"),
    ],
)
def test_whatever_a_function_raises_ends_the_run_or_abstains(function, told):
    with pytest.raises(RunFailed, match=f"reward 'f0' {told}") as caught:
        scored(function)
    assert re.search(r"\((test_reward_functions|faulty_rewards)\.py:\d+\)", str(caught.value))
    table = scored(abstaining(function), ones)
    assert table.values == [[None, None], [1.0, 1.0]]
    assert table.failed == [[True, True], [False, False]]


def test_the_line_that_is_told_is_that_of_the_users_function_or_where_it_begins():
    def positional(completions, /):
        return [0.0]

    assert defined_at(positional) == line_of(positional)
    # Python refuses the call of `positional`.
    for function, line in ((leaves_later, line_of(leaves_later, 2)), (positional, line_of(positional))):
        with pytest.raises(RunFailed, match=re.escape(f"({line})")):
            scored(function)


def test_every_failing_function_is_told_in_order_and_the_first_exception_is_kept():
    def late(**_):
        time.sleep(0.1)
        return [1.0]

    with pytest.raises(RunFailed) as caught:
        scored(late, broken)
    first, second = str(caught.value).splitlines()
    assert first == "reward 'f0' returned 1 scores for 2 completions"
    assert second.startswith("reward 'f1' raised OSError: down")
    assert isinstance(caught.value.__cause__, OSError)


def test_a_failing_function_is_told_with_what_follows_from_it():
    (warning,) = scored(abstaining(broken)).warnings.values()
    first, second = warning.splitlines()
    assert first == f"reward 'judge' raised OSError: down ({line_of(broken, 1)})"
    for fact in ("abstains", "counted (rewards/judge/errors)"):
        assert fact in second


@pytest.mark.parametrize(
    ("function", "is_chat_style"),
    [
        (lambda completions, **_: [len(each[0]["content"]) for each in completions], True),
        (lambda completions, **_: [len(each[-1]["content"]) for each in completions], True),
        (lambda completions, **_: [len(each[0].get("content")) for each in completions], True),
        (lambda completions, **_: [len(each["content"]) for each in completions], True),
        (lambda completions, **_: [1 / 0], False),
        (lambda completions, **_: [{}["content"]], False),
    ],
)
def test_a_function_for_messages_is_told_that_completions_are_strings(function, is_chat_style):
    for first in ("c", "") if is_chat_style else ("c",):
        with pytest.raises(RunFailed) as caught:
            scored(function, completions=(first, "d"))
        assert ("completions are strings here" in str(caught.value)) == is_chat_style


@pytest.mark.parametrize("signalled", [KeyboardInterrupt, Terminated])
def test_a_signal_that_reaches_a_function_in_the_main_thread_is_not_its_failure(signalled):
    def interrupted(**_):
        raise signalled

    with pytest.raises(signalled):
        RewardCall(interrupted, {}, 1).run()


def test_an_interrupt_of_its_own_in_the_main_thread_is_its_failure():
    """The run remembers its signals there, and none has come."""

    def limited(**_):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # Python takes this in the main thread only
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGALRM)
    reward = NamedReward("judge", limited)
    try:
        with handlers_kept():
            install_handlers()
            with pytest.raises(RunFailed, match="reward 'judge' raised KeyboardInterrupt"):
                scored(reward)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert reward.in_main_thread


def test_a_signal_that_the_function_makes_another_exception_of_still_ends_the_run():
    def wraps(**_):
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            raise RuntimeError("wrapped") from error

    with handlers_kept():
        install_handlers()
        try:
            with pytest.raises(Terminated):
                RewardCall(wraps, {}, 1).run()
        finally:
            install_handlers()  # forgets the signal


# -- Logged values ---------------------------------------------------------------------------------------


def logs(*calls, columns=None):
    def function(completions, log_metric, log_extra):
        for name, value in calls:
            log_metric(name, value)
        for name, values in (columns or {}).items():
            log_extra(name, values)
        return [0.0] * len(completions)

    return function


def test_a_metric_is_the_mean_over_the_calls_of_its_function():
    table = scored(logs(("a", 1), ("a", 4), ("b", 2)), logs(("a", 5.0)))
    assert table.metrics == {"a": {"f0": 2.5, "f1": 5.0}, "b": {"f0": 2.0}}


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None])
def test_a_metric_that_is_no_finite_number_is_refused_where_it_is_logged(value):
    place = r"test_reward_functions.py:\d+"
    with pytest.raises(RunFailed, match=rf"'f0' raised ValueError: log_metric\('a', .*{place}"):
        scored(logs(("a", value)))


def test_ranks_and_batches_are_averaged_label_by_label_in_a_fixed_order():
    ranks = [{"b": {"f": 1.0}, "a": {"f": 1.0}}, {}, {"a": {"f": 2.0, "g": 7.0}}]
    merged = weighed_mean_logged((rank, 1) for rank in ranks)
    assert merged == {"a": {"f": 1.5, "g": 7.0}, "b": {"f": 1.0}}
    assert [*merged] == ["a", "b"]


def test_a_column_that_several_functions_log_is_told_for_each():
    table = scored(logs(columns={"length": [1, 2], "own": [3, 4]}), logs(columns={"length": [5, 6]}))
    assert table.extra_columns == {"f0/length": [1, 2], "own": [3, 4], "f1/length": [5, 6]}


def test_a_column_of_another_length_is_a_failure_and_nothing_that_a_failed_call_logged_is_kept():
    short = logs(("a", 1.0), columns={"length": [1]})
    with pytest.raises(RunFailed, match="'f0' logged 1 values of log_extra column 'length' for 2 completions"):
        scored(short)
    table = scored(abstaining(short), logs(columns={"length": [1, 2]}))
    assert table.failed == [[True, True], [False, False]]
    assert (table.metrics, table.extra_columns) == ({}, {"length": [1, 2]})


def test_what_a_function_does_later_to_what_it_has_logged_changes_no_record():
    details = {"seen": []}

    def reuses(completions, log_extra):
        for completion in completions:
            details["seen"].append(completion)
            log_extra("details", [details])
        return [0.0] * len(completions)

    table = scored(reuses, completions="cc")
    details["seen"].clear()
    assert table.extra_columns == {"details": [{"seen": ["c"]}, {"seen": ["c", "c"]}]}


def test_a_name_of_the_trainers_own_is_told_under_the_functions_label():
    own = {"loss": 0.25, "reward": 1.0}
    metrics, renamed = with_logged(own, {"loss": {"f": 9.0, "g": 8.0}, "seen": {"f": 1.0, "g": 3.0}})
    assert metrics == {"loss": 0.25, "reward": 1.0, "f/loss": 9.0, "g/loss": 8.0, "seen": 2.0}
    for line, label in zip(renamed, ["f", "g"], strict=True):
        assert line.startswith(f"reward '{label}' logs 'loss'")
        assert line.endswith(f" '{label}/loss'")
