"""A forked process is what a cold one is: its results, its output, its end, and its own chance."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import processes
from support.killing import assert_same, recorded, start
from support.mlflow_store import migrated_store

OF_A_MOMENT = re.compile(
    r"[\d,]+ tokens/s|[\d.]+ s/step|\d+ s left|MLflow run \w{32}"
    r"|│ time +│[^│]*│|│ +│ [^│]*(?:before the first step|in steps|evaluating and saving) *│"
    r"|[┌┬┐└┴┘─]+| +(?=│|\n)"
)
"""Printed text that differs from run to run: times, identifiers, and the width of a table with times."""
SETTINGS = ("train.max_steps=8", "train.per_device_train_batch_size=64", "checkpoint.every=2")
ON_TWO = ("train.max_steps=2", "train.per_device_train_batch_size=32", "evaluation=null", "tracking={}")


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPOX_TESTS_COLD", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


Trained = tuple[Path, str, str]
"""The working directory of a run, and what it printed."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Trained]]]:
    """``pair(*settings, ranks=1)``: one run twice, forked and cold, each in a folder of its own."""
    made: dict[tuple[str, ...], list[Trained]] = {}

    def train(*settings: str, ranks: int = 1) -> list[Trained]:
        if settings not in made:
            made[settings] = []
            for cold in (False, True):
                folder = tmp_path_factory.mktemp("cold" if cold else "forked")
                migrated_store(folder)
                process = start(folder, "quickstart", *settings, ranks=ranks, cold=cold)
                stdout, stderr = process.communicate()
                assert process.returncode == 0, stderr
                made[settings].append((folder, stdout, stderr))
        return made[settings]

    return train


def output(folder: Path) -> Path:
    return folder / "runs" / "quickstart"


@pytest.mark.parametrize(("ranks", "settings"), [(1, SETTINGS), (2, ON_TWO)], ids=["one rank", "two ranks"])
def test_a_run_is_bit_by_bit_the_cold_one(
    pair: Callable[..., list[Trained]], ranks: int, settings: tuple[str, ...]
) -> None:
    """With two ranks the cold one is torchrun's."""
    (forked, printed, errors), (cold, printed_cold, _) = pair(*settings, ranks=ranks)
    assert_same(output(forked), output(cold))
    assert len(recorded(output(forked))) >= 2
    assert OF_A_MOMENT.sub("", printed) == OF_A_MOMENT.sub("", printed_cold)
    assert "step 2/" in printed
    assert all(" INFO rank 0 " in line for line in errors.splitlines())


