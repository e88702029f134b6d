"""The update phase against its limits: a bare DeepSpeed ZeRO-3 loop, and a plain PyTorch loop.

    python benchmarks/update.py --model-path FOLDER [--ranks 2] [--rounds 3] [--out FILE.json] [a.b=c ...]
    python benchmarks/update.py --quick                   the quickstart's model, in a minute

All candidates take optimizer steps on the same rollouts, whose lengths vary (their mean is a third of the
longest), and of whose groups 60 % teach; the others have advantages of 0. In each round every candidate takes
one step, in turns.

    grpox          PolicyUpdate.step, with everything that saves work
    grpox -NAME    the same, with the setting train.NAME off; -all: with all of them off
    bare-zero3     forward, log-softmax, the same loss, backward and step on DeepSpeed, with the same settings,
                   on padded micro-batches; no metrics, no checks
    torch          the same in PyTorch alone (DistributedDataParallel on several ranks)

Ratios are medians over those of the rounds: how many times faster than bare-zero3. Their gradients' norms must
agree, or the benchmark fails. The last line is a JSON object with every figure.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

from outcome import add_out, tell
from ranks import run_ranks
from rich.console import Console
from rich.table import Column, Table
from surroundings import surroundings

LIBRARIES = ("grpox", "torch", "transformers", "deepspeed")
GOAL = 0.95
"""Goal, as a share of the speed of bare-zero3."""
AGREEMENT = 1e-3
"""Largest relative difference of norms by rounding."""


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of every candidate: medians, spread, and ratios to bare-zero3 and torch of the same round."""
    seconds, tokens = ranks[0]["seconds"], ranks[0]["tokens"]
    result = {}
    for name, own in seconds.items():
        speeds = [count / taken for count, taken in zip(tokens, own, strict=True)]
        result[name] = {
            "seconds": statistics.median(own),
            "seconds_of_rounds": own,
            "tokens_per_second": statistics.median(speeds),
            # 2 operations a weight and token in the forward pass, 4 in the backward pass
            "tflop_per_second": 6e-12 * ranks[0]["parameters"] * statistics.median(speeds),
        }
        for other, key in (("bare-zero3", "to_bare"), ("torch", "to_torch"), ("grpox", "to_grpox")):
            if other in seconds:
                ratios = [theirs / taken for theirs, taken in zip(seconds[other], own, strict=True)]
                result[name] |= {key: statistics.median(ratios), f"{key}_of_rounds": ratios}
    return result


def check_norms(norms: dict[str, list[float]]) -> None:
    """Every candidate must have computed the same gradient, else their times say nothing."""
    for number, found in enumerate(zip(*norms.values(), strict=True), start=1):
        if max(found) - min(found) > AGREEMENT * max(found):
            told = ", ".join(f"{name} {norm:.6g}" for name, norm in zip(norms, found, strict=True))
            raise SystemExit(f"round {number}: the candidates' gradients differ, of norm {told}")


def show(result: dict[str, Any]) -> None:
    title = f"{result['run']}, ranks: {result['ranks']}, {result['prompts']} x {result['samples']} completions"
    title += f" of up to {result['longest']} tokens"
    table = Table(
        Column("candidate", no_wrap=True), "s", "tokens/s", "to bare", "of rounds", "to torch", title=title
    )
    for name, own in result["candidates"].items():
        rounds = own.get("to_bare_of_rounds")
        cells = [f"{own['to_bare']:.2f}", f"{min(rounds):.2f}-{max(rounds):.2f}"] if rounds else ["", ""]
        cells.append(f"{own['to_torch']:.2f}" if "to_torch" in own else "")
        label = name.replace("grpox -", "  -")
        table.add_row(label, f"{own['seconds']:.3f}", f"{own['tokens_per_second']:,.0f}", *cells)
    Console().print(table)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("override", nargs="*", help="a.b=c, of the run file")
    parser.add_argument("--model", default="smollm2", help="a recipe or run file (default: smollm2)")
    parser.add_argument("--model-path", help="model folder in place of the run file's")
    parser.add_argument("--ranks", type=int, default=1, help="processes, by torchrun if several (default: 1)")
    parser.add_argument("--prompts", type=int, default=4, help="groups of a step (default: 4)")
    parser.add_argument("--samples", type=int, default=8, help="completions of a group (default: 8)")
    parser.add_argument("--longest", type=int, default=64, help="tokens of the longest (default: 64)")
    parser.add_argument("--micro-batch", type=int, default=8, help="completions, over all ranks (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="that count (default: 3; 5 have 60 %% exactly)")
    parser.add_argument("--candidates", help="comma-separated (default: all above)")
    parser.add_argument("--quick", action="store_true", help="the quickstart's model, completions of up to 32")
    add_out(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.longest = "quickstart", 32
    if (
        arguments.micro_batch % arguments.ranks
        or (arguments.prompts * arguments.samples) % arguments.micro_batch
    ):
        parser.error("--micro-batch must be divisible by --ranks, and divide --prompts times --samples")
    return arguments


def main() -> None:
    arguments = parsed()
    overrides = [
        f"train.per_device_train_batch_size={arguments.micro_batch // arguments.ranks}",
        f"train.gradient_accumulation_steps={arguments.prompts * arguments.samples // arguments.micro_batch}",
        f"train.num_generations={arguments.samples}",
        f"sampling.max_completion_length={arguments.longest}",
        "train.max_steps=1000",
        "train.warmup_steps=0",
        "train.lr_scheduler_type=constant",
        # All is computed, and the weights stay: every candidate and round begins with the same.
        "train.learning_rate=1.0e-12",
        "evaluation=null",
    ]
    if arguments.model_path:
        overrides.append(f"model.path={Path(arguments.model_path).absolute()}")
    shape = {key: getattr(arguments, key) for key in ("prompts", "samples", "longest", "rounds")}
    given: dict[str, Any] = {"run": arguments.model, "overrides": [*overrides, *arguments.override], **shape}
    given["candidates"] = arguments.candidates.split(",") if arguments.candidates else []
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // arguments.ranks)))
    ranks = run_ranks("update_rank.py", given, arguments.ranks, os.environ, progress=True)
    check_norms(ranks[0]["grad_norms"])
    result = {
        "benchmark": "update",
        "run": arguments.model,
        "ranks": arguments.ranks,
        "micro_batch": arguments.micro_batch,
        "overrides": arguments.override,
        **shape,
        "tokens_of_rounds": ranks[0]["tokens"],
        "candidates": summary(ranks),
        "goal_to_bare": GOAL,
        **surroundings(LIBRARIES),
    }
    show(result)
    tell(result, arguments.out)


if __name__ == "__main__":
    main()
