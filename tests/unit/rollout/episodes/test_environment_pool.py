"""Environments in processes of their own: their answers, and faults, which are reported and counted."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
import signal
import socket
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import faulty_environments
import psutil
import pytest
from support.problems import problem_of
from support.processes import start as start_process
from support.services import is_running, wait_until

from grpox.config import EpisodesConfig
from grpox.contracts import ToolCall
from grpox.environments import Appended
from grpox.errors import ConfigError, RunFailed
from grpox.plugins.load_object import load_object
from grpox.rollout.episodes import pool
from grpox.rollout.episodes.local import LocalEnvironments
from grpox.rollout.episodes.messages import (
    Action,
    Counters,
    EnvironmentSpec,
    EpisodeOutcome,
    Lost,
    Observation,
    Start,
)
from grpox.rollout.episodes.pool import ProcessEnvironments, open_environments

FILE = Path(__file__).with_name("faulty_environments.py")
NAMES = ("Lake", "Guess", "Broken", "CannotBeBuilt", "Noted", "Stubborn", "Unreadable")
"""Environments of the pools that the tests of this file share."""
LIMIT, GRACE = 1.0, 1.0
"""Time limit of a call, where one is to be exceeded, and what is granted beyond it."""


def blueprint(name: str, config: Any = None, key: str = "environment") -> EnvironmentSpec:
    return EnvironmentSpec(name, key, f"{FILE}:{name}", pickle.dumps(config))


def tools(*names: str) -> list[EnvironmentSpec]:
    return [blueprint(name, key=f"tools[{place}]") for place, name in enumerate(names)]


def plans(notes: Path) -> list[EnvironmentSpec]:
    config = load_object(f"{FILE}:Noted").Config(file=str(notes))
    return [blueprint(name, config if name == "Noted" else None) for name in NAMES]


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notes") / "notes"


@pytest.fixture(scope="module", params=["process", "none"])
def both(request: pytest.FixtureRequest, notes: Path, apart: ProcessEnvironments) -> Iterator[Any]:
    """Environments in processes, and those in this one."""
    if request.param == "process":
        yield apart
        return
    local = LocalEnvironments(plans(notes), tools("add", "meet"), EpisodesConfig())
    yield local
    local.close()


@pytest.fixture(scope="module")
def apart(notes: Path, meeting: Path) -> Iterator[ProcessEnvironments]:
    apart = ProcessEnvironments(plans(notes), tools("add", "meet"), EpisodesConfig(tool_timeout=60), GRACE)
    yield apart
    apart.close()


@pytest.fixture(scope="module")
def meeting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPOX_TEST_MEETING", str(tmp_path_factory.mktemp("meeting")))
        yield Path(os.environ["GRPOX_TEST_MEETING"])


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[ProcessEnvironments]:
    """Environments whose calls have little time and memory."""
    config = EpisodesConfig(tool_timeout=LIMIT, memory=1.0)
    hasty = ProcessEnvironments(plans(tmp_path / "notes"), [], config, GRACE)
    yield hasty
    hasty.close()


_keys = itertools.count()


class Episode:
    """One episode of shared environments."""

    def __init__(self, environments: Any, name: str, row: dict[str, Any] | None = None, seed: int = 1) -> None:
        self.environments, self.key = environments, next(_keys)
        self.first = environments.start({self.key: Start(NAMES.index(name), row or {}, seed)})[self.key]

    def step(self, action: Action) -> Any:
        return self.environments.step({self.key: action})[self.key]

    def finish(self) -> Any:
        return self.environments.finish([self.key])[self.key]


def calls(*named: tuple[str, str]) -> Action:
    return Action("", [ToolCall(name, arguments) for name, arguments in named])


def fault(kind: str) -> Action:
    return calls(("fault", f'{{"kind": "{kind}"}}'))


# -- What they answer ------------------------------------------------------------------------------------


def test_an_episode_with_tools_from_its_beginning_to_its_end(both: Any) -> None:
    before = replace(both.counters)
    lake = Episode(both, "Lake")
    assert lake.first == Observation([{"role": "user", "content": "start"}], state_key="(0, {'x', 'y'})")
    moved = lake.step(calls(("move", '{"direction": "right"}'), ("look", "")))
    assert [result.content for result in moved.results] == ['{"place":1}', "null"]
    assert (moved.content, moved.done, moved.state_key) == (None, False, "(1, {'x', 'y'})")
    ended = lake.step(calls(("move", '{"direction": "right"}')))
    assert (ended.done, ended.state_key, ended.failure) == (True, None, "")
    outcome = lake.finish()
    assert (outcome.rewards, outcome.turn_rewards) == ({"goal": 2.0, "steps": 0.5}, (None, 1.0))
    assert outcome.failure == ""
    assert both.counters == Counters(before.opened + 1, before.closed + 1, before.lost)


def test_an_environment_without_calls_of_tools_replies_until_it_is_over(both: Any) -> None:
    guess = Episode(both, "Guess")
    assert isinstance(guess.first.content, Appended)
    assert guess.first.content == " go on"
    assert guess.step(Action("3", [])) == Observation("higher")
    assert [each.content for each in guess.step(Action("[37+68]")).results] == ["2"]  # by its own `parse`
    assert guess.step(calls(("add", '{"a": 1, "b": 2}'))).results[0].content == "3"
    assert "parse returned 5, not a list of ToolCall" in guess.step(Action("five")).failure
    assert guess.step(Action("7")) == Observation(None, done=True)
    guess.finish()


def test_a_run_with_tools_alone_needs_no_environment() -> None:
    plan = [EnvironmentSpec("add", "tools[0]", faulty_environments.add)]
    alone = open_environments([], plan, EpisodesConfig())
    assert alone.start({0: Start(0, {}, 1)}) == {0: Observation()}
    assert alone.step({0: calls(("add", '{"a": 1}'))})[0].results[0].content == "2"
    assert alone.step({0: Action("text", [])}) == {0: Observation()}  # over
    assert alone.finish([0]) == {0: EpisodeOutcome()}
    alone.close()


def test_equal_seeds_give_equal_beginnings_and_no_process_has_imported_torch(notes: Path, apart: Any) -> None:
    other = ProcessEnvironments(plans(notes), [], EpisodesConfig(), GRACE)
    seeds = [(pool, seed) for pool in (apart, other) for seed in (5, 5, 6)]
    infos = [Episode(pool, "Lake", seed=seed).finish().info for pool, seed in seeds]
    other.close()
    assert infos[0]["numbers"] == infos[1]["numbers"] == infos[3]["numbers"]
    assert infos[0]["numbers"] != infos[2]["numbers"]
    assert infos[0]["heavy"] == []
    assert len({info["pid"] for info in infos}) == 6
    assert len({info["parent"] for info in infos}) == 2


def test_async_calls_of_all_environments_overlap(both: Any, meeting: Path) -> None:
    episodes = [Episode(both, "Broken") for _ in range(4)]
    # Each call waits until all eight calls of the four environments have begun.
    action = calls(*[("meet", f'{{"count": {len(os.listdir(meeting)) + 8}}}')] * 2)
    answers = both.step({episode.key: action for episode in episodes})
    assert [each.content for answer in answers.values() for each in answer.results] == ["met"] * 8
    both.abandon(list(answers))


def test_threads_may_use_different_episodes_at_the_same_time(apart: Any, meeting: Path) -> None:
    episodes = [Episode(apart, "Broken") for _ in range(3)]
    action = calls(("meet", f'{{"count": {len(os.listdir(meeting)) + 3}}}'))
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda episode: episode.step(action), episodes))
    assert [answer.results[0].content for answer in answers] == ["met"] * 3
    apart.abandon([episode.key for episode in episodes])


def test_no_more_environments_work_at_a_time_than_the_limit_and_nothing_is_left(
    meeting: Path, tmp_path: Path
) -> None:
    def open_here() -> tuple[set[str], int]:
        return set(os.listdir("/proc/self/fd")), threading.active_count()

    before = open_here()
    few = ProcessEnvironments(plans(tmp_path / "notes"), [], EpisodesConfig(concurrency=2), GRACE)
    begin(few, *range(6))
    answers = few.step({key: fault("counts_workers") for key in range(6)})
    few.close()
    assert {answer.results[0].content for answer in answers.values()} <= {"1", "2"}
    wait_until(lambda: open_here() == before, "nothing is left", 20)


# -- What goes wrong in an episode -----------------------------------------------------------------------

GOES_ON = {
    "raises": ("exception", "Error: fault raised OSError: the disk is full"),
    "hangs": ("timeout", "Error: fault took longer than 1 s and was stopped"),
    "eats": ("memory", "Error: fault needed more memory than it may use"),
    "prints": ("", "printed"),
    "forks": ("", "0"),
    "has_a_child_that_exits": ("", "3"),
}
LOST = {
    "hangs_in_spite": "took longer than 1 s and could not be interrupted in tool 'fault'",
    "hangs_in_c": "took longer than 1 s and could not be interrupted in tool 'fault'",
    "exits": "ended its process with exit code 3 in tool 'fault'",
    "leaves": "ended its process with exit code 4 in tool 'fault'",
    "is_killed": "lost its process to signal 9 (SIGKILL, as the kernel does where memory runs out) "
    "in tool 'fault'",
    "crashes": "lost its process to signal 11 (SIGSEGV) in tool 'fault'",
    "closes_everything": "ended its process with exit code 1 in tool 'fault'",
}


def test_a_fault_of_a_tool_is_an_error_text_or_loses_the_episode_and_no_other(
    hasty: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kinds = [*GOES_ON, *LOST, "nothing"]
    hasty.start({key: Start(NAMES.index("Noted"), {"number": key}, 1) for key in range(len(kinds))})
    answers = hasty.step({key: fault(kind) for key, kind in enumerate(kinds)})
    found = {
        kind: answer.reason
        if isinstance(answer := answers[key], Lost)
        else (answer.results[0].failure, answer.results[0].content)
        for key, kind in enumerate(kinds)
    }
    assert found == {**GOES_ON, **LOST, "nothing": ("", "fine")}

    again = hasty.step(dict.fromkeys(answers, fault("nothing")))
    outcomes = hasty.finish(list(answers))
    for key, kind in enumerate(kinds):
        if kind in LOST:
            assert again[key] == outcomes[key] == Lost("is not open")
        else:
            assert again[key].results[0].content == "fine"
            assert outcomes[key].rewards == {"": float(key)}
    lost, count = len(LOST), len(kinds)
    assert hasty.counters == Counters(count, count - lost, lost)
    assert (tmp_path / "notes").read_text().count("c") == count - lost
    shown = capfd.readouterr()
    assert len(shown.out) + len(shown.err) < (1 << 20) + 1000
    assert re.search(r"[\d,]+ further bytes that the environments printed in this call are", shown.err)


def test_a_process_that_ends_between_two_requests_is_lost_with_the_reason(hasty: Any) -> None:
    hasty.start({key: Start(0, {}, 1) for key in (0, 1)})
    for process in psutil.Process(hasty._forker.current.pid).children():
        process.kill()
    assert hasty.step({0: Action("")})[0].reason.startswith("lost its process to signal 9 (SIGKILL")
    assert hasty.finish([1])[1].reason.startswith("lost its process to signal 9 (SIGKILL")
    assert hasty.counters == Counters(2, 0, 2)


def test_every_method_has_the_time_limit(hasty: Any) -> None:
    methods = dict(enumerate(["reset", "reply", "reward", "info", "close"]))
    first = hasty.start({key: Start(NAMES.index("Broken"), {m: "hang"}, 1) for key, m in methods.items()})
    second = hasty.step(dict.fromkeys(methods, Action("a turn")))
    last = hasty.finish(list(methods))
    for key, method in methods.items():
        failures = [answers[key].failure for answers in (first, second, last)]
        assert f"took longer than 1 s in {method}" in failures
    assert hasty.counters == Counters(5, 5, 0)


def test_async_tools_have_the_time_limit_also_where_they_defy_it_or_block(hasty: Any) -> None:
    stubborn = Start(NAMES.index("Stubborn"), {}, 1)
    hasty.start(dict.fromkeys(range(3), stubborn))
    turns = {0: ("fine", "defies", "fine"), 1: ("blocks", "fine"), 2: ("fine", "exits")}
    answers = hasty.step({key: calls(*((name, "") for name in names)) for key, names in turns.items()})
    assert [each.failure for each in answers[0].results] == ["", "timeout", ""]
    assert answers[1].results[0].failure == "timeout"
    assert answers[2].reason.startswith("ended its process with exit code 5")
    assert hasty.step({0: calls(("fine", ""))})[0].results[0].content == "fine"


def test_async_tools_have_the_time_limit_also_in_the_trainer(notes: Path) -> None:
    local = LocalEnvironments(plans(notes), tools("wait"), EpisodesConfig(tool_timeout=0.1))
    local.start(dict.fromkeys((0, 1), Start(NAMES.index("Stubborn"), {}, 1)))
    results = local.step({0: calls(("wait", '{"seconds": 100}'), ("wait", '{"seconds": 0}'))})[0].results
    assert [each.failure for each in results] == ["timeout", ""]
    assert local.step({1: calls(("exits", ""))})[1] == Lost("called sys.exit(5)")
    local.close()
    assert local.counters == Counters(2, 1, 1)


def test_nothing_that_an_environment_sends_runs_in_the_trainer(hasty: Any, tmp_path: Path) -> None:
    file = tmp_path / "ran"
    answer = hasty.start({0: Start(NAMES.index("Unreadable"), {"file": str(file)}, 1)})[0]
    assert answer == Lost("answered what cannot be read: UnpicklingError: os.system is no part of an answer")
    assert not file.exists()
    assert hasty.counters == Counters(1, 0, 1)


def test_a_row_that_cannot_be_sent_is_refused_before_anything_is_opened(hasty: Any) -> None:
    with pytest.raises(RunFailed, match=r"a row of the data cannot be sent .*isolation: none"):
        hasty.start({0: Start(0, {"function": lambda: None}, 1)})
    assert hasty.counters == Counters()


PLACE = r"\(faulty_environments\.py:\d+\)"
FAILS = [
    ("reset", "raise", rf"raised RuntimeError: reset in reset {PLACE}"),
    ("reply", "raise", rf"raised RuntimeError: reply in reply {PLACE}"),
    ("state_key", [object], r"state_key returned a \w+, whose equality has no text"),
    ("reward", "raise", rf"raised RuntimeError: reward in reward {PLACE}"),
    ("reward", float("nan"), r"what reward returned is nan, not a finite number"),
    ("reward", "1", r"what reward returned is '1', not a finite number"),
    ("reward", {"a": [1]}, r"the part 'a' of reward is a list, not a finite number"),
    ("reward", {1: 1.0}, r"reward returned a part named 1; names are text"),
    ("turn_rewards", [1, 2], r"what turn_rewards returned has 2 numbers for 1 turns of the model"),
    ("info", {"a": {"b": [1, {2}]}}, r"info\['a'\]\['b'\]\[1\] is a set; plain values are"),
    ("close", "raise", rf"raised RuntimeError: close in close {PLACE}"),
]


@pytest.mark.parametrize(("method", "do", "message"), FAILS)
def test_a_method_that_fails_or_returns_something_else_is_reported(
    both: Any, method: str, do: Any, message: str
) -> None:
    before = replace(both.counters)
    broken = Episode(both, "Broken", {method: do})
    observations = [broken.first, broken.step(Action("a turn"))]
    outcome = broken.finish()
    failures = [each.failure for each in (*observations, outcome) if each.failure]
    assert failures
    assert all(re.fullmatch(f"{message}.*", failure) for failure in failures), failures
    assert bool(outcome.failure) != (method in ("reset", "reply", "state_key"))
    assert outcome.rewards == (None if method == "reward" else {"": 1.0})
    assert both.counters == Counters(before.opened + 1, before.closed + 1, before.lost)


def test_an_instance_that_cannot_be_built_fails_and_is_not_closed(both: Any) -> None:
    broken = Episode(both, "CannotBeBuilt")
    place = "raised LookupError: no licence in __init__ (faulty_environments.py:"
    assert broken.first.failure.startswith(place)
    assert "was not built" in broken.step(Action("")).failure
    assert broken.finish() == EpisodeOutcome()


# -- What is refused at the start ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "functions", "message"),
    [
        (("NOT_AN_ENVIRONMENT",), (), "is no grpox.environments.Environment, and not in TRL's form"),
        (("Lak",), (), "has no 'Lak'"),
        (("UntypedTool",), (), "has the tool 'go', which has no type hint for its parameter 'where'"),
        (("AddToo",), ("add",), "environment 'AddToo' has a tool 'add', and so has the key tools; rename one"),
        ((), ("add", "add"), "two tools have the name 'add'"),
        ((), ("GRACE",), "has no 'GRACE'"),
    ],
)
def test_what_is_no_environment_or_tool_is_refused_by_name(
    names: tuple[str, ...], functions: tuple[str, ...], message: str
) -> None:
    problem = problem_of(
        LocalEnvironments, [blueprint(name) for name in names], tools(*functions), EpisodesConfig()
    )
    assert message in problem.what
    assert problem.key in ("environment", "tools[0]", "tools[1]")


def test_objects_given_in_python_run_apart_if_another_process_can_import_them() -> None:
    def twice(a: int) -> int:
        """Double.

        Args:
            a: number.
        """
        return 2 * a

    plans = [
        EnvironmentSpec("add", "tools[0]", faulty_environments.add),
        EnvironmentSpec("twice", "tools[1]", twice),
    ]
    problem = problem_of(open_environments, [], plans, EpisodesConfig())
    assert (problem.key, "'twice' is an object given in Python" in problem.what) == ("tools[1]", True)
    assert "isolation: none" in problem.allowed
    for settings, functions in (({}, plans[:1]), ({"isolation": "none"}, plans)):
        environments = open_environments([], functions, EpisodesConfig(**settings))
        environments.start({0: Start(0, {}, 1)})
        assert environments.step({0: calls(("add", '{"a": 2}'))})[0].results[0].content == "3"
        environments.close()


def test_a_problem_of_a_module_is_reported_from_the_process_that_imports_it() -> None:
    with pytest.raises(ConfigError) as caught:
        ProcessEnvironments([blueprint("Lak"), blueprint("UntypedTool")], [], EpisodesConfig())
    assert [problem.key for problem in caught.value.problems] == ["environment", "environment"]
    assert caught.value.problems[0].nearest == "Lake"


# -- Ends ------------------------------------------------------------------------------------------------


def wait_for_ends(processes: Iterable[psutil.Process]) -> None:
    wait_until(lambda: not any(is_running(each.pid) for each in processes), "all have ended", 20)


def processes_of(environments: ProcessEnvironments) -> list[psutil.Process]:
    return psutil.Process(environments._forker.current.pid).children(recursive=True)


def is_at_work(environments: ProcessEnvironments, key: int) -> bool:
    if is_idle := environments._open[key].in_use.acquire(blocking=False):
        environments._open[key].in_use.release()
    return not is_idle


def begin(environments: Any, *keys: int) -> None:
    environments.start({key: Start(NAMES.index("Noted"), {"number": key}, 1) for key in keys})


def test_closing_ends_every_process_also_those_that_tools_started(hasty: Any, tmp_path: Path) -> None:
    begin(hasty, 0, 1, 2)
    hasty.step({key: fault("leaves_processes") for key in range(3)})
    processes = processes_of(hasty)
    assert sum(process.name() == "sleep" for process in processes) == 6
    hasty.finish([0])
    hasty.close()
    assert not any(is_running(process.pid) for process in processes)
    assert sorted((tmp_path / "notes").read_text().split()) == ["c0", "c1", "c2", "o0", "o1", "o2"]
    assert hasty.counters == Counters(3, 3, 0)


def test_closing_waits_for_calls_and_answers_those_who_wait(hasty: Any, tmp_path: Path) -> None:
    begin(hasty, 0, 1)
    with ThreadPoolExecutor(1) as threads:
        answers = threads.submit(hasty.step, {0: fault("hangs")})
        wait_until(lambda: is_at_work(hasty, 0), "the call is sent", 20)
        hasty.close()
        assert answers.result()[0].results[0].failure == "timeout"
    assert sorted((tmp_path / "notes").read_text().split()) == ["c0", "c1", "o0", "o1"]
    assert hasty.counters == Counters(2, 2, 0)
    hasty.close()  # a second time it does nothing


def test_a_forker_that_is_killed_takes_its_processes_along_and_is_started_again(hasty: Any) -> None:
    begin(hasty, 0, 1, 2)
    processes = processes_of(hasty)
    with ThreadPoolExecutor(1) as threads:
        answers = threads.submit(hasty.step, {0: fault("hangs_in_c")})
        os.kill(hasty._forker.current.pid, signal.SIGKILL)
        assert answers.result() == {0: Lost("the process of all environments has ended")}
    wait_for_ends(processes)
    begin(hasty, 7)
    assert hasty.finish([1, 2, 7])[7].rewards == {"": 7.0}
    assert hasty.counters == Counters(4, 1, 3)
    psutil.Process(hasty._forker.current.pid).kill()  # while nothing is open
    wait_until(hasty._forker.current.has_ended, "it has ended", 20)
    begin(hasty, 8)
    assert hasty.finish([8])[8].rewards == {"": 8.0}


def test_a_process_takes_along_what_its_tools_started_though_the_forker_cannot(hasty: Any) -> None:
    """A forker that is killed before it knows of the end leaves nothing of this group."""
    begin(hasty, 0)
    hasty.step({0: fault("leaves_processes")})
    forker, *others = [psutil.Process(hasty._forker.current.pid), *processes_of(hasty)]
    near, apart = sorted(
        (each for each in others if each.name() == "sleep"), key=lambda each: os.getsid(each.pid) == each.pid
    )
    with ThreadPoolExecutor(1) as threads:
        answers = threads.submit(hasty.step, {0: fault("exits_while_its_parent_hangs")})
        try:
            wait_until(lambda: not is_running(near.pid), "it has ended", 5)
            assert forker.status() == psutil.STATUS_STOPPED
        finally:
            forker.kill()
            apart.kill()  # left its group on purpose
        assert answers.result() == {0: Lost("the process of all environments has ended")}


def test_an_environment_that_stops_the_forker_is_ended_with_all_others(
    hasty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "STOP_SECONDS", 1.0)
    begin(hasty, 0, 1)
    forker = hasty._forker.current.pid
    (lost,) = hasty.step({0: fault("exits_while_its_parent_hangs")}).values()
    assert lost.reason.startswith("the process of all environments was stopped for more than 1 s")
    wait_until(lambda: not any_of_session(forker), "nothing is left", 20)
    begin(hasty, 2)  # which starts another


def test_what_a_tool_started_ends_though_its_process_and_the_forker_were_killed_together(hasty: Any) -> None:
    begin(hasty, 0)
    forker = hasty._forker.current.pid
    assert hasty.step({0: fault("kills_its_parent_and_itself")}) == {
        0: Lost("the process of all environments has ended")
    }
    wait_until(lambda: not any_of_session(forker), "nothing is left", 20)


def any_of_session(leader: int) -> bool:
    for each in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):  # another that has ended meanwhile
            if os.getsid(each.pid) == leader and is_running(each.pid):
                return True
    return False


def test_temporary_files_end_with_the_episode_also_if_it_is_killed(hasty: Any) -> None:
    begin(hasty, 0, 1, 2)
    folder = Path(hasty._forker.current._folder.name)
    answers = hasty.step({0: fault("makes_a_folder"), 1: fault("makes_a_folder_and_is_killed")})
    kept = Path(answers[0].results[0].content)
    assert kept.is_relative_to(folder)
    assert kept.is_dir()
    assert isinstance(answers[1], Lost)
    assert len(list(folder.iterdir())) == 2  # of 0 and 2
    hasty.finish([0])
    wait_until(lambda: len(list(folder.iterdir())) == 1, "its folder is gone", 20)
    assert not kept.exists()
    os.kill(hasty._forker.current.pid, signal.SIGKILL)
    hasty.close()
    assert not folder.exists()


def test_children_of_a_process_that_left_its_group_end_with_the_episode(hasty: Any) -> None:
    begin(hasty, 0, 1)
    hasty.step({0: fault("leaves_a_family")})
    family: list[psutil.Process] = []

    def has_begun() -> bool:
        family[:] = [each for each in processes_of(hasty) if each.name() in ("sh", "sleep")]
        return len(family) == 2

    wait_until(has_begun, "both have begun", 20)
    hasty.finish([0])
    wait_for_ends(family)
    assert hasty.finish([1])[1].rewards == {"": 1.0}


def test_processes_of_a_module_end_with_a_forker_that_the_trainer_has_left(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(
        "import subprocess\nfrom grpox.environments import Environment as Nothing\n"
        "other = subprocess.Popen(['sleep', '1237'])\n"
    )
    plan = EnvironmentSpec("nothing", "environment", f"{tmp_path / 'starts.py'}:Nothing")
    environments = ProcessEnvironments([plan], [], EpisodesConfig(), GRACE)
    (other,) = processes_of(environments)
    child = environments._forker.current
    with socket.socket(fileno=os.dup(child.connection.fileno())) as connection:
        connection.shutdown(socket.SHUT_WR)  # the kernel closes this one before the forker's lifeline
    try:
        wait_until(lambda: not is_running(other.pid), "it has ended", 10)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            other.kill()
        environments.close()


TRAINER = """
import sys, time
from grpox.config import EpisodesConfig
from grpox.rollout.episodes.messages import Action, EnvironmentSpec, Start
from grpox.rollout.episodes.pool import ProcessEnvironments
from grpox.contracts import ToolCall

plan = EnvironmentSpec("fault", "tools[0]", sys.argv[1] + ":fault_tool")
environments = ProcessEnvironments([], [plan], EpisodesConfig())
environments.start({key: Start(0, {}, 1) for key in range(4)})
environments.step({0: Action("", [ToolCall("fault", '{"kind": "leaves_processes"}')])})
print("ready", flush=True)
environments.step({1: Action("", [ToolCall("fault", '{"kind": "hangs_in_c"}')])})
"""


def test_when_the_trainer_is_killed_every_process_of_its_groups_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # nobody is there any more to remove it
    trainer = start_process("-c", TRAINER, str(FILE), cwd=FILE.parent, cold=True)
    wait_until(lambda: "ready" in trainer.output()[0], "it is at work", 60)
    (forker,) = psutil.Process(trainer.pid).children()
    processes = [forker, *forker.children(recursive=True)]
    apart = [each for each in processes if each.name() == "sleep" and os.getsid(each.pid) == each.pid]
    assert len(processes) == 1 + 4 + 2
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    rest = [process for process in processes if process not in apart]
    wait_for_ends(rest)
    for process in apart:  # left its group on purpose: nobody is there any more to end it
        process.kill()
