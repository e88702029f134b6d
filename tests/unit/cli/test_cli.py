"""The command line as a user meets it: commands and options, what is printed, also as tables, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click import Command, Context
from rich.console import Console
from support.golden import Golden, printed
from support.handlers import handlers_kept
from support.patience import patient
from typer.testing import CliRunner

from grpox import __version__
from grpox.cli import app as cli
from grpox.cli import errors as cli_errors
from grpox.cli.plan import plan_report
from grpox.cli.plugin_tables import as_table, details, rows, select
from grpox.cli.train import _places, train
from grpox.cli.validate import validate_report
from grpox.errors import ConfigError, Problem, RunFailed
from grpox.errors.console import folding_table
from grpox.plugins.discovery import PluginSet, discover
from grpox.runfile.load import load_run
from grpox.runtime.run_lock import hold
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


def grpox(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a user's command line in a separate process."""
    command, environment = [sys.executable, "-m", "grpox", *arguments], {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


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


def test_help_version_schema_and_recipes_are_shown() -> None:
    result = CliRunner().invoke(cli.app, [])
    assert (result.exit_code, "Usage:" in result.output) == (0, True)
    assert CliRunner().invoke(cli.app, ["--version"]).output == f"grpox {__version__}\n"
    assert json.loads(CliRunner().invoke(cli.app, ["schema"]).stdout)["title"] == "grpox run file"
    listed = CliRunner().invoke(cli.app, ["recipes", "list"], env={"COLUMNS": "200"}).stdout
    assert re.search(r"^quickstart +\S.*\.$", listed, re.MULTILINE)


def test_validate_says_what_the_run_is_made_of() -> None:
    """The deepspeed launcher may pass a local rank."""
    done = grpox("--local_rank=0", "validate", "quickstart", "loss=cispo", "train.num_generations=8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("OK quickstart\n")
    assert re.search(r"^loss +cispo +grpox \d", done.stdout, re.MULTILINE)
    assert re.search(r"^rewards\[0\] +exact +grpox \d", done.stdout, re.MULTILINE)
    assert "generation batch: 32 prompts x 8 completions = 256" in done.stdout


def test_plan_draws_the_worked_schedule_of_two_ranks() -> None:
    sizes = ("per_device_train_batch_size=3", "gradient_accumulation_steps=2", "steps_per_generation=4")
    overrides = [f"train.{size}" for size in (*sizes, "num_generations=2")]
    done = grpox("plan", "quickstart", *overrides, "--world-size", "2", "--generations", "1")
    rows = [" ".join(line.split()) for line in done.stdout.splitlines() if "[" in line and "│" in line]
    assert rows == [
        "│ 0 │ 0 │ [0 0 1] │ [1 2 2] │ │",
        "│ │ 1 │ [3 3 4] │ [4 5 5] │ 1 │",
        "│ │ 2 │ [6 6 7] │ [7 8 8] │ │",
        "│ │ 3 │ [9 9 10] │ [10 11 11] │ 2 │",
    ]
    numbers = dict(re.findall(r"^([a-z][a-z ]+[a-z])  +([\d/]+)", done.stdout, re.MULTILINE))
    names = ("completions per", "unique prompts per", "optimizer steps per")
    assert [numbers[f"{name} generation batch"] for name in names] == ["24", "12", "2"]
    assert numbers["samples per optimizer step"] == "12"


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


HINT = "    --traceback shows where\n"


def test_a_bad_run_file_is_told_without_a_traceback_and_exits_2(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: nowhere}\ntrain: {max_step: 3}\n")
    done = grpox("train", "run.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: run.yaml: data: ")
    told = done.stderr.split("error: run.yaml:2: train.max_step: ")[1]
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


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError(Problem("wrong", key="a.b")), 2, "error: a.b: wrong\n"),
        (RunFailed("reward 'x' raised"), 1, "error: reward 'x' raised\n"),
        (ZeroDivisionError("by\nzero"), 1, f"error: ZeroDivisionError: by zero\n{HINT}"),
        (AssertionError(), 1, f"error: AssertionError\n{HINT}"),
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


def test_ranks_and_tracebacks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_of(ZeroDivisionError("zero"), "train", "--traceback") == 1
    told = capsys.readouterr().err
    assert told.startswith("Traceback (most recent call last):")
    assert told.endswith("error: ZeroDivisionError: zero\n")
    monkeypatch.setenv("RANK", "3")
    assert code_of(RunFailed("gone")) == 1
    assert capsys.readouterr().err == "error: [rank 3] gone\n"


LEAVES = """
import atexit, threading, time
{world}
from grpox.cli.errors import leave

class Left:
    def __del__(self):
        print("finalized")

def late():
    time.sleep(0.3)
    print("thread")

left = Left()
atexit.register(print, "exit function")
threading.Thread(target=late).start()
leave(3)
"""


@pytest.mark.parametrize(("world", "last"), [("import grpox.runtime.world", []), ("", ["finalized"])])
def test_only_a_process_with_a_process_group_skips_finalization(world: str, last: list[str]) -> None:
    command = [sys.executable, "-c", LEAVES.format(world=world)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    told = (done.returncode, done.stdout.splitlines(), done.stderr)
    assert told == (3, ["thread", "exit function", *last], "")


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
    command = [sys.executable, "-c", FIRST_LINE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout == "quickstart: checked; loading torch, transformers and DeepSpeed []\n", done.stderr


def test_the_last_line_names_the_next_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my run"
    assert _places(folder) == f"look at: grpox runs show '{folder}'"
    folder.mkdir()
    (folder / "report.html").touch()
    assert _places(folder) == f"look at: {folder}/report.html  or  grpox runs show '{folder}'"
    for error in (RunFailed("the disk is full"), KeyboardInterrupt()):
        error.add_note("to go on: grpox train --resume runs/a")
        code_of(error)
        assert capsys.readouterr().err.splitlines()[-1] == "to go on: grpox train --resume runs/a"


GO_ON = ["to go on: grpox train --resume {}"]


@pytest.mark.parametrize(
    ("resume", "event", "error", "notes"),
    [
        (None, "", RunFailed("the disk is full"), []),
        (None, "saves", RunFailed("the disk is full"), GO_ON),
        ("auto", "", RunFailed("the disk is full"), GO_ON),
        ("auto", "is in use", ConfigError("is in use"), []),
        ("auto", "", ConfigError("cannot go on"), []),
        ("auto", "completes", Terminated(), ["look at: grpox runs show {}"]),
    ],
)
def test_a_command_is_named_where_it_would_help_and_is_not_refused(
    resume: str | None,
    event: str,
    error: BaseException,
    notes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The folder holds a finished run, which a new one moves away once it begins."""
    saved = tmp_path / "checkpoints" / "step-00000002"
    saved.mkdir(parents=True)

    def fail(*arguments: object) -> None:
        if event == "saves":
            saved.rename(tmp_path / "earlier")
            saved.mkdir()
        if event == "is in use":  # and its run goes on
            saved.with_name("step-00000004").mkdir()
        if event == "completes":
            (tmp_path / "summary.json").write_text("{}")
        raise error

    monkeypatch.setattr("grpox.training.run.train_run", fail)
    in_use = hold(tmp_path) if event == "is in use" else nullcontext()
    with in_use, pytest.raises(type(error)) as failed:
        train(Context(Command("train")), "quickstart", [f"output_dir={tmp_path}"], resume)
    assert getattr(failed.value, "__notes__", []) == [note.format(tmp_path) for note in notes]


# -- Tables in terminals of every width ------------------------------------------------------------------

LONG = "experiment-" + "x" * 150


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return discover()


def plan(console: Console, world_size: int, generations: int, **train: int) -> str:
    """Return the printed plan of the quickstart with changed sizes."""
    run = load_run("quickstart", [f"train.{key}={value}" for key, value in train.items()], world_size)
    return printed(plan_report(run.config.train, run.plan, run.num_prompts, generations, console), console)


@pytest.mark.parametrize("width", [60, 200])
def test_tables_are_folded_and_never_cut_and_values_are_written_as_in_a_run_file(width: int) -> None:
    run = load_run("quickstart", [f"tracking.mlflow.experiment={LONG}"], world_size=8)
    shown = printed(validate_report(run), Console(width=width))
    joined = "".join(shown.split())  # as if it had never been folded
    for value in (f"experiment={LONG}", "cache_implementation=dynamic", "tracking_uri=null", "strip=true"):
        assert value in joined
    assert not re.search("…|None", shown)
    table = folding_table("name", "cure")
    table.add_row("pip install " + "x" * 150, "y" * 150)
    shown = printed(table, Console(width=width))
    assert (shown.count("x"), shown.count("y"), "…" in shown) == (150, 150, False)


def test_what_is_known_of_a_component_as_it_is_printed(plugins: PluginSet, golden: Golden) -> None:
    [offer] = select(plugins, "dapo")
    shown = printed(details(plugins, offer), Console(width=80))
    golden(shown, replace={f"grpox {metadata.version('grpox')}": "grpox VERSION"})


def test_the_list_of_losses_as_it_is_printed(plugins: PluginSet, golden: Golden) -> None:
    losses = [row | {"version": "1.0"} for row in rows(plugins, "loss") if row["distribution"] == "grpox"]
    golden(printed(as_table(losses), Console(width=80)))


def test_the_plan_as_it_is_printed(golden: Golden) -> None:
    golden(plan(Console(width=80), 2, 2, num_iterations=2, max_steps=2))


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_the_plan_fits_with_all_its_columns(width: int, world_size: int) -> None:
    shown = plan(Console(width=width), world_size, 2, num_iterations=2, max_steps=2)
    table = [line for line in shown.splitlines() if line.startswith(tuple("┏┡│├└"))]
    assert {line[-1] for line in table} <= set("┓┩│┤┘")
    assert len({len(line) for line in table}) == 1
    assert f"GPU {world_size - 1}" in shown
    assert "…" not in shown


def test_the_plan_counts_one_in_the_singular_and_is_drawn_in_part() -> None:
    console = Console(width=200)
    # Of 9500 prompts, batches of 7 leave one over, batches of 3 two, and batches of 10 none.
    for per_device, told in ((14, "drops 1 prompt"), (6, "drops 2 prompts"), (20, "")):
        shown = plan(console, 1, 1, per_device_train_batch_size=per_device, num_generations=2)
        assert told in shown
        assert ("drops" in shown) == bool(told)
    run = load_run("quickstart", ["train.per_device_train_batch_size=16"], world_size=1)
    assert "generation batch: 1 prompt x 16 completions = 16" in printed(validate_report(run), console)
    shown = plan(console, 1, 1, num_iterations=1_000_000, max_steps=2000)
    assert re.search(r"│ +500 │$", shown, re.MULTILINE)
    assert not re.search(r"│ +501 │$", shown, re.MULTILINE)
    assert re.search(r"^│ +\.\.\. ", shown, re.MULTILINE)
    many = plan(Console(width=80), 10, 1)
    assert [f"GPU {rank}" in many for rank in (5, 9)] == [False, True]
    assert "15*16]" in many
