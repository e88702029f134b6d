"""The command line as a user meets it: commands and options, what is printed, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.handlers import handlers_kept
from support.patience import patient
from typer.testing import CliRunner

from grpox.cli import app as cli
from grpox.cli import errors as cli_errors
from grpox.errors import ConfigError, Problem, RunFailed
from grpox.runtime.signals import Terminated

SURFACE = {
    "": "--help --install-completion --show-completion --traceback --version",
    "doctor": "--help --json",
    "eval": "--completions --date --help --log-file --log-level --out config model overrides",
    "export": "--help --trust-remote-code checkpoint out_dir",
    "import-trl": "--force --help --json --out setup",
    "init": "--answer-column --data --help --model --prompt-column --reward --yes folder",
    "plan": "--generations --gpu-gib --help --memory --prompt-tokens --world-size overrides run",
    "plugins check": "--help --kind name params",
    "plugins diff": "--help run_a run_b",
    "plugins list": "--help --json --kind --why",
    "plugins lock": "--help --output --world-size overrides run",
    "plugins new": "--folder --force --help --kind name",
    "plugins show": "--help name",
    "recipes copy": "--force --help folder name",
    "recipes list": "--help",
    "replay": "--help --log-file --log-level dump overrides",
    "report": "--help --output run_dir",
    "serve": "--dtype --gpu-memory-utilization --help --host --kv-cache-gib --max-model-len --port "
    "--tensor-parallel-size --token-file --verbose --weights --weights-dir model vllm_args",
    "runs compare": "--help --html --json --metric runs",
    "runs list": "--help --json --last --status folder",
    "runs open": "--help --no-browser run",
    "runs show": "--all --help --json run",
    "schema": "--help",
    "sweep": "--dir --dry-run --help --log-level --lowest --metric --nproc-per-node --parallel --seeds "
    "overrides run",
    "sync": "--help --tracking-uri run_dir",
    "train": "--allow-changes --help --log-file --log-level --resume --traceback --watch overrides run",
    "validate": "--help --rows --world-size overrides run",
    "watch": "--help --no-browser --port runs",
    "try": "--help --json --log-file --log-level --prompts overrides run",
}
"""Every command with its arguments and options; scripts depend on these."""


def grpox(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a user's command line in a separate process."""
    return subprocess.run(
        [sys.executable, "-m", "grpox", *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def code_of(error: BaseException | None, *arguments: str) -> int:
    """The exit code of a command that raises `error`."""

    def command(_: list[str]) -> None:
        if error is not None:
            raise error

    return cli_errors.run_command(command, list(arguments))


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    with handlers_kept():
        yield


# -- Surface ---------------------------------------------------------------------------------------------


def test_commands_and_their_options_do_not_change_unnoticed() -> None:
    def walk(command: Any, name: str) -> dict[str, str]:
        found = {}
        own = [p.opts[0] for p in command.params if not getattr(p, "hidden", False)]
        if not hasattr(command, "commands") or not name:
            found[name] = " ".join(sorted([*own, "--help"]))
        for child, subcommand in getattr(command, "commands", {}).items():
            found |= walk(subcommand, f"{name} {child}".strip())
        return found

    assert walk(cli.all_commands(), "") == SURFACE


def test_without_a_command_the_help_is_shown() -> None:
    result = CliRunner().invoke(cli.app, [])
    assert (result.exit_code, "Usage:" in result.output) == (0, True)


def test_version() -> None:
    from grpox import __version__

    assert CliRunner().invoke(cli.app, ["--version"]).output == f"grpox {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['grpox', '--help']\n"
        "from grpox.cli.app import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "print({'torch', 'pydantic', 'transformers', 'yaml'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "set()\n"


# -- Commands --------------------------------------------------------------------------------------------


def test_validate_says_what_the_run_is_made_of() -> None:
    done = grpox("validate", "quickstart", "loss=cispo", "train.num_generations=8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("OK quickstart\n")
    assert re.search(r"^loss +cispo +grpox \d", done.stdout, re.MULTILINE)
    assert re.search(r"^rewards\[0\] +exact +grpox \d", done.stdout, re.MULTILINE)
    assert "generation batch: 32 prompts x 8 completions = 256" in done.stdout


def test_plan_draws_the_worked_schedule_of_two_ranks() -> None:
    sizes = ("per_device_train_batch_size=3", "gradient_accumulation_steps=2", "steps_per_generation=4")
    overrides = [f"train.{size}" for size in (*sizes, "num_generations=2")]
    done = grpox("plan", "quickstart", *overrides, "--world-size", "2", "--generations", "1")
    rows = [re.sub(r"\s+", " ", line) for line in done.stdout.splitlines() if "[" in line and "│" in line]
    assert rows == [
        "│ 0 │ 0 │ [0 0 1] │ [1 2 2] │ │",
        "│ │ 1 │ [3 3 4] │ [4 5 5] │ 1 │",
        "│ │ 2 │ [6 6 7] │ [7 8 8] │ │",
        "│ │ 3 │ [9 9 10] │ [10 11 11] │ 2 │",
    ]
    numbers = dict(re.findall(r"^([a-z][a-z ]+[a-z])  +([\d/]+)", done.stdout, re.MULTILINE))
    assert numbers["completions per generation batch"] == "24"
    assert numbers["unique prompts per generation batch"] == "12"
    assert numbers["samples per optimizer step"] == "12"
    assert numbers["optimizer steps per generation batch"] == "2"


def test_plan_abbreviates_large_batches_and_many_ranks() -> None:
    done = grpox("plan", "quickstart", "--world-size", "10", "--generations", "1", COLUMNS="80")
    assert "GPU 9" in done.stdout
    assert "GPU 5" not in done.stdout
    assert "15*16]" in done.stdout


def test_schema_is_json() -> None:
    done = grpox("schema")
    assert json.loads(done.stdout)["title"] == "grpox run file"


def test_recipes_are_listed_with_what_they_do() -> None:
    assert re.search(r"^quickstart +\S.*\.$", grpox("recipes", "list").stdout, re.MULTILINE)


def test_a_copied_recipe_runs_from_its_copy_and_is_not_overwritten(tmp_path: Path) -> None:
    copied = grpox("recipes", "copy", "quickstart", "mine", cwd=tmp_path)
    assert copied.stdout == "mine/quickstart.yaml\nmine/quickstart\n"
    run = tmp_path / "mine" / "quickstart.yaml"
    assert grpox("validate", str(run)).returncode == 0
    run.write_text("changed")
    again = grpox("recipes", "copy", "quickstart", "mine", cwd=tmp_path)
    assert (again.returncode, run.read_text()) == (2, "changed")
    assert "--force" in again.stderr
    assert grpox("recipes", "copy", "quickstart", "mine", "--force", cwd=tmp_path).returncode == 0
    assert run.read_text() != "changed"


# -- Errors ----------------------------------------------------------------------------------------------


def test_a_bad_run_file_is_told_without_a_traceback_and_exits_2(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: nowhere}\ntrain: {max_step: 3}\n")
    done = grpox("train", "run.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: run.yaml: data: ")
    _, found, told = done.stderr.partition("error: run.yaml:2: train.max_step: ")
    assert found
    assert "\n    given         3\n" in told
    assert "\n    did you mean  max_steps\n" in told
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_another_rank_tells_config_errors_when_the_first_had_time_to_and_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher ends all ranks when one has ended: who still lives has found what rank 0 did not."""
    assert cli_errors.SECONDS_FOR_RANK_0 >= 5
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    waited: list[float] = []
    monkeypatch.setattr(cli_errors.time, "sleep", waited.append)
    code = cli_errors.run_command(lambda given: cli.app(given, prog_name="grpox"), ["train", "nothing.yaml"])
    assert code == 2
    assert capsys.readouterr().err.startswith("error: [rank 1] no such run file")
    assert waited == [cli_errors.SECONDS_FOR_RANK_0]


def test_the_deepspeed_launcher_may_pass_the_local_rank() -> None:
    assert grpox("--local_rank=0", "validate", "quickstart").returncode == 0


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError(Problem("wrong", key="a.b")), 2, "error: a.b: wrong\n"),
        (RunFailed("reward 'x' raised"), 1, "error: reward 'x' raised\n"),
        (
            ZeroDivisionError("by\nzero"),
            1,
            "error: ZeroDivisionError: by zero\n    --traceback shows where\n",
        ),
        (AssertionError(), 1, "error: AssertionError\n    --traceback shows where\n"),
        (KeyboardInterrupt(), 130, ""),
        (Terminated(), 143, ""),
        (SystemExit(3), 3, ""),
        (SystemExit(), 0, ""),
        (None, 0, ""),
    ],
)
def test_exit_codes_and_messages(
    error: BaseException | None, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(error, "train") == code
    assert capsys.readouterr().err == told


def test_a_failing_rank_says_which_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    assert code_of(RunFailed("gone")) == 1
    assert capsys.readouterr().err == "error: [rank 3] gone\n"


def test_the_traceback_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(ZeroDivisionError("zero"), "train", "--traceback") == 1
    told = capsys.readouterr().err
    assert told.startswith("Traceback (most recent call last):")
    assert told.endswith("error: ZeroDivisionError: zero\n")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_run_through_its_handlers(sent: signal.Signals, code: int, tmp_path: Path) -> None:
    program = (
        "import time, sys\n"
        "from grpox.cli.errors import run_command\n"
        "def command(arguments):\n"
        "    try:\n"
        "        print('ready', flush=True); time.sleep(600)\n"
        "    except BaseException as error:\n"
        "        print(type(error).__name__, flush=True); raise\n"
        "sys.exit(run_command(command, []))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(sent)
        assert process.stdout.readline() in ("Terminated\n", "KeyboardInterrupt\n")
        assert process.wait(patient(30)) == code
