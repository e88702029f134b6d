"""The quickstart on this device: it learns, and a resumed run continues as docs/checkpoints.md promises.

On the CPU the resumed run is the same bit by bit. On a GPU it differs as two runs of one seed do, so that a run
is resumed twice, and the two are compared as well.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

from gpu_parts.part import Part
from grpox.runfile.load import load_run
from grpox.runtime.determinism import WORKSPACE, WORKSPACES
from grpox.training.run import train_run

STEPS, SMALL_STEPS = 100, 4
LEAST_ACCURACY = 0.85
"""Held-out accuracy after 100 steps; it was 0.97 to 0.98 on three seeds on the CPU, and 0.33 before."""
REWARD_TOLERANCE = 0.05
"""Mean difference of two reward curves that is noise, beside the one seen between two runs that resumed."""
COMPARED = ("loss", "reward", "grad_norm", "completions/mean_length")
Curves = dict[str, list[float]]


def measure(part: Part) -> None:
    """Record accuracy, speed, and how far a whole run and two resumed ones differ."""
    # torch reads it at the first product, and the last runs of this part are deterministic.
    os.environ.setdefault(WORKSPACE, WORKSPACES[0])
    steps = SMALL_STEPS if part.small else STEPS
    whole = part.folder / "whole"
    summary = train(whole, steps, small=part.small)
    times = [metrics["step_time"] for metrics in recorded(whole)]
    names = ("accuracy_before", "accuracy_after", "train_seconds")
    part.record("run", {name: summary.get(name) for name in names} | {"steps": steps})
    part.record("step_ms", 1e3 * statistics.median(times[1:]))
    part.record("reward", [metrics["reward"] for metrics in recorded(whole)])
    if not part.small:
        check_accuracy(part, "float32", summary["accuracy_after"])
    measure_bfloat16(part)
    resumed = resume_from_half(whole, part.folder / "resumed", steps, part.small)
    part.record("resumed", differences(whole, resumed, steps // 2))
    again = resume_from_half(whole, part.folder / "again", steps, part.small)
    part.record("again", differences(resumed, again, steps // 2))
    check_resumed(part)
    measure_deterministic(part)


def check_resumed(part: Part) -> None:
    """Hold the resumed run to the docs: the same on a CPU, on a GPU as close as two runs of one seed."""
    resumed, again = (part.figures[name] for name in ("resumed", "again"))
    if part.on_cuda:
        most = 2 * again["reward"] + REWARD_TOLERANCE
        part.check("difference of the resumed run's rewards", resumed["reward"], most)
    elif any(resumed.values()):
        part.fail(f"the resumed run differs: {resumed}")


def measure_bfloat16(part: Part) -> None:
    """The quickstart learns in bfloat16 too."""
    folder = part.folder / "bfloat16"
    steps = SMALL_STEPS if part.small else STEPS
    summary = train(folder, steps, small=part.small, more=("model.dtype=bfloat16",))
    names = ("accuracy_before", "accuracy_after", "train_seconds")
    part.record("bfloat16", {name: summary.get(name) for name in names})
    if not part.small:
        check_accuracy(part, "bfloat16", summary["accuracy_after"])


def check_accuracy(part: Part, dtype: str, accuracy: float) -> None:
    if accuracy < LEAST_ACCURACY:
        part.fail(f"{dtype}: accuracy after {STEPS} steps is {accuracy:.3f}, less than {LEAST_ACCURACY}")


def measure_deterministic(part: Part) -> None:
    """With train.deterministic a resumed run is the same bit by bit on a GPU as well."""
    whole, steps, more = part.folder / "deterministic", SMALL_STEPS, ("train.deterministic=true",)
    train(whole, steps, small=True, more=more)
    resumed = resume_from_half(whole, part.folder / "deterministic-resumed", steps, True, more)
    part.record("deterministic", differences(whole, resumed, steps // 2))
    if any(part.figures["deterministic"].values()):
        part.fail(f"with train.deterministic the resumed run differs: {part.figures['deterministic']}")


def train(
    folder: Path, steps: int, *, small: bool, more: tuple[str, ...] = (), resume: bool = False
) -> dict[str, Any]:
    """Train the quickstart into `folder`; returns its summary."""
    overrides = [
        f"output_dir={folder}",
        f"train.max_steps={steps}",
        f"checkpoint.every={steps // 2}",
        "checkpoint.keep=4",
        "tracking={}",
        *(["evaluation=null", "train.warmup_steps=2"] if small else []),
        *more,
    ]
    return train_run(load_run("quickstart", overrides), resume=resume)


def resume_from_half(whole: Path, folder: Path, steps: int, small: bool, more: tuple[str, ...] = ()) -> Path:
    """Copy a run's folder without what came after half of its steps, and have it finish."""
    shutil.copytree(whole, folder)
    checkpoints = folder / "checkpoints"
    for checkpoint in checkpoints.iterdir():
        if checkpoint.is_dir() and checkpoint.name.endswith(str(steps)):
            shutil.rmtree(checkpoint)
    (folder / "summary.json").unlink(missing_ok=True)
    train(folder, steps, small=small, more=more, resume=True)
    return folder


def recorded(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of each step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["metrics"] for record in map(json.loads, lines) if "metrics" in record]


def differences(run: Path, other: Path, after: int) -> dict[str, float]:
    """Return the mean difference of the curves after so many steps, by metric."""
    pairs = list(zip(recorded(run), recorded(other), strict=True))[after:]
    return {name: statistics.mean(abs(one[name] - two[name]) for one, two in pairs) for name in COMPARED}
