"""A reward function in its own process: who has one, its state, and what goes wrong there."""

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
from pathlib import Path

import faulty_rewards
import psutil
import pytest
import torch
from reward_tables import score
from support.patience import patient
from support.services import is_running, wait_until

from grpox.checkpoint.components import RunComponent, RunComponents
from grpox.contracts import StepContext, TrainerState
from grpox.errors import ConfigError, RunFailed, traceback_of
from grpox.plugins.load_object import load_object
from grpox.plugins.optional_methods import has_method, has_state, statistics_of
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.isolation import isolation_of, reward_functions
from grpox.rollout.rewards.messages import RewardSpec
from grpox.rollout.rewards.process import ProcessFailed, RemoteComponent, RewardProcess
from grpox.rollout.rewards.worker import _use_device
from grpox.runfile.load import load_run
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World

FILE = Path(__file__).with_name("faulty_rewards.py")
COMPLETIONS = ("one", "", "three", "four")


def process(name, config=None, timeout=60.0, memory=16.0):
    plan = RewardSpec(name, "rewards[0]", f"{FILE}:{name}", True, pickle.dumps(config), tuple(sys.path), None)
    return RewardProcess(plan, timeout, memory)


@pytest.fixture
def started():
    made = []

    def start(name, **options):
        made.append(process(name, **options))
        return made[-1]

    yield start
    for one in made:
        one.close()


def scored(function, completions=COMPLETIONS, step=3, **options):
    reward = function if isinstance(function, NamedReward) else NamedReward("judge", function, **options)
    ids = [[7] * len(text) for text in completions]
    state = TrainerState(step, 10, 0.5)
    columns = {"answer": [1.0, 2.0, 3.0, 4.0]}
    return score([reward], ["p"] * len(completions), list(completions), ids, columns, state)


# -- Who gets a process ----------------------------------------------------------------------------------

FUNCTIONS = """
def plain(completions, **_):
    return [0.0] * len(completions)

def on_the_gpu(completions, **_):
    return [0.0] * len(completions)

on_the_gpu.isolation = "thread"
"""


@pytest.fixture
def resolved(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)

    def resolve(reward):
        reward = reward.replace("mine.py", f"{tmp_path}/mine.py")
        return load_run("quickstart", ["evaluation=null", f"rewards=[{reward}]"])

    return resolve


def where(run, given=False):
    return isolation_of(run.components["rewards[0]"], run.config.rewards[0], given)


@pytest.mark.parametrize(
    ("reward", "given", "expected"),
    [
        ("exact", False, "thread"),
        ("{name: exact, isolation: process}", False, "process"),
        ("{path: 'mine.py:plain'}", False, "process"),
        ("{path: 'mine.py:plain', isolation: thread}", False, "thread"),
        ("{path: 'mine.py:on_the_gpu'}", False, "thread"),
        ("{path: 'mine.py:plain'}", True, "thread"),  # an object given in Python, which the trainer alone has
    ],
)
def test_who_gets_a_process(resolved, reward, given, expected):
    assert where(resolved(reward), given) == expected


@pytest.mark.parametrize(
    ("function", "given", "told"),
    [
        ("plain", True, "is an object given in Python"),
        ("on_the_gpu", False, "says of itself that it needs the trainer's process"),
    ],
)
def test_what_only_the_trainer_can_call_is_not_taken_out_of_it(resolved, function, given, told):
    with pytest.raises(ConfigError, match=told) as caught:
        where(resolved(f"{{path: 'mine.py:{function}', isolation: process}}"), given)
    assert caught.value.problems[0].key == "rewards[0].isolation"


def test_a_built_in_reward_works_in_a_process_and_the_processes_end_with_the_block(resolved):
    with reward_functions(resolved("{name: exact, column: answer, isolation: process}")) as (function,):
        assert isinstance(function, RewardProcess)
        assert function.ready.signature.needs == ("answer",)
        process = function.get()._process
    assert process.returncode == -9


def test_a_reward_process_allocates_nothing_on_its_gpu_before_the_function_does(monkeypatch):
    queued, chosen = [], []
    monkeypatch.setattr(torch.cuda, "_queued_calls", queued)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    _use_device(3)
    assert chosen == []
    for call, _ in queued:  # as torch does when CUDA is first used
        call()
    assert chosen == [3]


