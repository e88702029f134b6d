"""Contract of every environment: episodes played as a run plays them, each in a process of its own."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar
from unittest import SkipTest

from grpox.config import EpisodesConfig
from grpox.contracts import ToolResult
from grpox.environments import Environment
from grpox.environments.contract import overrides, tools_of
from grpox.environments.from_factory import as_environment
from grpox.environments.schemas import method_schema
from grpox.errors import ConfigError
from grpox.errors.formatting import format_bytes
from grpox.rollout.episodes.messages import Action, EnvironmentSpec, Lost, Start
from grpox.rollout.episodes.pool import ProcessEnvironments
from grpox.runtime.workers import Child, ChildFailed, ChildLate
from grpox.testing.conformance import Conformance, Violation, require
from grpox.testing.environment_player import SEED, Played, Report, example_calls, play

ROWS: Sequence[Mapping[str, Any]] = ({"prompt": "What is 6 x 7?", "answer": "42"},)
"""Played where nothing else is named."""
ODD = (
    *("", " ", "42", "x" * 5000, "\u4e2d\u6587 \U0001f600 \u0000"),
    *("<tool_call>{", '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>'),
)
"""Turns that a policy writes sooner or later."""
MOST_PRINTED = 100_000
"""Bytes that a call may print."""
LONGEST_ANSWER = 100_000
"""Characters of an answer that no context holds."""
GRACE = 1.0
"""Seconds after the time limit in which a call can be interrupted; then its process is killed."""
LOAD_SECONDS = 30.0
"""Seconds in which the module of an environment is imported."""
KEYS = itertools.count()
"""Keys of episodes, each used once."""


class EnvironmentConformance(Conformance):
    """The checks of an environment."""

    kind = "environment"
    rows: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Rows of the data; default: the class's `example_rows`."""
    turns: ClassVar[Sequence[str]] = ()
    """Turns of the model; default: the class's `example_turns`."""
    seconds: ClassVar[float] = 5.0
    """Time limit of a call, as `episodes.tool_timeout`."""
    _opened: ClassVar[ProcessEnvironments | None] = None
    _reports: ClassVar[dict[str, Report | Violation]] = {}
    """Seed of hashes -> what became of episodes in one process."""

    def __init_subclass__(cls) -> None:
        cls._opened, cls._reports = None, {}

    def test_runs(self) -> None:
        """Plays an episode with each example to its end, and scores it."""
        for row in self._rows:
            for turns in ((), self._turns):
                episode = self._play(row, turns)
        if self._rows is ROWS:
            self.notes.append("it has no example_rows: the checks play a row of prompt and answer")
        assert episode.outcome is not None
        rewards = episode.outcome.rewards
        parts = [f"{name or 'reward'} {value:g}" for name, value in (rewards or {}).items()]
        info = json.dumps(dict(episode.outcome.info), ensure_ascii=False)
        facts = f"{len(episode.observations) - 1} turns; {', '.join(parts) or 'no reward'}; info {info:.200}"
        self.notes.append(facts)

    def test_imports(self) -> None:
        """Imports no torch, which each episode's process would hold."""
        advice = "import torch within the method that needs it, or serve the model by another process"
        require(not self._report("1").imports_torch, "it imports torch", advice=advice)

    def test_tools(self) -> None:
        """Describes each tool to the model: its purpose, and each parameter with its type."""
        for name in self._tools:
            try:
                method_schema(self._class, name)
            except ConfigError as error:
                problem = error.problems[0]
                raise Violation(problem.what, problem.where, problem.allowed) from error
        names = ", ".join(self._tools)
        self.notes.append(f"tools: {names}" if names else "it has no tools")
        if not names and not overrides(self._class, "reply"):
            what = "it has neither tools nor a method reply: an episode would be one turn"
            raise Violation(what, advice="mark methods with @tool, or define reply")

    def test_calls(self) -> None:
        """Each tool answers in time, whatever fits its parameters, and neither prints nor returns megabytes."""
        for name in self._tools:
            for call in example_calls(method_schema(self._class, name)):
                example, what = f"{name}({call.arguments})", f"tool '{name}'"
                key, environments = next(KEYS), self._environments
                start = environments.start({key: Start(0, self._rows[0], SEED)})[key]
                failure = start.reason if isinstance(start, Lost) else start.failure
                require(not failure, f"it {failure}", _shown(self._rows[0], ()))
                with _printed() as printed:
                    answer = environments.step({key: Action("", (call,))})[key]
                    environments.abandon([key])
                if isinstance(answer, Lost):
                    raise Violation(f"{what}: its process {answer.reason}", example)
                require(not answer.failure, f"after {what} it {answer.failure}", example)
                if not answer.results:  # its own parse has the last word, and finds no call in an empty turn
                    raise SkipTest(f"{example} was not tried: parse finds no call in a turn without text")
                self._check_result(answer.results[0], example)
                _check_printed(printed, what, example)

    def _check_result(self, result: ToolResult, example: str) -> None:
        name, text = result.call.name, result.content
        if result.failure == "timeout":
            advice = "set `seconds` of the suite, and episodes.tool_timeout of runs, if it has to take longer"
            raise Violation(f"tool '{name}' takes longer than {self.seconds:g} s", example, advice)
        require(result.failure != "memory", f"tool '{name}' takes more memory than it may", example)
        advice = "return the part that matters: each character costs the model tokens"
        what = f"tool '{name}' returns {len(text):,} characters"
        require(len(text) <= LONGEST_ANSWER, what, example, advice)
        if result.failure == "exception":
            self.notes.append(f"{example}: the model reads '{text:.100}'")

    def test_odd_turns(self) -> None:
        """Takes whatever a policy writes: nothing, one token for ever, broken calls."""
        for text in ODD:
            self._play(self._rows[0], (text,))

    def test_seeds(self) -> None:
        """The same seed gives the same beginning, and the same turns the same answers."""
        for row in self._rows:
            keys = [next(KEYS) for _ in range(3)]
            starts = {key: Start(0, row, SEED + place // 2) for place, key in enumerate(keys)}
            with _printed():
                first, second, other = play(self._environments, starts, self._turns).values()
            _require_same(first, second)
            if first.answers[:1] != other.answers[:1]:
                self.notes[:] = ["its beginning depends on the seed, which the completions of a group share"]

    def test_state(self) -> None:
        """Two episodes in one process, as with isolation none, know nothing of each other."""
        report = self._report("1")
        place, alone, together = _first_difference(report.alone, report.together)
        advice = "keep state on the instance: not on the class, and not in the module"
        what = "beside another episode it answers otherwise than alone"
        require(place is None, what, f"alone:  {alone}\nbeside: {together}", advice)

    def test_row(self) -> None:
        """Leaves the row of the data as it is, which the completions of a group share."""
        report = self._report("1")
        advice = "copy it before you change it"
        require(not report.changed_row, "it changes the row", report.changed_row, advice)

    def test_close(self) -> None:
        """Closes an episode wherever it ends, and leaves no thread, process or file."""
        report = self._report("1")
        for stage, failure in report.closing.items():
            advice = "an episode is closed however far it came"
            raise Violation(f"close fails {stage}: {failure}", advice=advice)
        for stage, left in report.left.items():
            raise Violation(f"closed {stage}, it leaves {left[0]}", "\n".join(left), "end it in close()")

    def test_state_keys(self) -> None:
        """Gives equal states equal keys, in every process."""
        first, second = (self._report(seed).alone for seed in ("1", "2"))
        keys = [[each[3] for each in answers if len(each) == 4] for answers in (first, second)]
        what, example = "the same state has another key in another process", f"{keys[0]}\n{keys[1]}"
        advice = "return the state itself, as text, numbers or tuples: hash(text) differs between processes"
        require(keys[0] == keys[1], what, example, advice)
        if not any(keys[0]):
            self.notes.append("it has no state keys, which the advantage gigpo needs")

    def test_time(self) -> None:
        """Reports how long a turn takes."""
        starts = {next(KEYS): Start(0, self._rows[0], SEED) for _ in range(8)}
        with _printed():
            began = time.perf_counter()
            episodes = play(self._environments, starts, self._turns)
            seconds = time.perf_counter() - began
        turns = sum(len(each.observations) for each in episodes.values())
        self.notes.append(f"{1000 * seconds / max(turns, 1):.2g} ms a turn, 8 episodes side by side")

    # -- Parts of the checks ---------------------------------------------------------------------------------

    @cached_property
    def _class(self) -> type[Environment]:
        return as_environment(self.bound.load())

    @property
    def _rows(self) -> Sequence[Mapping[str, Any]]:
        return self.rows or self._class.example_rows or ROWS

    @property
    def _turns(self) -> Sequence[str]:
        return self.turns or self._class.example_turns or ODD[:3]

    @property
    def _tools(self) -> list[str]:
        return list(tools_of(self._class))

    @property
    def _mention(self) -> dict[str, Any]:
        """The component as another process finds it."""
        mention = dict(self.component) if isinstance(self.component, Mapping) else {"name": self.component}
        if "path" in mention:
            file, _, name = mention["path"].rpartition(":")
            mention["path"] = f"{Path(file).resolve()}:{name}"
        return mention

    @property
    def _environments(self) -> ProcessEnvironments:
        """The environments, opened by the first check that needs them."""
        suite = type(self)
        if suite._opened is None:
            bound = self.bound
            target = bound.offer.spec.target if bound.offer is not None else self._mention["path"]
            blueprint = EnvironmentSpec(bound.label, bound.key, target, pickle.dumps(bound.config))
            config = EpisodesConfig(tool_timeout=self.seconds)
            suite._opened = ProcessEnvironments([blueprint], [], config, grace=GRACE)
        return suite._opened

    @classmethod
    def teardown_class(cls) -> None:
        """End the processes of the environments."""
        if cls._opened is not None:
            cls._opened.close()
            cls._opened = None

    def _play(self, row: Mapping[str, Any], turns: Sequence[str]) -> Played:
        """Play an episode, which must not fail."""
        key, example = next(KEYS), _shown(row, turns)
        with _printed() as printed:
            episode = play(self._environments, {key: Start(0, row, SEED)}, turns)[key]
        advice = "" if self._rows is not ROWS else "name rows and turns in example_rows and example_turns"
        what = f"its process {episode.lost}" if episode.lost else f"it {episode.failure}"
        require(not episode.failure, what, example, advice)
        _check_printed(printed, "an episode", example)
        return episode

    def _report(self, hash_seed: str) -> Report:
        """Play in one process; `hash_seed` decides its hashes of texts."""
        reports = type(self)._reports
        if hash_seed not in reports:
            try:
                reports[hash_seed] = self._report_of_process(hash_seed)
            except Violation as violation:
                reports[hash_seed] = violation
        if isinstance(report := reports[hash_seed], Violation):
            raise report
        return report

    def _report_of_process(self, hash_seed: str) -> Report:
        limit = LOAD_SECONDS + 4 * self.seconds
        given = {"component": self._mention, "row": dict(self._rows[0]), "turns": list(self._turns)}
        path = os.pathsep.join(filter(None, sys.path))
        variables = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        arguments = ["-m", "grpox.testing.environment_player", json.dumps(given, default=str)]
        child = Child(arguments, limit, environment=variables)
        try:
            return Report(**json.loads(child.receive(time.monotonic() + limit)))
        except ChildLate as error:
            what = f"in a process that it shares with others, it takes longer than {limit:g} s"
            raise Violation(what, advice="no method may block for ever") from error
        except ChildFailed as error:
            what = f"a process that it shares with others ended with code {child.end()}"
            child.kill()
            last = (child.printed.splitlines() or ["it printed nothing"])[-1]
            raise Violation(what, last) from error
        finally:
            child.kill()


@contextmanager
def _printed() -> Iterator[list[int]]:
    """Keep what is printed in the block from the terminal; the list has the number of bytes after it."""
    sys.stdout.flush()
    sys.stderr.flush()
    size: list[int] = []
    copies = [os.dup(descriptor) for descriptor in (1, 2)]
    with tempfile.TemporaryFile() as file:
        try:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
            yield size
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, before in zip((1, 2), copies, strict=True):
                os.dup2(before, descriptor)
                os.close(before)
            size.append(os.fstat(file.fileno()).st_size)


def _check_printed(printed: Sequence[int], what: str, example: str) -> None:
    advice = f"print at most {format_bytes(MOST_PRINTED)}: a run plays thousands of episodes"
    require(printed[0] <= MOST_PRINTED, f"{what} prints {format_bytes(printed[0])}", example, advice)


def _require_same(first: Played, second: Played) -> None:
    """Raise a violation if two episodes of one seed differ, in what the model or the record sees."""
    place, one, other = _first_difference(first.answers, second.answers)
    if place is None:
        return
    what = f"the same seed and the same turns give another answer to turn {place}"
    if place == 0:
        what = "the same seed gives another beginning"
    elif place >= len(first.observations):
        what = "the same seed and the same turns give another outcome"
    advice = "draw from random.Random(seed), and from nothing that differs between processes, such as the time"
    raise Violation(what, f"{one}\n{other}", advice)


def _first_difference(first: Sequence[Any], second: Sequence[Any]) -> tuple[int | None, str, str]:
    """Return the first place at which two lists differ, and what stands there."""
    for place, (one, other) in enumerate(zip_longest(first, second, fillvalue="nothing")):
        if one != other:
            return place, str(one)[:300], str(other)[:300]
    return None, "", ""


def _shown(row: Mapping[str, Any], turns: Sequence[str]) -> str:
    lines = (f"turn {place}: {text[:60]!r}" for place, text in enumerate(turns, 1))
    return "\n".join([f"row: {dict(row)!r:.200}", *lines])
