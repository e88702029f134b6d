"""Records what updates compute on fixed inputs, and compares: a refactoring must not change it.

    python benchmarks/recorded_batches.py record DIR [--only WORD ...] [--ranks 1 2]
    python benchmarks/recorded_batches.py compare DIR [--only WORD ...] [--ranks 1 2] [--tolerance 1e-12]

Each case is a short run by `grpox.Run` with a tiny random model in float64. A generator of recorded_cases.py
gives the completions. The optimizer is SGD with a learning rate of 1, so the change of the weights is the
gradient. Each loss is combined with each forward mode, other settings with two; two ranks have half as many
cases. Recorded are metrics except times and memory, tokens, rewards and advantages of completions, and the
change of each weight in each step.

The relative difference of two numbers is |a - b| / max(|a|, |b|, scale), at most 2. The scale is the root mean
square of the recorded array, because an element may be 0 but for rounding; that of a metric is at least 0.01,
because a loss of 0 is a sum of rounding errors. If only one of the two is finite, the difference is 2. The last
line is a JSON object. The exit code is 1 if a difference is above the tolerance or a recorded value is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from outcome import tell
from recorded_cases import LETTERS, ROWS, RUN, cases, make_model
from surroundings import surroundings

import grpox

LIBRARIES = ("grpox", "torch", "transformers", "deepspeed", "peft", "numpy")
METRIC_SCALE = 0.01
VARYING = re.compile(r"time|memory|tokens_per_second|system/")
"""Metrics that differ from run to run."""
Values = dict[str, np.ndarray]


def prepare() -> None:
    """Let transformers load models, and ZeRO-3 sum gradients, in float64, which run files cannot ask for.

    Only libraries are changed. Whatever is needed beyond the documented interface of grpox belongs here.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from transformers import AutoModelForCausalLM

    load, double = AutoModelForCausalLM.from_pretrained, torch.float64
    AutoModelForCausalLM.from_pretrained = lambda path, **options: load(path, **options | {"dtype": double})
    DeepSpeedEngine.communication_data_type = double
    DeepSpeedEngine.get_data_types = lambda self: (torch.float32, double)  # of the model, whose kind it checks
    DeepSpeedZeroOptimizer_Stage3._configure_master_weights = lambda self, **options: double
    logging.getLogger("grpox").setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").disabled = True


class Scores:
    """Notes tokens, rewards and advantages of completions."""

    def __init__(self) -> None:
        self.values: Values = {}

    def grpox_rollouts_scored(self, step: int, rollouts: Sequence[Any]) -> None:
        tokens = chain(*(each.rollout.completion_ids for each in rollouts))
        self.values[f"step {step}/tokens"] = np.array([*tokens])
        for name in ("reward", "advantage"):
            self.values[f"step {step}/{name}"] = np.array([getattr(each, name) for each in rollouts])


def values_of(model: Path, overrides: Sequence[str], ranks: int) -> Values:
    """Run a case on this rank; returns its arrays by name."""
    rng, scores, values = random.Random(1), Scores(), Values()
    rows = [{"prompt": "".join(rng.choices(LETTERS, k=2 + n % 8)), "teaches": n % 4 != 2} for n in range(32)]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "run.yaml")
        source.write_text(RUN)
        changes = [f"model.path={model.resolve()}", f"output_dir={folder}/out", *overrides]
        changes.append(f"train.per_device_train_batch_size={ROWS // 2 // ranks}")
        with grpox.Run(source, changes, dataset=rows, callbacks=[scores]) as run:
            before = {name: weight.detach().clone() for name, weight in run.policy.named_parameters()}
            while not run.done:
                metrics = run.step()
                step = f"step {metrics['step']:.0f}"
                for name in (name for name in metrics if not VARYING.search(name)):
                    values[f"{step}/metrics/{name}"] = np.array([metrics[name]], dtype=np.float64)
                for name, weight in run.policy.named_parameters():
                    values[f"{step}/weights/{name}"] = (weight.detach() - before[name]).numpy()
                    before[name] = weight.detach().clone()
    return values | scores.values


