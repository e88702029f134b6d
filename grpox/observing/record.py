"""The local record of a run: config, versions, metrics and completions as plain files in its folder.

It needs no server and is always on: what a tracker loses is still here.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from grpox.hookspecs import hookimpl
from grpox.observing.completions import CompletionFiles, write_completions

if TYPE_CHECKING:
    from grpox.config import RunConfig
    from grpox.contracts import RunContext, ScoredRollout


RECORD = (
    "metrics.jsonl",
    "failure.json",
    "summary.json",
    "versions.json",
    "config.yaml",
    "completions",
    "report.html",
)
"""What a run leaves in its folder, beside the model; first what was written when it ended."""


class LocalRecord:
    """Writes ``config.yaml``, ``versions.json``, ``metrics.jsonl`` and ``completions/*.parquet``.

    A run that fails has ``failure.json`` besides: ``{"error": "RunFailed: ..."}``.

    Each line of ``metrics.jsonl`` is one JSON object, on disk before the next step starts:
    ``{"step": 3, "time": <unix seconds>, "metrics": {...}}`` for an optimizer step, and
    ``{"step": 3, "time": ..., "evaluation": {...}}`` for an evaluation. JSON knows no such numbers, so they
    are the strings ``"nan"``, ``"inf"`` and ``"-inf"``, which Python's `float` reads back. The record of an
    earlier run in the same folder, its model included, is moved to ``earlier/``.
    """

    @hookimpl(tryfirst=True)
    def grpox_run_started(self, run: RunContext) -> None:
        self._files = CompletionFiles(run)
        self._metrics = run.output_dir / "metrics.jsonl"
        run.output_dir.mkdir(parents=True, exist_ok=True)
        _set_aside(run.output_dir)
        (run.output_dir / "config.yaml").write_text(config_text(run.config), encoding="utf-8")
        versions = {"versions": dict(run.versions), "git_commit": run.git_commit, "source": run.source}
        text = json.dumps(versions, indent=2, ensure_ascii=False) + "\n"
        (run.output_dir / "versions.json").write_text(text, encoding="utf-8")

    @hookimpl(tryfirst=True)
    def grpox_rollouts_scored(self, step: int, rollouts: Sequence[ScoredRollout]) -> None:
        path = self._files.next(step)
        if path is not None:
            write_completions(path, step, rollouts)

    @hookimpl(tryfirst=True)
    def grpox_step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append(step, "metrics", metrics)

    @hookimpl(tryfirst=True)
    def grpox_evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append(step, "evaluation", metrics)

    @hookimpl(tryfirst=True)
    def grpox_run_failed(self, run: RunContext, error: BaseException) -> None:
        # An interruption has no message.
        told = f"{type(error).__name__}: {error}".removesuffix(": ")
        text = json.dumps({"error": told}, ensure_ascii=False) + "\n"
        (run.output_dir / "failure.json").write_text(text, encoding="utf-8")

    def _append(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        values = {name: _strict(value) for name, value in metrics.items()}
        line = json.dumps({"step": step, "time": time.time(), kind: values}, allow_nan=False)
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def config_text(config: RunConfig) -> str:
    """The resolved config as YAML that `RunConfig` reads back to the same config."""
    dumped = config.model_dump(mode="json")
    return yaml.safe_dump(dumped, sort_keys=False, allow_unicode=True, width=110)


def _strict(value: float) -> float | str:
    return value if math.isfinite(value) else str(float(value))


def _set_aside(folder: Path) -> None:
    """Move what an earlier run left in this folder to ``earlier/<when it ended>``: nothing is overwritten."""
    there = [name for name in RECORD if (folder / name).exists()]
    if not there:
        return
    aside = _new_folder(folder / "earlier", (folder / there[0]).stat().st_mtime)
    if "versions.json" in there and (folder / "model").exists():
        # Without a run's record beside it, a folder of this name is not known to be a run's model.
        there.append("model")
    for name in there:
        (folder / name).replace(aside / name)


def _new_folder(parent: Path, seconds: float) -> Path:
    """A folder named by a time; numbered where that second has one already."""
    name = time.strftime("%Y-%m-%dT%H-%M-%S", time.localtime(seconds))
    made, number = parent / name, 1
    while made.exists():
        number += 1
        made = parent / f"{name}-{number}"
    made.mkdir(parents=True)
    return made
