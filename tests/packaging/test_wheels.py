"""The wheels of grpox, every example and a third party in a fresh environment: listed, tested, trained with."""

from __future__ import annotations

import json
import math
import re
import zipfile
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.packaging.conftest import Environment


FOLDERS = sorted(
    path.parent.name for path in Path(__file__).parents[2].glob("plugins/examples/*/pyproject.toml")
)
COMPONENTS = {
    ("advantage", "passk", "grpox-passk"),
    ("correction", "vespo", "grpox-vespo"),
    ("dataset", "reasoning-gym", "grpox-reasoning-gym"),
    ("loss", "gmpo", "grpox-gmpo"),
    ("optimizer", "ademamix", "grpox-ademamix"),
    ("scheduler", "cooldown", "grpox-ademamix"),
    ("loss", "vespo", "grpox-vespo"),
    ("observer", "tensorboard", "grpox-tensorboard"),
    ("observer", "wandb", "grpox-wandb"),
    ("reward", "reasoning-gym", "grpox-reasoning-gym"),
}
ALONE = {"GRPOX_DISABLE_PLUGINS": "grpox-third-party"}
"""Without the plugin of the other tests, which observes every run."""
STEPS = 3


def test_the_wheel_holds_both_source_roots_and_the_recipes(wheels: list[Path]) -> None:
    (wheel,) = [w for w in wheels if w.name.startswith("grpox-")]
    names = zipfile.ZipFile(wheel).namelist()
    page = (
        "page.html",
        "page.css",
        "charts.js",
        "vendor/uPlot.iife.min.js",
        "vendor/uPlot.min.css",
        "vendor/LICENSE",
    )
    recipes = ("quickstart.yaml", "quickstart/model/model.safetensors")
    wanted = {"grpox/training/trainer.py", "grpox_losses/losses.py"}
    wanted |= {f"grpox/observing/page/{name}" for name in page}
    wanted |= {f"grpox/runfile/recipes/{name}" for name in recipes}
    assert wanted <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "plugins/", "benchmarks/"))]


def test_every_distribution_is_listed_and_usable(environment: Environment, tmp_path: Path) -> None:
    rows = json.loads(environment.grpox("plugins", "list", "--json", cwd=tmp_path))
    of_examples = [row for row in rows if row["distribution"] in FOLDERS]
    assert {(row["kind"], row["name"], row["distribution"]) for row in of_examples} == COMPONENTS
    assert {distribution for _, _, distribution in COMPONENTS} == set(FOLDERS)
    found = {(row["kind"], row["name"]): (row["distribution"], row["status"]) for row in rows}
    assert found["loss", "dapo"] == ("grpox", "ok")
    assert found["dataset", "sums"] == ("grpox-third-party", "ok")
    unavailable = {name for name, (_, status) in found.items() if status != "ok"}
    # vLLM is no requirement of the wheel.
    assert unavailable == (set() if util.find_spec("vllm") else {("generator", "vllm-colocate")})


def test_a_run_uses_third_party_components_by_name(environment: Environment, tmp_path: Path) -> None:
    components = ("loss=gmpo", "data={source: {name: sums, rows: 40}}", "train.scheduler=halving")
    components += ("rewards=[exact, {name: even, weight: 0.1}]", "tracking={diary: {file: diary.txt}}")
    components += ("train.optimizer={name: momentum, momentum: 0.5}",)
    _train(environment, tmp_path, *components, variables={})
    rates = [line.split() for line in (tmp_path / "diary.txt").read_text().splitlines()]
    assert [(int(step), float(rate)) for step, rate in rates] == [(1, 2e-4), (2, 1e-4), (3, 5e-5)]
    assert (tmp_path / "every-run.txt").read_text() == "3"
    versions = json.loads((tmp_path / "runs" / "quickstart" / "versions.json").read_text())["versions"]
    assert versions["grpox-third-party"] == "1.2.3"


def test_each_passes_its_own_tests(environment: Environment) -> None:
    # At once, as importing torch takes longest; with importlib, as files of the same name would clash.
    options = ("-v", "--rootdir=.", "-p", "no:cacheprovider", "--import-mode=importlib")
    told = environment.python("-m", "pytest", *options, *FOLDERS, cwd=environment.examples, **ALONE)
    for folder in FOLDERS:
        assert f"{folder}/tests/" in told
    # A check is skipped that is for what a component does not have, such as turns.
    assert re.fullmatch(r"=+ \d+ passed(, \d+ skipped)?(, \d+ warnings?)? in .*=+", told.splitlines()[-1])


def test_a_run_uses_components_of_three_examples(environment: Environment, tmp_path: Path) -> None:
    """A loss that brings its own correction, an advantage and an observer."""
    components = ("loss=vespo", "correction=vespo", "advantage={name: passk, k: 4}")
    _train(environment, tmp_path, *components, "tracking={tensorboard: {}}")
    metrics = _metrics(tmp_path)
    for step in metrics:
        assert step["grad_norm"] > 0
        # On completions of the policy itself nothing is down-weighted.
        assert step["vespo/phi_mean"] == pytest.approx(1, abs=1e-3)
        assert math.isfinite(step["loss"])
    code = (
        "import json\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "read = EventAccumulator('runs/quickstart/tensorboard').Reload()\n"
        "print(json.dumps([event.value for event in read.Scalars('reward')]))"
    )
    rewards = json.loads(environment.python("-c", code, cwd=tmp_path))
    assert rewards == pytest.approx([step["reward"] for step in metrics])
    versions = json.loads((tmp_path / "runs" / "quickstart" / "versions.json").read_text())["versions"]
    assert {"grpox-vespo", "grpox-passk", "grpox-tensorboard"} <= versions.keys()


def _train(environment: Environment, folder: Path, *overrides: str, variables: dict[str, str] = ALONE) -> None:
    given = [f"train.max_steps={STEPS}", "evaluation=null", *overrides]
    environment.grpox("train", "quickstart", *given, cwd=folder, **variables)


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """Each step's metrics, out of the run's record."""
    lines = (folder / "runs" / "quickstart" / "metrics.jsonl").read_text().splitlines()
    metrics = [record["metrics"] for record in map(json.loads, lines) if "metrics" in record]
    assert len(metrics) == STEPS
    return metrics
