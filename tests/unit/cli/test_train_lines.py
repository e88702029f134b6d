"""The first and the last lines of `grpox train`: what happens now, where to look, how to go on."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from click import Command, Context
from support.handlers import handlers_kept

from grpox.cli import errors as cli_errors
from grpox.cli.train import _places, train
from grpox.errors import ConfigError, RunFailed
from grpox.runtime.run_lock import hold
from grpox.runtime.signals import Terminated

FIRST_LINE = """
import logging, sys
from grpox.cli import main

class First(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), sorted({'torch', 'transformers', 'deepspeed'} & set(sys.modules)))
        sys.exit(0)

logging.getLogger('grpox.cli.train').addHandler(First())
sys.argv = ['grpox', 'train', 'quickstart']
main()
"""


def test_the_first_line_comes_before_the_slow_imports(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LINE], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stdout == "quickstart: checked; loading torch, transformers and DeepSpeed []\n", done.stderr


def test_the_last_line_names_the_report_and_the_command_that_shows_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    assert _places(folder) == f"look at: grpox runs show '{folder}'"
    folder.mkdir()
    (folder / "report.html").touch()
    assert _places(folder) == f"look at: {folder}/report.html  or  grpox runs show '{folder}'"


@pytest.mark.parametrize("error", [RunFailed("the disk is full"), KeyboardInterrupt()])
def test_how_to_go_on_is_the_last_line_of_an_error(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    error.add_note("to go on: grpox train --resume runs/a")

    def command(arguments: list[str]) -> None:
        raise error

    with handlers_kept():
        cli_errors.run_command(command, [])
    assert capsys.readouterr().err.splitlines()[-1] == "to go on: grpox train --resume runs/a"


@pytest.mark.parametrize(
    ("resume", "saves", "is_told"), [(None, False, False), (None, True, True), ("auto", False, True)]
)
def test_only_a_run_with_checkpoints_of_its_own_can_go_on(
    resume: str | None, saves: bool, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder holds a finished run, which the new one moves away once it begins."""
    saved = tmp_path / "checkpoints" / "step-00000002"
    saved.mkdir(parents=True)

    def fail(*arguments: object) -> None:
        if saves:
            saved.rename(tmp_path / "earlier")
            saved.mkdir()
        raise RunFailed("the disk is full")

    monkeypatch.setattr("grpox.training.run.train_run", fail)
    with pytest.raises(RunFailed) as failed, handlers_kept():
        train(Context(Command("train")), "quickstart", [f"output_dir={tmp_path}"], resume)
    assert getattr(failed.value, "__notes__", []) == [f"to go on: grpox train --resume {tmp_path}"] * is_told


@pytest.mark.parametrize(
    ("is_in_use", "is_complete", "error", "notes"),
    [
        (True, False, ConfigError("is in use"), []),
        (False, False, ConfigError("cannot go on"), []),
        (False, True, Terminated(), ["look at: grpox runs show {}"]),
    ],
    ids=["a folder in use", "a refused resume", "a signal at the end"],
)
def test_no_command_is_named_that_would_be_refused_or_do_nothing(
    is_in_use: bool,
    is_complete: bool,
    error: BaseException,
    notes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)

    def fail(*arguments: object) -> None:
        if is_in_use:  # and its run goes on
            (tmp_path / "checkpoints" / "step-00000004").mkdir()
        if is_complete:
            (tmp_path / "summary.json").write_text("{}")
        raise error

    monkeypatch.setattr("grpox.training.run.train_run", fail)
    in_use = hold(tmp_path) if is_in_use else nullcontext()
    with in_use, pytest.raises(type(error)) as failed, handlers_kept():
        train(Context(Command("train")), "quickstart", [f"output_dir={tmp_path}"], "auto")
    assert getattr(failed.value, "__notes__", []) == [note.format(tmp_path) for note in notes]