# -- Calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["lengths", "later", "raises", "returns_nan", "has_no_score", "returns_too_few", "exits"]
)
def test_a_call_gives_the_same_in_a_process_as_in_a_thread(started, name):
    functions = getattr(faulty_rewards, name), started(name)
    here, there = (repr(scored(function, on_error="abstain")) for function in functions)
    assert here == there


def test_a_class_is_built_there_with_its_parameters(started):
    # In a run the parent has loaded the file; the config's class is found under its own module there and here.
    config = load_object(f"{FILE}:Scaled").Config(factor=0.5)
    assert scored(started("Scaled", config=config)).values == [[0.5, 1.0, 1.5, 2.0]]


def test_a_process_serves_every_call_has_a_main_thread_and_is_the_first_to_go_where_memory_runs_out(started):
    reward = NamedReward("pid", started("knows_its_process"))
    first, second = scored(reward).values, scored(reward).values
    assert first == second
    pid = int(first[0][0])
    assert pid != os.getpid()
    assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"
    assert scored(started("sets_an_alarm")).values == [[1.0] * 4]


def test_what_is_drawn_depends_on_the_completions_and_the_step_alone(started):
    one, other = started("draws"), started("draws")
    first = scored(one).values
    assert scored(one).values == first  # a second call: as after a resume, nothing is carried on
    assert scored(other).values == first
    assert scored(one, step=4).values != first
    assert scored(one, ["one", "two", "three", "four"]).values != first


AT = r" \(faulty_rewards\.py:\d+\)$"
FAULTS = {
    "raises": r"raised OSError: the judge is down" + AT,
    "hangs": r"took longer than its timeout of 0\.2 s" + AT,
    "hangs_awaited": r"took longer than its timeout of 0\.2 s" + AT,
    "hangs_in_c": r"took longer than its timeout of 0\.2 s" + AT,
    "returns_too_many": r"returned 10000000 scores for 4 completions$",
    "takes_all_memory": r"held \d+\.\d MiB of memory; its limit \(memory\) is 0\.4 GiB" + AT,
    "takes_all_memory_in_children": r"held \d+\.\d MiB of memory; its limit \(memory\) is 0\.4 GiB" + AT,
    "leaves": r"ended its process with exit code 0" + AT,
    "crashes": r"lost its process to signal 11 \(SIGSEGV\)" + AT,
    "is_killed": r"lost its process to signal 9 \(SIGKILL, as the kernel does where memory runs out\)" + AT,
    "closes_everything": r"closed its connection to the trainer" + AT,
    "logs_what_exits_as_it_is_sent": r"logged by log_extra what cannot be pickled \(SystemExit: 0\)",
    "logs_what_exits_as_it_is_read": r"sent back what the trainer cannot read: SystemExit: 0$",
    "returns_a_number_that_exits": r"raised SystemExit: 0",
    "raises_an_interrupt": r"raised KeyboardInterrupt" + AT,
    "returns_what_cannot_be_sent": r"returned <grpox.*Unsendable object.* for completion 0",
}
SCORES = {"returns_what_cannot_be_sent": [None, 1.0, 1.0, 1.0]}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_told_by_name_and_place_and_ends_the_run_or_is_counted(started, name):
    slow, hungry = name.startswith("hangs"), name.startswith("takes")
    function = started(name, timeout=0.2 if slow else 60.0, memory=0.4 if hungry else 16.0)

    with pytest.raises(RunFailed) as caught:
        scored(function)
    first = str(caught.value).splitlines()[0]
    assert first.startswith("reward 'judge' ")
    assert re.search(FAULTS[name], first), first

    # The same function goes on to be called, in a new process where it lost the first one.
    table = scored(function, on_error="abstain")
    assert table.values == [SCORES.get(name, [None] * 4)]
    assert table.failed == [[value is None for value in table.values[0]]]
    assert re.search(FAULTS[name], table.warnings["failure of judge"].splitlines()[0])


def test_the_line_at_which_it_hangs_or_crashes_is_that_of_the_users_file(started):
    lines = FILE.read_text().splitlines()
    for name, text in (("hangs", "time.sleep(1)"), ("hangs_in_c", "PyDLL"), ("crashes", "string_at")):
        table = scored(started(name, timeout=patient(0.25)), on_error="abstain")
        line = int(re.findall(r"faulty_rewards\.py:(\d+)", table.warnings["failure of judge"])[0])
        assert text in lines[line - 1] or "while True" in lines[line - 1]