SIGNALLED = """
import os, sys
from grpox.cli.errors import run_command
from grpox.runtime.signals import raise_if_signalled

def command(arguments):
    os.kill(os.getpid(), {number})
    raise_if_signalled()

sys.exit(run_command(command, []))
"""
LATE = """
import atexit, sys, threading, time

def late():
    event.wait()
    print("thread")

event = threading.Event()
atexit.register(print, "exit function")
threading.Thread(target=late).start()
threading.Thread(target=event.wait, daemon=True).start()
threading.Timer(0.2, event.set).start()
print("main")
sys.exit(3)
"""
ENDINGS = {
    "in order": ("print('done')", 0),
    "1": ("import sys; sys.exit(1)", 1),
    "2": ("import sys; sys.exit(2)", 2),
    "-1": ("import sys; sys.exit(-1)", 255),
    "a text": ("import sys; sys.exit('a text')", 1),
    "uncaught": ("def f():\n    raise ValueError('no')\ntry:\n    1 / 0\nexcept ArithmeticError:\n    f()", 1),
    "syntax": ("1 +", 1),
    "no annotations": ("def f(x: undefined): ...", 1),
    "uncaught interrupt": ("raise KeyboardInterrupt", -2),
    "interrupted command": (SIGNALLED.format(number=2), 130),
    "terminated command": (SIGNALLED.format(number=15), 143),
    "terminated": ("import os; os.kill(os.getpid(), 15)", -15),
    "killed": ("import os; print('lost'); os.kill(os.getpid(), 9)", -9),
    "threads and exit functions": (LATE, 3),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_process_ends_as_a_cold_one(name: str) -> None:
    program, code = ENDINGS[name]
    forked, cold = (processes.run("-c", program, cold=cold) for cold in (False, True))
    assert (forked.returncode, forked.stdout, forked.stderr) == (cold.returncode, cold.stdout, cold.stderr)
    assert forked.returncode == code
    if name == "threads and exit functions":
        assert forked.stdout == "main\nthread\nexit function\n"


SELF = """
import inspect, os, sys

def shown():
    main = sys.modules["__main__"]
    print(__name__, main.__dict__ is globals(), getattr(main, "__file__", None), bool(main.__spec__))
    print(sys.argv, sys.orig_argv[1:], sys.path[0], os.getcwd(), sys.stdin.read() == "")
    print(os.getpgid(0) == os.getpid(), sys.stdout.encoding, sys.stdout.line_buffering)
    raise RuntimeError("shown")

shown()
"""


@pytest.mark.parametrize("words", [("-c", SELF), ("-m", "shows"), ("shows.py",), ("sub/shows.py",)])
def test_a_program_finds_itself_as_in_an_interpreter_of_its_own(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("shows.py", "sub/shows.py"):
        (tmp_path / name).write_text(SELF)
    forked, cold = (processes.run(*words, "one", "-x", cwd=tmp_path, cold=cold) for cold in (False, True))
    assert (forked.returncode, forked.stdout, forked.stderr) == (cold.returncode, cold.stdout, cold.stderr)
    assert forked.stderr.endswith("RuntimeError: shown\n")


CHANCE = """
import json, random, tempfile, uuid
import numpy, torch

name = tempfile.mktemp()
drawn = [random.random(), float(numpy.random.rand()), torch.initial_seed(), torch.rand(3).tolist()]
print(json.dumps([name, str(uuid.uuid4()), *drawn]))
"""


def test_two_forks_share_no_chance(tmp_path: Path) -> None:
    """A fresh interpreter seeds each of these anew, torch's generator too."""
    env = {"TMPDIR": str(tmp_path)}
    one, other = (json.loads(processes.run("-c", CHANCE, env=env).stdout) for _ in range(2))
    assert len(one) == 6
    assert [mine for mine, others in zip(one, other, strict=True) if mine == others] == []
    assert Path(one[0]).parent == tmp_path


ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"
LIKE_A_RUN = f"import grpox.training.run, grpox_mlflow; {ENVIRONMENT}"
SET_LATE = {"KMP_DUPLICATE_LIB_OK", "_MLFLOW_TELEMETRY_SESSION_ID"}
"""Set by libraries that a run imports after its start."""


def test_the_variables_are_the_callers_and_what_a_runs_imports_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPOX_TESTS_MINE", "1")
    monkeypatch.setenv("GRPOX_TESTS_NOT_MINE", "1")
    env = {"GRPOX_TESTS_NOT_MINE": None, "GRPOX_TESTS_ALSO": "ä = 2"}
    forked = json.loads(processes.run("-c", ENVIRONMENT, env=env).stdout)
    given = {name: value for name, value in os.environ.items() if name not in processes.SET_BY_LIBRARIES}
    given |= {"OMP_NUM_THREADS": "1", "GRPOX_TESTS_ALSO": "ä = 2"}
    del given["GRPOX_TESTS_NOT_MINE"]
    assert {name: value for name, value in forked.items() if name in given} == given
    cold = json.loads(processes.run("-c", LIKE_A_RUN, env=env, cold=True).stdout)
    assert forked.keys() - SET_LATE == cold.keys() - SET_LATE
    assert all(forked[name] == cold[name] for name in cold.keys() - SET_LATE)


HAS_TORCH = "import sys; print('torch' in sys.modules)"


def was_forked(**env: str | None) -> bool:
    return processes.run("-c", HAS_TORCH, env=env).stdout == "True\n"


def test_variables_that_are_read_once_make_a_start_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert was_forked()
    assert was_forked(COLUMNS="50", MLFLOW_TRACKING_URI="sqlite:///x.db", RANK="0")
    assert not was_forked(HF_ENDPOINT="http://127.0.0.1:1")
    assert not was_forked(PYTHONPATH=f"/nowhere{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert not was_forked(OMP_NUM_THREADS="2")
    assert not was_forked(MALLOC_MMAP_THRESHOLD_="65536")
    assert processes.run("-X", "utf8", "-c", HAS_TORCH).stdout == "False\n"
    monkeypatch.setenv("GRPOX_TESTS_COLD", "1")
    assert not was_forked()
