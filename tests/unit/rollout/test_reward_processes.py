"""A reward function in its own process: what goes wrong there is told, counted, and harms no run."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faulty_rewards
import psutil
import pytest
from reward_tables import RewardTable, score
from support.patience import patient
from support.services import wait_until

from grpox.contracts import TrainerState
from grpox.errors import ConfigError, RunFailed, traceback_of
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.messages import Blueprint
from grpox.rollout.rewards.process import RewardProcess

FILE = Path(__file__).with_name("faulty_rewards.py")
COMPLETIONS = ["one", "", "three", "four"]
WHOLE = [None] * 4


def process(name: str, config: Any = None, timeout: float = 60.0, memory: float = 16.0) -> RewardProcess:
    plan = Blueprint(name, "rewards[0]", f"{FILE}:{name}", True, pickle.dumps(config), tuple(sys.path), None)
    return RewardProcess(plan, timeout, memory)


@pytest.fixture
def started() -> Iterator[Any]:
    made: list[RewardProcess] = []

    def start(name: str, **options: Any) -> RewardProcess:
        made.append(process(name, **options))
        return made[-1]

    yield start
    for one in made:
        one.close()


def scored(reward: NamedReward, completions: list[str] = COMPLETIONS, step: int = 3) -> RewardTable:
    ids = [[7] * len(text) for text in completions]
    state = TrainerState(step, 10, 0.5)
    columns = {"answer": [1.0, 2.0, 3.0, 4.0]}
    return score([reward], ["p"] * len(completions), completions, ids, columns, state)


def is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    "name", ["lengths", "later", "raises", "returns_nan", "has_no_score", "returns_too_few", "exits"]
)
def test_a_call_gives_the_same_in_a_process_as_in_a_thread(started: Any, name: str) -> None:
    tables = [
        scored(NamedReward(name, function, on_error="abstain"))
        for function in (getattr(faulty_rewards, name), started(name))
    ]
    here, there = map(repr, tables)
    assert here == there


def test_a_class_is_built_there_with_its_parameters(started: Any) -> None:
    # In a run the parent has loaded the file; the config's class is found under its own module there and here.
    from grpox.plugins.load_object import load_object

    config = load_object(f"{FILE}:Scaled").Config(factor=0.5)
    assert scored(NamedReward("scaled", started("Scaled", config=config))).values == [[0.5, 1.0, 1.5, 2.0]]


def test_a_process_serves_every_call_and_has_a_main_thread(started: Any) -> None:
    reward = NamedReward("pid", started("knows_its_process"))
    first, second = scored(reward).values, scored(reward).values
    assert first == second
    assert first[0][0] != os.getpid()
    assert scored(NamedReward("alarm", started("sets_an_alarm"))).values == [[1.0] * 4]


def test_what_is_drawn_depends_on_the_completions_and_the_step_alone(started: Any) -> None:
    one, other = (NamedReward("draws", started("draws")) for _ in range(2))
    first = scored(one).values
    assert scored(one).values == first  # a second call: as after a resume, nothing is carried on
    assert scored(other).values == first
    assert scored(one, step=4).values != first
    assert scored(one, ["one", "two", "three", "four"]).values != first


AT = r" \(faulty_rewards\.py:\d+\)$"
WHOLE_CALL = {
    "raises": r"raised OSError: the judge is down" + AT,
    "hangs": r"took longer than its timeout of 0\.2 s" + AT,
    "hangs_awaited": r"took longer than its timeout of 0\.2 s" + AT,
    "hangs_in_c": r"took longer than its timeout of 0\.2 s" + AT,
    "returns_none": r"returned None, not a list of 4 numbers$",
    "returns_too_few": r"returned 1 scores for 4 completions$",
    "returns_too_many": r"returned 10000000 scores for 4 completions$",
    "takes_all_memory": r"held \d+\.\d MiB of memory; its limit \(memory\) is 0\.4 GiB" + AT,
    "takes_all_memory_in_children": r"held \d+\.\d MiB of memory; its limit \(memory\) is 0\.4 GiB" + AT,
    "leaves": r"ended its process with exit code 0" + AT,
    "exits": r"raised SystemExit: 0" + AT,
    "crashes": r"lost its process to signal 11 \(SIGSEGV\)" + AT,
    "is_killed": r"lost its process to signal 9 \(SIGKILL, as the kernel does where memory runs out\)" + AT,
    "closes_everything": r"closed its connection to the trainer" + AT,
    "logs_what_cannot_be_sent": r"logged by log_extra what cannot be pickled",
    "logs_what_exits_as_it_is_sent": r"logged by log_extra what cannot be pickled \(SystemExit: 0\)",
    "logs_what_exits_as_it_is_read": r"sent back what the trainer cannot read: SystemExit: 0$",
    "returns_a_number_that_exits": r"raised SystemExit: 0",
    "raises_an_interrupt": r"raised KeyboardInterrupt" + AT,
    "raises_without_a_text": r"raised Mute: its message cannot be read: ValueError" + AT,
    "raises_its_own": r"raised Own: mine" + AT,
}
ONE_COMPLETION = {
    "returns_nan": r"returned nan \(float\) for completion 0",
    "returns_inf": r"returned inf \(float\) for completion 0",
    "returns_text": r"returned '1' \(str\) for completion 0",
    "returns_what_cannot_be_sent": r"returned <grpox.*Unsendable object.* for completion 0",
}
FAULTS = WHOLE_CALL | ONE_COMPLETION


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_told_by_name_and_place_and_ends_the_run_or_is_counted(started: Any, name: str) -> None:
    slow, hungry = name.startswith("hangs"), name.startswith("takes")
    function = started(name, timeout=0.2 if slow else 60.0, memory=0.4 if hungry else 16.0)

    with pytest.raises(RunFailed) as caught:
        scored(NamedReward("judge", function))
    first = str(caught.value).splitlines()[0]
    assert first.startswith("reward 'judge' ")
    assert re.search(FAULTS[name], first), first

    # The same function goes on to be called, in a new process where it lost the first one.
    table = scored(NamedReward("judge", function, on_error="abstain"))
    whole = name in WHOLE_CALL
    assert table.values == ([WHOLE] if whole else [[None, 1.0, 1.0, 1.0]])
    assert table.failed == ([[True] * 4] if whole else [[True, False, False, False]])
    assert re.search(FAULTS[name], table.warnings["failure of judge"].splitlines()[0])


def test_the_line_at_which_it_hangs_or_crashes_is_that_of_the_users_file(started: Any) -> None:
    lines = FILE.read_text().splitlines()
    for name, text in (("hangs", "time.sleep(1)"), ("hangs_in_c", "PyDLL"), ("crashes", "string_at")):
        table = scored(NamedReward("judge", started(name, timeout=patient(0.25)), on_error="abstain"))
        line = int(re.findall(r"faulty_rewards\.py:(\d+)", table.warnings["failure of judge"])[0])
        assert text in lines[line - 1] or "while True" in lines[line - 1]


def test_the_traceback_of_what_it_raised_comes_along(started: Any) -> None:
    with pytest.raises(RunFailed) as caught:
        scored(NamedReward("judge", started("raises")))
    assert 'raise OSError("the judge is down")' in traceback_of(caught.value)


def test_of_a_traceback_of_any_length_a_bounded_part_comes_along(started: Any) -> None:
    with pytest.raises(RunFailed) as caught:
        scored(NamedReward("judge", started("raises_much")))
    assert len(str(caught.value)) < 2200
    (trace,) = caught.value.__cause__.__notes__
    assert len(trace) < 10_000
    assert all(text in traceback_of(caught.value) for text in ("ValueError: zzz", "OSError: xxx", "yyy"))


def test_a_process_that_is_killed_twice_closes_nothing_of_anothers(started: Any) -> None:
    function = started("lengths")
    assert function.ready.problems == ()
    running = function.get()
    running.kill()
    with contextlib.ExitStack() as stack:  # the numbers that were its own are taken again
        files = [stack.enter_context(open(os.devnull)) for _ in range(20)]
        running.kill()
        assert [os.fstat(file.fileno()).st_rdev for file in files] == [os.stat(os.devnull).st_rdev] * 20


def test_a_child_that_it_leaves_behind_ends_with_its_process(started: Any, tmp_path: Path) -> None:
    function = started("leaves_a_child")
    table = scored(NamedReward("judge", function), [str(tmp_path / "pid")])
    assert table.values == [[1.0]]
    child = int((tmp_path / "pid").read_text())
    assert psutil.Process(child).status() != psutil.STATUS_ZOMBIE
    function.close()
    wait_until(lambda: is_gone(child), "the child has ended", 20)


def test_a_child_ends_also_where_the_process_learns_first_that_the_trainer_is_gone(
    started: Any, tmp_path: Path
) -> None:
    function = started("leaves_a_child")
    scored(NamedReward("judge", function), [str(tmp_path / "pid")])
    child = int((tmp_path / "pid").read_text())
    with socket.socket(fileno=os.dup(function.get().connection.fileno())) as connection:
        connection.shutdown(socket.SHUT_WR)  # the kernel closes this one before the process's lifeline
    try:
        wait_until(lambda: is_gone(child), "the child has ended", 20)
    finally:
        function.close()


def test_a_fork_that_returns_from_the_function_as_well_answers_once(started: Any) -> None:
    reward = NamedReward("judge", started("forks_and_forgets"))
    assert [scored(reward).values for _ in range(3)] == [[[1.0] * 4]] * 3


def test_what_it_prints_goes_where_the_run_prints(started: Any, capfd: pytest.CaptureFixture[str]) -> None:
    reward = NamedReward("judge", started("prints"))
    for _ in range(2):
        scored(reward)
        assert capfd.readouterr() == ("a line\n", "a complaint\n")  # complete when the call has ended


def test_what_it_prints_is_passed_on_as_it_is(started: Any, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    scored(NamedReward("judge", started("prints_bytes")))
    assert capfdbinary.readouterr() == (bytes(range(256)) * 100, b"\xff\x00")


@pytest.mark.parametrize(
    ("name", "dropped"),
    [("prints_much", 15 * (1 << 20) + 16), ("prints_one_long_line", 50_000_000 - (1 << 20))],
)
def test_what_a_call_prints_is_shown_up_to_a_limit_and_the_rest_counted(
    started: Any, capfd: pytest.CaptureFixture[str], name: str, dropped: int
) -> None:
    reward = NamedReward("judge", started(name))
    for _ in range(2):
        assert scored(reward).values == [[1.0] * 4]
        shown = capfd.readouterr()
        assert shown.out == "x" * (1 << 20)
        told = f"{dropped:,} further bytes that reward '{name}' printed in this call are not shown"
        assert shown.err == f"\n... {told}\n"


def test_a_function_that_prints_for_ever_is_ended_by_its_timeout(
    started: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    function = started("prints_for_ever", timeout=1.0)
    before = psutil.Process().memory_info().rss
    table = scored(NamedReward("judge", function, on_error="abstain"))
    assert "took longer than its timeout" in table.warnings["failure of judge"]
    shown = capfd.readouterr()
    assert shown.out.startswith("it begins\nxxx")
    assert len(shown.out) == 1 << 20
    assert shown.err.count(" are not shown\n") == 1
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_what_a_thread_of_it_prints_after_the_call_blocks_nothing_and_counts_in_the_next(
    started: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    function = started("prints_between_calls")
    sign = tmp_path / "sign"
    scored(NamedReward("judge", function), [str(sign)])
    sign.touch()
    wait_until(lambda: not sign.exists(), "all is printed", 20)
    function.close()
    shown = capfd.readouterr().err
    assert shown.startswith("y" * (1 << 20) + "\n... 3,951,424 further bytes that reward")


def test_a_process_outlives_the_thread_that_started_it() -> None:
    made: list[RewardProcess] = []
    starting = threading.Thread(target=lambda: made.append(process("knows_its_process")))
    starting.start()
    starting.join()
    reward = NamedReward("pid", made[0])
    first = scored(reward).values
    time.sleep(0.2)  # a signal that the thread's end sent would have arrived
    assert scored(reward).values == first
    made[0].close()


TRAINER = """
import pickle, sys
sys.path[:0] = {folders!r}
from test_reward_processes import process, scored
from grpox.rollout.rewards import NamedReward
started = process("leaves_a_child")
scored(NamedReward("judge", started), [{child!r}])
print(started.get().pid, flush=True)
started.blueprint = None
hanging = process("tells_and_hangs_in_c")
print(hanging.get().pid, flush=True)
scored(NamedReward("judge", hanging), [{hangs!r}])
"""


def test_all_processes_end_when_the_trainer_is_killed_even_those_that_hang_in_c(tmp_path: Path) -> None:
    child, hangs = tmp_path / "child", tmp_path / "hangs"
    folders = [str(FILE.parent), str(FILE.parents[2])]
    script = TRAINER.format(folders=folders, child=str(child), hangs=str(hangs))
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pids = [int(trainer.stdout.readline()) for _ in range(2)]
    pids.append(int(child.read_text()))
    wait_until(hangs.exists, "the second function hangs", 60, trainer)
    assert [is_gone(pid) for pid in pids] == [False] * 3
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid), "its processes have ended", 20)


def test_the_kernel_takes_it_before_the_trainer_where_memory_runs_out(started: Any) -> None:
    pid = int(scored(NamedReward("pid", started("knows_its_process"))).values[0][0] or 0)
    assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"


def test_its_columns_are_known_before_the_first_call(started: Any) -> None:
    assert started("asks_for_more").ready.signature.needs == ("gold",)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("CannotBeBuilt", "reward 'CannotBeBuilt' cannot be built: RuntimeError: no such judge"),
        ("LeavesAsItIsBuilt", "ended its process with exit code 3, as the function was built"),
    ],
)
def test_a_function_that_cannot_be_built_is_a_mistake_in_the_config(started: Any, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        _ = started(name).ready
    assert caught.value.problems[0].key == "rewards[0]"


def test_an_abandoned_call_ends_with_its_process(started: Any, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    call = NamedReward("judge", started("tells_and_hangs_in_c", timeout=3600.0)).call(
        {"completions": [str(hangs)]}, 1
    )
    call.start()
    wait_until(hangs.exists, "the function hangs", 60)
    call.abandon()
    wait_until(lambda: not call.running, "the call has ended", 20)
    assert "signal 9" in call.failure
