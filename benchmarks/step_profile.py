"""Profile of one step's time: its phases, the parts of the update, and the operators that compute it.

    python benchmarks/profile.py --model smollm2 --model-path FOLDER [--picture FILE.svg] [a.b=c ...]
    python benchmarks/profile.py --quick                  the quickstart's model

A run of varied work: the mean length is a third of the longest, 60 % of the groups teach. The phases are those
that grpox logs (time/...); the parts of the update are timed without one another, for example the backward pass
without the forward; medians over the steps after warm-up. In one more step torch.profiler looks at the update:
the seconds of each operator, without those that it calls.

Prints three tables and draws them as bars of one length. The last line is a JSON object with every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outcome import add_out, tell
from rich.console import Console
from rich.table import Table
from surroundings import surroundings
from varied_run import lengths_of, varied_overrides

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun

LIBRARIES = ("grpox", "torch", "transformers", "deepspeed")
WARM_UP = 1
OPERATORS = 12
"""Number of operators that are shown separately."""
OTHERS = "all others"
BARS = {"phases": "step", "update": "update", "operators": "update, by operator"}
Seconds = dict[str, float]


def phases_of(run: ResolvedRun) -> Seconds:
    """Median seconds of each phase after warm-up, and what no phase has of the step."""
    lines = (Path(run.config.output_dir) / "metrics.jsonl").read_text().splitlines()
    steps = [record["metrics"] for record in map(json.loads, lines) if "metrics" in record]
    steps = steps[WARM_UP:-1]  # the last is torch.profiler's
    names = [name for name in steps[0] if name.startswith("time/")]
    phases = {name.removeprefix("time/"): statistics.median(step[name] for step in steps) for name in names}
    outside = [step["step_time"] - sum(step[name] for name in names) for step in steps]
    return phases | {"between phases": statistics.median(outside)}


def profiled(run: ResolvedRun, steps: int) -> dict[str, Seconds]:
    """Train, and tell the seconds of phases, parts of the update, and operators."""
    import torch
    from forced_lengths import force_in_hf, force_in_vllm
    from regions import REST, Regions

    from grpox.training.run import train_run
    from grpox.update.policy_update import PolicyUpdate

    force = force_in_vllm if (run.config.generator.name or "").startswith("vllm") else force_in_hf
    force(lengths_of(run))
    regions, operators = Regions(), Seconds()
    parts: list[Seconds] = []
    regions.install()
    step = regions.counting(REST, PolicyUpdate.step)

    def looked_at(update: PolicyUpdate, slices: Any) -> dict[str, float]:
        nonlocal operators
        if len(parts) < WARM_UP + steps:
            measured = step(update, slices)
            parts.append(regions.take())
        else:
            with torch.profiler.profile() as profiler:
                measured = step(update, slices)
            operators = by_operator(profiler)
        print(f"step {update.engine.steps}/{WARM_UP + steps + 1}", file=sys.stderr)
        return dict(measured)

    PolicyUpdate.step = looked_at  # type: ignore[method-assign,assignment]
    train_run(run)
    counted = parts[WARM_UP:]
    names = sorted({name for taken in counted for name in taken})
    update = {name: statistics.median(taken.get(name, 0.0) for taken in counted) for name in names}
    return {"phases": phases_of(run), "update": update, "operators": operators}


def by_operator(profiler: Any) -> Seconds:
    """Seconds of the operators with most, without what they call, and of all others together; on CUDA there."""
    import torch

    kind = "device" if torch.cuda.is_available() else "cpu"
    found = {event.key: getattr(event, f"self_{kind}_time_total") * 1e-6 for event in profiler.key_averages()}
    most = sorted(found, key=lambda name: -found[name])[:OPERATORS]
    return {name: found[name] for name in most} | {
        OTHERS: sum(found[name] for name in found.keys() - set(most))
    }


def ordered(seconds: Seconds) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: (item[0] == OTHERS, -item[1]))


def show(result: dict[str, Any]) -> None:
    for key, title in BARS.items():
        table = Table(title, "s", "%", title=result["run"])
        whole = sum(result[key].values())
        for name, seconds in ordered(result[key]):
            table.add_row(name, f"{seconds:.4f}", f"{100 * seconds / whole:.1f}")
        table.add_section()
        table.add_row("all", f"{whole:.4f}", "")
        Console().print(table)


def draw(result: dict[str, Any], picture: Path) -> None:
    """A bar of parts for each table, with the seconds of those that are wide enough to be read."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(BARS), 1, figsize=(11, 8))
    for axis, (key, title) in zip(axes, BARS.items(), strict=True):
        whole, left = sum(result[key].values()), 0.0
        for number, (name, seconds) in enumerate(ordered(result[key])):
            part = seconds / whole
            label = f"{name} {100 * part:.1f} %"
            axis.barh(0, part, left=left, color=pyplot.cm.tab20(number % 20), edgecolor="white", label=label)
            if part > 0.06:
                axis.text(left + part / 2, 0, f"{seconds:.3g} s", ha="center", va="center", fontsize=8)
            left += part
        axis.set_title(f"{title}: {whole:.3g} s", loc="left", fontsize=10)
        axis.set_xlim(0, 1)
        axis.axis("off")
        axis.legend(loc="upper left", bbox_to_anchor=(0, 0.05), ncols=3, fontsize=7, frameon=False)
    figure.suptitle(f"{result['run']}: where one step's time goes", x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(picture)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="profile.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("override", nargs="*", help="a.b=c, of the run file")
    parser.add_argument("--model", default="quickstart", help="a recipe or run file (default: quickstart)")
    parser.add_argument("--model-path", help="model folder in place of the run file's")
    parser.add_argument("--generator", default="hf", help="what samples (default: hf)")
    parser.add_argument("--steps", type=int, default=3, help="that count (default: 3), after one of warm-up")
    parser.add_argument("--picture", type=Path, default=Path("profile.svg"), help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one step that counts")
    add_out(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    steps = 1 if arguments.quick else arguments.steps
    overrides = [f"train.max_steps={WARM_UP + steps + 1}", "train.warmup_steps=0", "evaluation=null"]
    overrides += ["tracking={}", "logging.completions_every=0", "checkpoint.every=0"]
    overrides += [f"generator={arguments.generator}", *arguments.override]
    if arguments.model_path:
        overrides.append(f"model.path={Path(arguments.model_path).absolute()}")
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    from grpox.runfile.load import load_run

    with tempfile.TemporaryDirectory() as folder:
        varied = varied_overrides(arguments.model, overrides, Path(folder))
        run = load_run(arguments.model, [*overrides, *varied, f"output_dir={folder}/run"])
        found = profiled(run, steps)
    result = {
        "benchmark": "profile",
        "run": arguments.model,
        "generator": arguments.generator,
        "overrides": arguments.override,
        "steps": steps,
        **found,
        **surroundings(LIBRARIES),
    }
    show(result)
    draw(result, arguments.picture)
    Console().print(f"picture: {arguments.picture}")
    tell(result, arguments.out)