def test_of_a_traceback_of_any_length_a_bounded_part_comes_along(started):
    with pytest.raises(RunFailed) as caught:
        scored(started("raises_much"))
    assert len(str(caught.value)) < 2200
    (trace,) = caught.value.__cause__.__notes__
    assert len(trace) < 10_000
    texts = ("ValueError: zzz", "OSError: xxx", "yyy", 'raise error from ValueError("z" * 10_000_000)')
    assert all(text in traceback_of(caught.value) for text in texts)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("CannotBeBuilt", "reward 'CannotBeBuilt' cannot be built: RuntimeError: no such judge"),
        ("LeavesAsItIsBuilt", "ended its process with exit code 3, as the function was built"),
    ],
)
def test_a_function_that_cannot_be_built_is_a_mistake_in_the_config(started, name, told):
    with pytest.raises(ConfigError, match=told) as caught:
        _ = started(name).ready
    assert caught.value.problems[0].key == "rewards[0]"


# -- What it prints --------------------------------------------------------------------------------------


def test_what_it_prints_is_passed_on_as_it_is_before_the_call_ends(started, capfdbinary):
    function = started("prints_bytes")
    for _ in range(2):
        scored(function)
        assert capfdbinary.readouterr() == (bytes(range(256)) * 100, b"\xff\x00")


@pytest.mark.parametrize(
    ("name", "dropped"),
    [("prints_much", 15 * (1 << 20) + 16), ("prints_one_long_line", 50_000_000 - (1 << 20))],
)
def test_what_a_call_prints_is_shown_up_to_a_limit_and_the_rest_counted(started, capfd, name, dropped):
    function = started(name)
    for _ in range(2):
        assert scored(function).values == [[1.0] * 4]
        shown = capfd.readouterr()
        assert shown.out == "x" * (1 << 20)
        told = f"{dropped:,} further bytes that reward '{name}' printed in this call are not shown"
        assert shown.err == f"\n... {told}\n"


def test_a_function_that_prints_for_ever_is_ended_by_its_timeout(started, capfd):
    function = started("prints_for_ever", timeout=1.0)
    before = psutil.Process().memory_info().rss
    table = scored(function, on_error="abstain")
    assert "took longer than its timeout" in table.warnings["failure of judge"]
    shown = capfd.readouterr()
    assert shown.out.startswith("it begins\nxxx")
    assert len(shown.out) == 1 << 20
    assert shown.err.count(" are not shown\n") == 1
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_what_a_thread_of_it_prints_after_the_call_blocks_nothing_and_counts_in_the_next(
    started, capfd, tmp_path
):
    function, sign = started("prints_between_calls"), tmp_path / "sign"
    scored(function, [str(sign)])
    sign.touch()
    wait_until(lambda: not sign.exists(), "all is printed", 20)
    function.close()
    shown = capfd.readouterr().err
    assert shown.startswith("y" * (1 << 20) + "\n... 3,951,424 further bytes that reward")


# -- Ends ------------------------------------------------------------------------------------------------


def test_a_process_that_is_killed_twice_closes_nothing_of_anothers(started):
    function = started("lengths")
    assert function.ready.problems == ()
    running = function.get()
    running.kill()
    with contextlib.ExitStack() as stack:  # the numbers that were its own are taken again
        files = [stack.enter_context(open(os.devnull)) for _ in range(20)]
        running.kill()
        assert [os.fstat(file.fileno()).st_rdev for file in files] == [os.stat(os.devnull).st_rdev] * 20


@pytest.mark.parametrize("learns_first", [False, True])
def test_a_child_that_it_leaves_behind_ends_with_its_process(started, tmp_path, learns_first):
    """Also where the process learns that the trainer is gone before its lifeline does."""
    function, file = started("leaves_a_child"), tmp_path / "pid"
    assert scored(function, [str(file)]).values == [[1.0]]
    child = int(file.read_text())
    assert is_running(child)
    if learns_first:
        with socket.socket(fileno=os.dup(function.get().connection.fileno())) as connection:
            connection.shutdown(socket.SHUT_WR)
    else:
        function.close()
    wait_until(lambda: not is_running(child), "the child has ended", 20)


def test_a_fork_that_returns_from_the_function_as_well_answers_once(started):
    function = started("forks_and_forgets")
    assert [scored(function).values for _ in range(3)] == [[[1.0] * 4]] * 3


