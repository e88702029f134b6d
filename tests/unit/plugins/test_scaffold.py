"""New plugins out of templates: names, what is refused, and that they install, pass their tests and train."""

from __future__ import annotations

import csv
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from packaging.requirements import Requirement
from support import problems
from support.patience import patient
from typer.testing import CliRunner

from grpox.cli.plugins import new_plugin
from grpox.errors import Problem
from grpox.plugins.discovery import PluginSet, discover
from grpox.plugins.hookspecs import API_VERSION, KINDS
from grpox.plugins.scaffold.make import make, values_of

ROOT = Path(__file__).parents[3]
LONG = "length-normalised-surrogate"
"""Name that could push lines over their limit."""

OFFERS_MINE = """
import grpox

@grpox.hookimpl
def grpox_losses():
    return [grpox.ComponentSpec("mine", "grpox_mine:Mine")]
"""


@functools.cache
def installed_plugins() -> PluginSet:
    """Everything that is installed, without what a single test installs."""
    return discover()


def made(folder: Path, name: str = "mine", kind: str = "loss", force: bool = False) -> Path:
    values = values_of(name, kind)
    files = make(values, folder, installed_plugins(), force)
    new = folder / values["distribution"]
    written = [str(path.relative_to(new)) for path in new.rglob("*") if path.is_file()]
    assert force or sorted(written) == files
    return new


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``rendered(kind, name="mine")``: a distribution that nobody changes, made once for all tests."""
    folder = tmp_path_factory.mktemp("rendered")

    @functools.cache
    def render(kind: str, name: str) -> Path:
        (folder / kind).mkdir(exist_ok=True)
        return made(folder / kind, name, kind)

    return lambda kind, name="mine": render(kind, name)


def refused(folder: Path, name: str = "mine", kind: str = "loss", **options: Any) -> list[Problem]:
    """The problems told; nothing has been written."""
    before = sorted(folder.rglob("*"))
    options = {"plugins": installed_plugins(), "force": False, **options}
    found = problems.refused(lambda: make(values_of(name, kind), folder, **options))
    assert sorted(folder.rglob("*")) == before
    return found


@pytest.mark.parametrize(
    ("given", "kind", "component", "expected"),
    [
        ("mine", "loss", "mine", "MineLoss"),
        ("Grpox.Mine", "loss", "mine", "MineLoss"),
        ("two-words", "reward", "two-words", "TwoWordsReward"),
        ("example-loss", "loss", "example-loss", "ExampleLoss"),  # not ExampleLossLoss
        ("3-point", "loss", "3-point", "Loss3Point"),  # a class cannot be called 3PointLoss
    ],
)
def test_one_name_is_enough_with_the_prefix_or_without(
    given: str, kind: str, component: str, expected: str
) -> None:
    values = values_of(given, kind)
    parts = [values[part] for part in ("distribution", "module", "component", "Class")]
    assert parts == [f"grpox-{component}", f"grpox_{component.replace('-', '_')}", component, expected]


@pytest.mark.parametrize(
    ("given", "near"), [("my loss", "my-loss"), ("-mine", "mine"), ("plugins/mine", "mine"), ("", "")]
)
def test_an_invalid_name_for_pip_suggests_the_nearest_valid_one(given: str, near: str, tmp_path: Path) -> None:
    [problem] = refused(tmp_path, given)
    assert (problem.what, problem.given, problem.nearest) == ("is no name of a distribution", given, near)


def test_the_name_of_grpox_itself_is_refused_and_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    [problem] = refused(tmp_path, "Grpox")
    assert problem.what == "is the name of grpox itself"
    kind, name = refused(tmp_path, "a b", "los")
    assert (kind.key, kind.nearest, kind.allowed, name.key) == ("--kind", "loss", ", ".join(KINDS), "NAME")


def test_a_component_or_module_of_another_distribution_is_in_the_way(tmp_path: Path) -> None:
    for force in (False, True):
        [problem] = refused(tmp_path, "dapo", force=force)
        assert re.fullmatch(r"grpox \S+ already offers a loss 'dapo'", problem.what)
        assert "grpox-dapo:dapo" in problem.allowed
    assert made(tmp_path, "dapo", "reward").name == "grpox-dapo"  # of another kind
    [problem] = refused(tmp_path, "losses")
    assert "which the plugin's own would hide" in problem.what
    assert problem.given == "grpox_losses"


def test_an_installed_plugin_of_that_name_is_only_made_anew_with_force(
    make_distribution: Callable[..., Path], tmp_path: Path
) -> None:
    make_distribution("grpox-mine", OFFERS_MINE, version="3.1")
    (tmp_path / "new").mkdir()
    [problem] = refused(tmp_path / "new", plugins=discover())
    assert problem.given == "grpox_mine"
    assert "README.md" in make(values_of("mine", "loss"), tmp_path / "new", discover(), force=True)


def test_a_folder_with_files_is_refused_and_force_writes_over_its_own_alone(tmp_path: Path) -> None:
    folder = tmp_path / "grpox-mine"
    folder.mkdir()
    assert (made(tmp_path) / "pyproject.toml").is_file()  # an empty folder is as good as none
    (folder / "notes.txt").write_text("mine")
    (folder / "README.md").write_text("changed")
    [problem] = refused(tmp_path)
    assert (problem.what, problem.given) == ("is there and not empty", str(folder))
    made(tmp_path, force=True)
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "README.md").read_text().startswith("# grpox-mine\n")


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "grpox-mine").write_text("mine")
    [problem] = refused(tmp_path)
    assert problem.what == "is not a folder"
    [problem] = refused(tmp_path, "a" * 300)
    assert problem.what == "cannot be written: File name too long"


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_of_a_distribution_are_there(kind: str, rendered: Callable[..., Path]) -> None:
    folder = rendered(kind, "my-own")
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    own = ("__init__.py", "config.py", f"{kind}.py", "plugin.py", "py.typed")
    assert set(files) == {
        *(".github/workflows/test.yml", ".gitignore", "LICENSE", "README.md", "pyproject.toml"),
        *(f"src/grpox_my_own/{name}" for name in own),
        *("tests/test_conformance.py", "tests/test_my_own.py"),
    }
    assert re.findall(r"\$\w+|\$\{\w+|\bMODULE\b|\bCOMPONENT\b", "".join(files.values())) == []
    assert "${{ matrix.python }}" in files[".github/workflows/test.yml"]
    assert f"api={API_VERSION}," in files["src/grpox_my_own/plugin.py"]
    suite = f"class TestMyOwn{kind.capitalize()}({kind.capitalize()}Conformance):\n"
    assert f'{suite}    component = "my-own"\n' in files["tests/test_conformance.py"]


def test_the_project_file_is_what_an_index_asks_for_in_grpoxs_style(rendered: Callable[..., Path]) -> None:
    folder = rendered("loss")
    project, own = (tomllib.loads((at / "pyproject.toml").read_text()) for at in (folder, ROOT))
    fields = project["project"]
    assert fields["entry-points"] == {"grpox": {"mine": "grpox_mine.plugin"}}
    assert (fields["name"], fields["license"]) == ("grpox-mine", "Apache-2.0")
    assert fields["requires-python"] == own["project"]["requires-python"]
    [requirement] = map(Requirement, fields["dependencies"])
    assert requirement.name == "grpox"
    assert requirement.specifier.contains(own["project"]["version"])
    assert project["build-system"] == own["build-system"]
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    ours, theirs = own["tool"]["ruff"], project["tool"]["ruff"]
    assert (theirs["line-length"], theirs["lint"]["select"]) == (ours["line-length"], ours["lint"]["select"])


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_every_kind_with_a_short_name_and_a_long_one_is_clean_and_formatted(
    command: list[str], rendered: Callable[..., Path]
) -> None:
    """Ruff takes the settings of each distribution from its own project file."""
    folders = [rendered(kind, name) for kind in KINDS for name in ("mine", "zz", LONG)]
    succeed([sys.executable, "-m", "ruff", *command, "--no-cache", *map(str, folders)], folders[0])


def test_what_was_made_and_what_comes_next_are_told(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(new_plugin)
    app.command("other")(lambda: None)
    given = ["new-plugin", "mine", "--kind", "loss", "--folder", str(tmp_path / "a b")]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    first, *_, install, check, test, train = result.output.splitlines()
    folder = str(tmp_path / "a b" / "grpox-mine")
    assert first == f"{folder}: loss 'mine', as its own distribution"
    assert shlex.split(install) == ["pip", "install", "-e", f"{folder}[dev]"]
    assert shlex.split(check) == ["grpox", "plugins", "check", "mine"]
    assert shlex.split(test) == ["pytest", folder]
    assert shlex.split(train) == ["grpox", "train", "quickstart", "loss=mine"]
    assert "src/grpox_mine/loss.py " in result.output


def succeed(command: list[str], cwd: Path) -> str:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patient(600), check=False, cwd=cwd, env=variables
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a distribution of each kind, and an environment ``env`` in which they are installed.

    What grpox needs comes from the environment of the tests.
    """
    folder = tmp_path_factory.mktemp("scaffold")
    succeed([sys.executable, "-m", "venv", "--without-pip", "env"], folder)
    [packages] = (folder / "env").glob("lib/python*/site-packages")
    here = sysconfig.get_path("purelib")
    (packages / "tests.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    new = [made(folder, f"my-{kind}", kind).name for kind in KINDS]
    pip = [str(folder / "env" / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    succeed([*pip, "--no-build-isolation", *(word for name in new for word in ("-e", name))], folder)
    return folder


def python(installed: Path, *arguments: str) -> str:
    return succeed([str(installed / "env" / "bin" / "python"), *arguments], installed)


def test_every_kind_is_listed_without_torch(installed: Path) -> None:
    code = (
        "import sys; from grpox.plugins.discovery import discover\n"
        "from grpox.plugins.registry import Registry\n"
        "mine = [o for o in discover().offers if o.spec.name.startswith('my-')]\n"
        "[Registry(discover()).config_model(offer)() for offer in mine]\n"
        "print(*sorted(f'{o.kind} {o.status} {o.distribution}' for o in mine), sep='\\n')\n"
        "print('torch' in sys.modules)"
    )
    told = python(installed, "-c", code).splitlines()
    assert told == [*sorted(f"{kind} ok grpox-my-{kind}" for kind in KINDS), "False"]


def test_each_passes_its_own_tests_conformance_included(installed: Path) -> None:
    folders = [f"grpox-my-{kind}" for kind in KINDS]
    # At once, as importing torch takes longest; with importlib, as files of the same name would clash.
    options = ["-v", "--rootdir=.", "-p", "no:cacheprovider", "--import-mode=importlib"]
    told = python(installed, "-m", "pytest", *options, *folders)
    for kind, folder in zip(KINDS, folders, strict=True):
        assert f"{folder}/tests/test_conformance.py::TestMy{kind.capitalize()}::test_runs" in told
        assert f"{folder}/tests/test_my_{kind}.py::test_" in told
    # Only of what a template does not have: sampling ahead, list rewards, advantages of turns, a reference.
    skipped = set(re.findall(r"::(test_\w+) SKIPPED", told))
    assert skipped <= {"test_ahead", "test_own_lengths", "test_same_as_reference", "test_turns"}
    assert "failed" not in told.splitlines()[-1]


def overrides_of(installed: Path, kind: str) -> list[str]:
    """The overrides of the command by which the page of a distribution trains the quickstart."""
    readme = (installed / f"grpox-my-{kind}" / "README.md").read_text()
    return shlex.split(re.findall(r"^grpox train quickstart (.+)$", readme, re.MULTILINE)[0])


def trained(installed: Path, *overrides: str) -> list[dict[str, float]]:
    """Train the quickstart for two steps, and return their metrics."""
    common = ["train.max_steps=2", "evaluation=null", "output_dir=runs/two-steps"]
    python(installed, "-m", "grpox", "train", "quickstart", *overrides, *common)
    lines = (installed / "runs" / "two-steps" / "metrics.jsonl").read_text().splitlines()
    return [each["metrics"] for each in map(json.loads, lines) if "metrics" in each]


def test_runs_with_all_of_them_train(installed: Path) -> None:
    # The generator of the template has no turns, which the environment needs.
    kinds = [kind for kind in KINDS if kind != "environment"]
    metrics = trained(installed, *(word for kind in kinds for word in overrides_of(installed, kind)))
    folder = installed / "runs" / "two-steps"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    assert all(step["grad_norm"] > 0 for step in metrics)
    assert all(0 < step["rewards/my-reward/mean"] < 1 for step in metrics)
    assert all(step["sampling/difference_mean"] == pytest.approx(0, abs=1e-5) for step in metrics)
    with (folder / "metrics.csv").open() as file:
        rows = {(int(row["step"]), row["metric"]): float(row["value"]) for row in csv.DictReader(file)}
    assert [rows[place, "loss"] for place in (1, 2)] == [step["loss"] for step in metrics]
    shutil.rmtree(folder)
    small = ["train.per_device_train_batch_size=64", "train.num_generations=8", "tracking={}"]
    metrics = trained(installed, *overrides_of(installed, "environment"), *small)
    assert all(step["grad_norm"] > 0 and 0 < step["rewards/environment/mean"] < 1 for step in metrics)


def test_it_is_typed_as_strictly_as_grpox(rendered: Callable[..., Path]) -> None:
    sources = [str(rendered(kind, f"my-{kind}") / "src" / f"grpox_my_{kind}") for kind in KINDS]
    told = succeed([sys.executable, "-m", "mypy", *sources], ROOT)
    assert "no issues found in 40 source files" in told