def compute(model: str, out: str, ranks: int, names: Sequence[str]) -> None:
    """Write the arrays of each case to ``OUT/RANKS/NAME.npz``; a case that fails is printed and left out."""
    if ranks > 1 and "RANK" not in os.environ:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__, "rank"]
        command = [sys.executable, "-m", *launcher, json.dumps([model, out, ranks, names])]
        subprocess.run(command, stdout=sys.stderr, check=True)
        return
    prepare()
    for number, name in enumerate(names, start=1):
        began, end = time.monotonic(), ""
        try:
            with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
                values = values_of(Path(model), cases(ranks)[name][1], ranks)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other cases go on
            end = f"  FAILED: {type(error).__name__}: {error}"
        if os.environ.get("RANK", "0") == "0":
            if not end:
                np.savez(Path(out, str(ranks), f"{name}.npz"), **values)  # type: ignore[arg-type]
            seconds = time.monotonic() - began
            print(f"{number}/{len(names)}  {name}, ranks {ranks}  {seconds:.1f} s{end}", file=sys.stderr)
        if number == 1:
            gc.freeze()  # DeepSpeed collects garbage in each run, which takes longer than the steps


def difference(old: np.ndarray, new: np.ndarray, least: float) -> float:
    """Return the largest relative difference of two arrays, where `least` is the least scale."""
    finite = np.isfinite(old)
    if not np.array_equal(old[~finite], new[~finite], equal_nan=True) or not np.isfinite(new[finite]).all():
        return 2.0
    old, new = old[finite].astype(np.float64), new[finite].astype(np.float64)
    scale = max(least, np.sqrt(np.mean(old**2)) if old.size else 0.0)
    scales = np.maximum(np.maximum(abs(old), abs(new)), scale)
    return float(np.divide(abs(old - new), scales, out=np.zeros_like(old), where=scales > 0).max(initial=0.0))


def compare(recorded: Path, computed: Path, files: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """Compare the arrays of two folders; `files` are numbers of ranks and names of cases."""
    missing: list[str] = []
    by_mode: dict[str, float] = {}
    count, largest, where = 0, 0.0, ""
    for ranks, name in files:
        place, case = f"{ranks}/{name}.npz", f"{name}, ranks {ranks}"
        if not (computed / place).exists():
            missing.append(case)
            continue
        mode = cases(ranks)[name][0]
        with np.load(recorded / place) as old, np.load(computed / place) as new:
            common = [key for key in old.files if key in new.files and old[key].shape == new[key].shape]
            missing += [f"{case}: {key}" for key in old.files if key not in common]
            for key in common:
                found = difference(old[key], new[key], METRIC_SCALE if "/metrics/" in key else 0.0)
                count, by_mode[mode] = count + old[key].size, max(by_mode.get(mode, 0.0), found)
                if found > largest:
                    largest, where = found, f"{case}: {key}"
    result = {"compared": count, "largest_relative_difference": largest, "where": where}
    return result | {"missing": missing, "by_mode": by_mode}


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        compute(*json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("folder", type=Path, metavar="DIR", help="the model, about.json and RANKS/CASE.npz")
    parser.add_argument("--only", nargs="+", default=[], help="words that the names of cases contain")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--tolerance", type=float, default=1e-12)
    given = parser.parse_args()
    records, model, files = given.command == "record", given.folder / "model", []
    commit = ["git", "-C", str(Path(grpox.__file__).parent), "rev-parse", "HEAD"]
    revision = subprocess.run(commit, capture_output=True, text=True, check=False).stdout.strip()
    about = surroundings(LIBRARIES) | {"commit": revision}
    if records:
        make_model(model)
        (given.folder / "about.json").write_text(json.dumps(about, indent=2) + "\n")
    with tempfile.TemporaryDirectory() as temporary:
        out = given.folder if records else Path(temporary)
        for ranks in given.ranks:
            (out / str(ranks)).mkdir(exist_ok=True)
            known = (
                cases(ranks) if records else sorted(file.stem for file in given.folder.glob(f"{ranks}/*.npz"))
            )
            names = [name for name in known if all(word in name for word in given.only)]
            files += [(ranks, name) for name in names]
            compute(str(model), str(out), ranks, names)
        result = compare(given.folder, out, files)
    tell(result | about, None)
    if result["missing"] or result["largest_relative_difference"] > given.tolerance or not result["compared"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
