"""Reward functions run at the same time, in threads and one loop, and the order of ending changes nothing."""

import asyncio
import gc
import signal
import threading
import time
import weakref
from contextvars import ContextVar

import pytest
from reward_tables import score
from support.patience import patient

from grpox.errors import RunFailed
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.named import RewardCall
from grpox.runtime.signals import Terminated

WHO: ContextVar[str] = ContextVar("WHO", default="nobody")


def scored(*functions, count=2, **options):
    rewards = [NamedReward(f"f{place}", function, **options) for place, function in enumerate(functions)]
    texts = [str(place) for place in range(count)]
    return score(rewards, ["p"] * count, texts, [[1]] * count, {})


def after(seconds, value):
    def plain(completions, log_metric, **_):
        time.sleep(seconds)
        log_metric("value", value)
        return [value] * len(completions)

    return plain


def awaited(seconds, value):
    async def wait(completions, log_metric, **_):
        await asyncio.sleep(seconds)
        log_metric("value", value)
        return [value] * len(completions)

    return wait


def test_functions_of_both_sorts_run_at_the_same_time():
    """Each waits until all four have begun, which no order one after the other brings about."""
    begun, deadline = [], time.monotonic() + patient(10)

    def all_begun():
        assert time.monotonic() < deadline, f"only {begun} have begun"
        return len(begun) == 4

    def plain(value):
        def wait(completions, **_):
            begun.append(value)
            while not all_begun():
                time.sleep(0.01)
            return [value] * len(completions)

        return wait

    def awaited(value):
        async def wait(completions, **_):
            begun.append(value)
            while not all_begun():
                await asyncio.sleep(0.01)
            return [value] * len(completions)

        return wait

    table = scored(plain(1.0), awaited(2.0), plain(3.0), awaited(4.0))
    assert table.values == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]


@pytest.mark.parametrize("delays", [(0.0, 0.1, 0.05), (0.1, 0.0, 0.05), (0.05, 0.1, 0.0)])
def test_results_and_logs_come_in_the_order_of_the_rewards(delays):
    first, second, third = delays
    table = scored(after(first, 1.0), awaited(second, 2.0), after(third, 4.0))
    assert table.values == [[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]]
    assert [*table.metrics["value"].items()] == [("f0", 1.0), ("f1", 2.0), ("f2", 4.0)]


def test_a_function_sees_the_callers_context_and_runs_in_a_daemon_thread():
    seen = []

    def plain(completions, **_):
        seen.append((WHO.get(), threading.current_thread().daemon))
        return [0.0] * len(completions)

    async def later(completions, **_):
        seen.append((WHO.get(), True))
        return [0.0] * len(completions)

    token = WHO.set("caller")
    scored(plain, later)
    WHO.reset(token)
    assert seen == [("caller", True)] * 2


def test_nothing_holds_the_copies_that_a_function_was_given_once_it_has_returned():
    class Case:
        pass

    copies = []

    def reads(cases, **_):
        copies.append(weakref.ref(cases[0]))
        return [1.0]

    rewards = [NamedReward("reads", reads)]
    score(rewards, ["p"], ["c"], [[1]], {"cases": [Case()]})
    gc.collect()
    assert copies[0]() is None


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
        table = score([reward], ["p"], ["c"], [[1]], {})
        assert table.values == [[1.0]]
        assert "its timeout cannot be kept" in table.warnings["thread of guarded"]
    assert threads == [False, True, True]


def test_where_no_main_thread_asks_a_signal_handler_is_a_failure():
    def guarded(completions, **_):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    told = []

    def elsewhere():
        try:
            scored(guarded)
        except RunFailed as error:
            told.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "signal only works in main thread" in told[0]


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

    reward = NamedReward("slow", slow, on_error="abstain", timeout=0.1)
    score([reward], ["p"], ["c"], [[1]], {})
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
    table = score(rewards, ["p"], ["c"], [[1]], {})
    gate.set()
    assert table.failed[0] == [True]
    for reward in rewards:
        reward.latest._ended.wait(patient(5))
    assert score(rewards[1:], ["p"], ["c"], [[1]], {}).values == [[1.0]]


@pytest.mark.parametrize("signalled", [KeyboardInterrupt, Terminated])
def test_a_signal_that_reaches_a_function_in_the_main_thread_is_not_its_failure(signalled):
    def interrupted(**_):
        raise signalled

    with pytest.raises(signalled):
        RewardCall(interrupted, {}, 1).run()
