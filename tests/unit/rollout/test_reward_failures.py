"""A reward that raises, hangs or returns no scores ends the run or abstains, as its policy has it."""

import asyncio
import re
import signal
import sys
import threading
import time

import pytest
from faulty_rewards import Mute, exits, raises_an_interrupt, raises_without_a_text
from reward_tables import score
from support.handlers import handlers_kept
from support.patience import patient

from grpox.contracts import FailedScore
from grpox.errors import RunFailed
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.call import defined_at
from grpox.rollout.rewards.named import RewardCall
from grpox.runtime.signals import Terminated, install_handlers

LIMIT = 0.2


def scored(*rewards, count=2):
    texts = [str(place) for place in range(count)]
    return score(rewards, ["p"] * count, texts, [[1]] * count, {})


def abstaining(function, timeout=5.0, label="judge"):
    return NamedReward(label, function, on_error="abstain", timeout=timeout)


def ones(completions, **_):
    return [1.0] * len(completions)


def line_of(function, offset):
    return f"test_reward_failures.py:{function.__code__.co_firstlineno + offset}"


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


async def waits_too_long_for_a_part(**_):
    async with asyncio.timeout(0.01):
        await asyncio.sleep(600)


async def interrupts_later(**_):
    await asyncio.sleep(0)
    raise KeyboardInterrupt


async def ends_as_a_generator(**_):
    raise GeneratorExit


async def several_at_once(**_):
    raise BaseExceptionGroup("two", [KeyboardInterrupt(), ValueError()])


async def without_a_text_later(**_):
    raise Mute


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (raises_an_interrupt, "raised KeyboardInterrupt"),
        (interrupts_later, "raised KeyboardInterrupt"),
        (ends_as_a_generator, "raised GeneratorExit"),
        (several_at_once, "raised BaseExceptionGroup: two"),
        (raises_without_a_text, "raised Mute: its message cannot be read: ValueError"),
        (without_a_text_later, "raised Mute: its message cannot be read: ValueError"),
        (exits, "raised SystemExit: 0"),
        (leaves_later, "raised SystemExit: 0"),
        (leaves_in_a_task, "raised SystemExit: 3"),
        (cancels_itself, "raised CancelledError"),
        (waits_too_long_for_a_part, "raised TimeoutError"),
    ],
)
def test_whatever_a_function_raises_ends_the_run_or_abstains(function, told):
    with pytest.raises(RunFailed, match=f"reward 'judge' {told}") as caught:
        scored(NamedReward("judge", function))
    assert re.search(r"\((test_reward_failures|faulty_rewards)\.py:\d+\)", str(caught.value))
    table = scored(abstaining(function), NamedReward("ones", ones))
    assert table.values == [[None, None], [1.0, 1.0]]
    assert table.failed == [[True, True], [False, False]]


def test_the_line_that_is_told_is_that_of_the_users_function():
    with pytest.raises(RunFailed, match=re.escape(line_of(leaves_later, 2))):
        scored(NamedReward("judge", leaves_later))


def test_a_call_that_python_refuses_is_placed_where_the_function_begins():
    def positional(completions, /):
        return [0.0]

    assert defined_at(positional) == line_of(positional, 0)
    with pytest.raises(RunFailed, match=re.escape(f"({line_of(positional, 0)})")):
        scored(NamedReward("judge", positional))


def test_a_function_gives_the_reason_for_a_score_that_it_could_not_obtain():
    def partly(**_):
        return [0.5, FailedScore("the verifier is down"), None]

    with pytest.raises(RunFailed, match=r"'judge' has no score for completion 1: the verifier is down$"):
        scored(NamedReward("judge", partly), count=3)
    table = scored(abstaining(partly), count=3)
    assert table.values == [[0.5, None, None]]
    assert table.failed == [[False, True, False]]
    assert "the verifier is down" in str(table.warnings)


def test_every_failing_function_is_told_in_order_and_the_first_exception_is_kept():
    def late(**_):
        time.sleep(0.1)
        return [1.0]

    def early(**_):
        raise OSError("down")

    with pytest.raises(RunFailed) as caught:
        scored(NamedReward("late", late), NamedReward("early", early))
    first, second = str(caught.value).splitlines()
    assert first == "reward 'late' returned 1 scores for 2 completions"
    assert second.startswith("reward 'early' raised OSError: down")
    assert isinstance(caught.value.__cause__, OSError)


class Hanging:
    """Waits until it is let go, and counts its calls."""

    def __init__(self):
        self.gate, self.calls = threading.Event(), 0

    def __call__(self, completions, **_):
        self.calls += 1
        self.gate.wait(600)
        return [1.0] * len(completions)


def test_a_function_that_hangs_is_given_up_after_its_timeout_and_not_called_again_while_it_hangs():
    hanging = Hanging()
    reward = abstaining(hanging, LIMIT)
    table = scored(reward, NamedReward("ones", ones))
    assert reward.latest.running
    assert table.values == [[None, None], [1.0, 1.0]]
    for fact in ("timeout of 0.2 s", "(test_reward_failures.py:"):
        assert fact in table.warnings["failure of judge"]

    reward.timeout = 600.0  # which nobody waits out again
    again = scored(reward)
    assert reward.latest.running
    assert again.failed == [[True, True]]
    assert hanging.calls == 1

    hanging.gate.set()
    assert reward.latest._ended.wait(patient(10))
    assert scored(reward).values == [[1.0, 1.0]]
    assert hanging.calls == 2


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


def test_a_late_result_and_what_it_logs_change_nothing():
    gate, done = threading.Event(), threading.Event()

    def late(completions, log_metric, **_):
        gate.wait(5)
        log_metric("late", 1.0)
        done.set()
        return [1.0] * len(completions)

    table = scored(abstaining(late, LIMIT))
    gate.set()
    assert done.wait(5)
    assert table.values == [[None, None]]
    assert table.metrics == {}


def test_a_failing_function_is_told_with_what_follows_from_it():
    def broken(**_):
        raise OSError("down")

    (warning,) = scored(abstaining(broken)).warnings.values()
    first, second = warning.splitlines()
    assert first == f"reward 'judge' raised OSError: down ({line_of(broken, 1)})"
    for fact in ("abstains", "counted (rewards/judge/errors)"):
        assert fact in second


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
    table = score([NamedReward("judge", changes)], ["p"] * 3, ["c"] * 3, [[1]] * 3, {"rows": rows})
    assert table.values == [[1.0, 1.0, 1.0]]
    assert (itself[0], rows[2]) == (1, {"list": [1]})
    assert seen[0][0][1] is seen[0][0]
    assert seen[0][1] is deep