def test_a_process_outlives_the_thread_that_started_it():
    made = []
    starting = threading.Thread(target=lambda: made.append(process("knows_its_process")))
    starting.start()
    starting.join()
    first = scored(made[0]).values
    time.sleep(0.2)  # a signal that the thread's end sent would have arrived
    assert scored(made[0]).values == first
    made[0].close()


def test_an_abandoned_call_ends_with_its_process(started, tmp_path):
    hangs = tmp_path / "hangs"
    reward = NamedReward("judge", started("tells_and_hangs_in_c", timeout=3600.0))
    call = reward.call({"completions": [str(hangs)]}, 1)
    call.start()
    wait_until(hangs.exists, "the function hangs", 60)
    call.abandon()
    wait_until(lambda: not call.running, "the call has ended", 20)
    assert "signal 9" in call.failure


TRAINER = """
import sys
sys.path[:0] = {folders!r}
from test_reward_processes import process, scored
started = process("leaves_a_child")
scored(started, [{child!r}])
print(started.get().pid, flush=True)
started.blueprint = None
hanging = process("tells_and_hangs_in_c")
print(hanging.get().pid, flush=True)
scored(hanging, [{hangs!r}])
"""


def test_all_processes_end_when_the_trainer_is_killed_even_those_that_hang_in_c(tmp_path):
    child, hangs = tmp_path / "child", tmp_path / "hangs"
    folders = [str(FILE.parent), str(FILE.parents[2])]
    script = TRAINER.format(folders=folders, child=str(child), hangs=str(hangs))
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pids = [int(trainer.stdout.readline()) for _ in range(2)]
    pids.append(int(child.read_text()))
    wait_until(hangs.exists, "the second function hangs", 60, trainer)
    assert all(map(is_running, pids))
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    for pid in pids:
        wait_until(lambda pid=pid: not is_running(pid), "its processes have ended", 20)


# -- State and steps -------------------------------------------------------------------------------------


def test_methods_are_called_in_the_process_and_errors_name_the_reward(started):
    counts = started("Counts")
    reward = RemoteComponent(counts)
    assert has_state(reward)
    assert statistics_of(reward) == {"reward": "mean", "ratio": "gather"}
    reward.begin_step(StepContext(2, 9, 0.5))
    reward.end_step({"reward": 0.5, "ratio": torch.tensor([1.0, 2.0])})
    assert scored(counts, ["a"]).values == [[211.0]]
    assert reward.state_dict() == {"calls": 1, "seen": [3.0]}
    with pytest.raises(RunFailed, match="reward 'Counts' raised ValueError: a negative reward in end_step"):
        reward.end_step({"reward": -1.0, "ratio": torch.zeros(1)})
    reward.end_step({"reward": 0.0, "ratio": torch.full((2,), 40.0)})
    with pytest.raises(RunFailed, match=r"reward 'Counts' the state's value \['seen'\] is a numpy.ndarray"):
        reward.state_dict()


def test_a_process_that_is_started_again_has_the_state_and_the_step_of_before(started, logged):
    counts = started("Counts")
    reward = RemoteComponent(counts)
    reward.load_state_dict({"calls": 5, "seen": []})
    reward.begin_step(StepContext(1, 9, 0.0))
    assert scored(counts, ["a"]).values == [[106.0]]
    reward.end_step({"reward": 0.5, "ratio": torch.tensor([1.0])})
    assert reward.state_dict() == {"calls": 6, "seen": [1.0]}
    reward.begin_step(StepContext(2, 9, 0.0))
    assert scored(counts, ["a"]).values == [[217.0]]  # a call that is lost
    with pytest.raises(ProcessFailed):
        counts.ask({"completions": ["die"]}, 1)
    assert logged() == ""
    assert scored(counts, ["a"]).values == [[217.0]]
    assert "reward 'Counts' was started again, with the state after the last step" in logged()


def test_a_reward_that_forgets_is_seen_in_its_process(started, logged):
    forgets = started("Forgets")
    reward = RemoteComponent(forgets)
    assert not any(has_method(reward, name) for name in ("state_dict", "begin_step", "end_step"))
    states = RunComponents(None, World(0, 1, torch.device("cpu")), PhaseTimes())
    states.by_key["rewards[0]"] = RunComponent("rewards[0]", "reward", "Forgets", reward)
    states.start()
    scored(forgets, ["a"])
    assert states.saved() == {}
    assert "reward 'Forgets' (rewards[0]) changes its attribute calls" in logged()
