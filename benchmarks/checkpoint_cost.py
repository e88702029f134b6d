"""Cost of checkpoints: how long a save delays the training, and how long verifying one takes.

Trains a random Llama of some 26 million parameters (310 MB of weights and optimizer states) on the quickstart's
problems, with checkpoints written by a thread, and with checkpoints that the run waits for. The delay is the
time
between two steps beyond the time of the step itself. If a thread writes meanwhile, the steps beside it are also
compared with the others. Then a checkpoint is verified, and its bytes are read twice, from the disk (its pages
dropped from memory) and from memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from surroundings import surroundings

SETTINGS = (
    "evaluation=null",
    "tracking={}",
    "checkpoint.keep=1",
    "logging.completions_every=0",
    "logging.save_completions_every=0",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", help="default: a random Llama")
    parser.add_argument("--steps", type=int, default=12, help="of each run; default: 12")
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints; default: 3")
    parser.add_argument("overrides", nargs="*", help="of the quickstart, such as train.num_generations=8")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = given.model_path or str(random_llama(folder / "model"))
        settings = [f"model.path={model}", f"train.max_steps={given.steps}", f"checkpoint.every={given.every}"]
        found: dict[str, Any] = {}
        for kind in ("background", "foreground"):
            background = f"checkpoint.background={str(kind == 'background').lower()}"
            run = folder / kind
            train(*settings, background, f"output_dir={run}", *given.overrides)
            found[kind] = held_up(run, given.every)
        [checkpoint] = (run / "checkpoints").iterdir()
        found |= verification(checkpoint)
    for kind in ("background", "foreground"):
        print(f"{kind}: a save holds the training up for {found[kind]['percent_of_a_step']:.1f} % of a step")
    print(f"verification from the disk: {found['disk']['verified_per_read_twice']:.2f} of reading twice")
    print(json.dumps(found | surroundings(["grpox", "torch", "deepspeed", "xxhash"])))


def random_llama(folder: Path) -> Path:
    """A model of random weights with the quickstart's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    quickstart = str(resources.files("grpox.runfile.recipes") / "quickstart" / "model")
    tokenizer = AutoTokenizer.from_pretrained(quickstart)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(*settings: str) -> None:
    command = [sys.executable, "-m", "grpox", "train", "quickstart", *SETTINGS, *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def held_up(run: Path, every: int) -> dict[str, Any]:
    """Seconds by which the training was held up after each step, of those with a save and of the others."""
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [(line["step"], line["time"], line["metrics"]["step_time"]) for line in told]
    after: dict[bool, list[float]] = {True: [], False: []}
    beside: dict[bool, list[float]] = {True: [], False: []}
    for (step, ended, _), (_, next_ended, step_time) in pairwise(steps[1:]):
        after[step % every == 0].append(next_ended - ended - step_time)
        beside[step % every == 0].append(step_time)
    a_step = statistics.median(beside[False])
    # A thread's checkpoint is given its name after one of the steps that follow: that counts as well.
    saves = sum(after[True]) + sum(after[False]) - len(after[False]) * min(after[False])
    each = saves / len(after[True])
    return {
        "step_seconds": round(a_step, 3),
        "step_seconds_beside_a_save": round(statistics.median(beside[True]), 3),
        "held_up_seconds_per_save": round(each, 3),
        "percent_of_a_step": round(100 * each / a_step, 2),
        "saves": len(after[True]),
    }


def verification(checkpoint: Path) -> dict[str, Any]:
    """Seconds of comparing a checkpoint with its manifest, and of reading its bytes twice; medians of five."""
    from grpox.checkpoint.folders import faults, read_manifest

    def verify() -> None:
        assert faults(checkpoint, read_manifest(checkpoint)) == []

    def read_twice() -> None:
        read(checkpoint)
        if cold:
            forget(checkpoint)
        read(checkpoint)

    sizes = [path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()]
    found: dict[str, Any] = {"megabytes": round(sum(sizes) / 1e6)}
    for name, cold in (("disk", True), ("memory", False)):
        verified, twice = (median_seconds(work, checkpoint if cold else None) for work in (verify, read_twice))
        found[name] = {
            "verify_seconds": round(verified, 3),
            "read_twice_seconds": round(twice, 3),
            "verified_per_read_twice": round(verified / twice, 3),
        }
    return found


def median_seconds(work: Callable[[], None], forgotten: Path | None) -> float:
    times = []
    for _ in range(5):
        if forgotten is not None:
            forget(forgotten)
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def read(folder: Path) -> None:
    buffer = bytearray(2**18)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def forget(folder: Path) -> None:
    """Have the kernel drop the pages of the files, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
