"""The wheel in a fresh environment, with third-party plugins beside it that a run uses by name."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
THIRD_PARTY = ROOT / "tests" / "packaging" / "third_party"
EXAMPLE_LOSS = ROOT / "plugins" / "examples" / "grpox-example-loss"


def succeed(command, **kwargs):
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """grpox, the example loss and the third party, as pip builds them from their sources."""
    out = tmp_path_factory.mktemp("wheels")
    for source in (ROOT, EXAMPLE_LOSS, THIRD_PARTY):
        succeed([sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(source)])
    return sorted(out.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheels, tmp_path_factory):
    """A fresh environment's bin folder, everything in it installed by pip from the wheels."""
    folder = tmp_path_factory.mktemp("environment")
    succeed([sys.executable, "-m", "venv", str(folder)])
    succeed([str(folder / "bin" / "pip"), "install", "--quiet", *map(str, wheels)])
    return folder / "bin"


@pytest.fixture(scope="module")
def grpox(environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*arguments):
        variables["OMP_NUM_THREADS"] = "1"
        return succeed([str(environment / "grpox"), *arguments], cwd=folder, env=variables)

    run.folder = folder
    return run


def test_the_wheel_holds_both_source_roots_and_the_recipes(wheels):
    (wheel,) = [w for w in wheels if w.name.startswith("grpox-")]
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("grpox/trainer.py", "grpox_losses/dapo.py", "grpox/recipes/quickstart.yaml"):
        assert name in names
    assert "grpox/recipes/quickstart/model/model.safetensors" in names
    assert not [name for name in names if name.startswith(("tests/", "plugins/", "benchmarks/"))]


def test_plugins_of_three_distributions_are_listed(grpox):
    rows = json.loads(grpox("plugins", "list", "--json"))
    found = {(row["kind"], row["name"]): (row["distribution"], row["status"]) for row in rows}
    assert found["loss", "dapo"] == ("grpox", "ok")
    assert found["loss", "luspo"] == ("grpox-example-loss", "ok")
    assert found["dataset", "sums"] == ("grpox-third-party", "ok")
    unavailable = {name for name, (_, status) in found.items() if status != "ok"}
    assert unavailable == {("generator", "vllm-colocate")}  # vLLM is no requirement of the wheel


def test_the_example_passes_its_own_tests(environment):
    succeed([str(environment / "pip"), "install", "--quiet", "pytest"])
    told = succeed([str(environment / "python"), "-m", "pytest", "-q"], cwd=EXAMPLE_LOSS)
    assert " passed" in told


def test_a_run_uses_third_party_components_by_name(grpox):
    grpox(
        "train",
        "quickstart",
        "loss=luspo",
        "data={source: {name: sums, rows: 40}}",
        "rewards=[exact, {name: even, weight: 0.1}]",
        "train.optimizer={name: momentum, momentum: 0.5}",
        "train.scheduler=halving",
        "train.max_steps=3",
        "tracking={diary: {file: diary.txt}}",
        "evaluation=null",
    )
    rates = [line.split() for line in (grpox.folder / "diary.txt").read_text().splitlines()]
    assert [(int(step), float(rate)) for step, rate in rates] == [(1, 2e-4), (2, 1e-4), (3, 5e-5)]
    assert (grpox.folder / "every-run.txt").read_text() == "3"
    versions = json.loads((grpox.folder / "runs" / "quickstart" / "versions.json").read_text())["versions"]
    assert versions["grpox-third-party"] == "1.2.3"
