"""The wheel in a fresh environment, with third-party plugins beside it that a run uses by name."""

from __future__ import annotations

import json
import zipfile
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.packaging.conftest import Environment


def test_the_wheel_holds_both_source_roots_and_the_recipes(wheels: list[Path]) -> None:
    (wheel,) = [w for w in wheels if w.name.startswith("grpox-")]
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "grpox/training/trainer.py",
        "grpox_losses/losses.py",
        "grpox/runfile/recipes/quickstart.yaml",
        "grpox/observing/page/page.html",
        "grpox/observing/page/page.css",
        "grpox/observing/page/charts.js",
        "grpox/observing/page/vendor/uPlot.iife.min.js",
        "grpox/observing/page/vendor/uPlot.min.css",
        "grpox/observing/page/vendor/LICENSE",
    ):
        assert name in names
    assert "grpox/runfile/recipes/quickstart/model/model.safetensors" in names
    assert not [name for name in names if name.startswith(("tests/", "plugins/", "benchmarks/"))]


def test_plugins_of_three_distributions_are_listed(environment: Environment, tmp_path: Path) -> None:
    rows = json.loads(environment.grpox("plugins", "list", "--json", cwd=tmp_path))
    found = {(row["kind"], row["name"]): (row["distribution"], row["status"]) for row in rows}
    assert found["loss", "dapo"] == ("grpox", "ok")
    assert found["loss", "example-luspo"] == ("grpox-example-loss", "ok")
    assert found["dataset", "sums"] == ("grpox-third-party", "ok")
    unavailable = {name for name, (_, status) in found.items() if status != "ok"}
    # vLLM is no requirement of the wheel.
    assert unavailable == (set() if util.find_spec("vllm") else {("generator", "vllm-colocate")})


def test_a_run_uses_third_party_components_by_name(environment: Environment, tmp_path: Path) -> None:
    environment.grpox(
        "train",
        "quickstart",
        "loss=example-luspo",
        "data={source: {name: sums, rows: 40}}",
        "rewards=[exact, {name: even, weight: 0.1}]",
        "train.optimizer={name: momentum, momentum: 0.5}",
        "train.scheduler=halving",
        "train.max_steps=3",
        "tracking={diary: {file: diary.txt}}",
        "evaluation=null",
        cwd=tmp_path,
    )
    rates = [line.split() for line in (tmp_path / "diary.txt").read_text().splitlines()]
    assert [(int(step), float(rate)) for step, rate in rates] == [(1, 2e-4), (2, 1e-4), (3, 5e-5)]
    assert (tmp_path / "every-run.txt").read_text() == "3"
    versions = json.loads((tmp_path / "runs" / "quickstart" / "versions.json").read_text())["versions"]
    assert versions["grpox-third-party"] == "1.2.3"
