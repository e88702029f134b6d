"""Time and memory to send the policy's weights to the generator, compared with a plain clone of all of them.

    python benchmarks/weight_sync.py --model-path FOLDER [--model smollm2] [--generators colocate,server]
                                     [--ranks 1] [--rounds 9] [--bucket-mib 64] [--out FILE.json]

In each round, warm and in turns: `clone()` of every tensor; the stream out of ZeRO-3 alone ("gather"); the
generator given plain tensors ("take"); a whole sync. Ratios are medians over those of the rounds. Memory is
watched in further syncs, which are not timed. The last line is a JSON object with every figure.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from outcome import add_out, tell
from ranks import run_ranks
from rich.console import Console
from rich.table import Table
from serving import serving
from surroundings import surroundings

from grpox.runfile.load import load_run

LIBRARIES = ("grpox", "torch", "transformers", "deepspeed")
MIB = 2**20
GOALS = {"colocate": 3.0, "server": 4.0}
"""Times a plain clone that a sync may take."""


def measure(generator: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of one generator: those of the slowest rank, which all wait for."""
    overrides = list(arguments.override)
    if arguments.model_path:
        overrides.append(f"model.path={Path(arguments.model_path).absolute()}")
    given = {
        "run": arguments.model,
        "rounds": arguments.rounds,
        "pid": None,
    }
    environment = dict(os.environ)
    with ExitStack() as stack:
        if generator == "server":
            model = load_run(arguments.model, overrides).config.model
            variables = {} if arguments.server_gpu is None else only_gpu(arguments.server_gpu, os.environ)
            served = stack.enter_context(serving(model.path, model.dtype, variables=variables))
            environment |= served.environment
            given["pid"] = served.pid
            component = f"{{name: vllm-server, urls: ['{served.url}'], bucket_mib: {arguments.bucket_mib}}}"
        else:
            component = "vllm-colocate"
        given["overrides"] = [*overrides, f"generator={component}"]
        ranks = run_ranks("weight_sync_rank.py", given, arguments.ranks, environment)
    return summary(max(ranks, key=lambda rank: statistics.median(rank["sync"])), ranks)


def only_gpu(index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Name the environment variable by which a process sees one of the GPUs that this one sees."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": str(index) if visible is None else visible.split(",")[index].strip()}


def summary(slowest: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of seconds, ratios to the clone of the same round, and the most memory of any rank."""
    ways = ("clone", "gather", "take", "sync")
    ratios = {
        way: [taken / clone for taken, clone in zip(slowest[way], slowest["clone"], strict=True)]
        for way in ways
    }
    result: dict[str, Any] = {"model_mib": slowest["model_bytes"] / MIB}
    result |= {f"{way}_seconds": statistics.median(slowest[way]) for way in ways}
    result |= {f"{way}_to_clone": statistics.median(ratios[way]) for way in ways[1:]}
    result["sync_to_clone_of_rounds"] = ratios["sync"]
    places = [place for place in ("trainer", "shared", "server") if f"{place}_bytes" in slowest]
    result |= {f"{place}_mib": max(rank[f"{place}_bytes"] for rank in ranks) / MIB for place in places}
    return result


def show(result: dict[str, Any]) -> None:
    table = Table("", *result["generators"], title=f"{result['run']}, ranks: {result['ranks']}")
    words = {
        "model_mib": "model, MiB",
        "clone_seconds": "clone, s",
        "gather_seconds": "gather alone, s",
        "take_seconds": "take alone, s",
        "sync_seconds": "sync, s",
        "gather_to_clone": "gather / clone",
        "take_to_clone": "take / clone",
        "sync_to_clone": "sync / clone",
        "trainer_mib": "peak in a rank, MiB",
        "shared_mib": "peak in /dev/shm, MiB",
        "server_mib": "peak in the server, MiB",
    }
    for key, label in words.items():
        cells = [figures.get(key) for figures in result["generators"].values()]
        digits = 0 if key.endswith("mib") else 2
        table.add_row(label, *("" if cell is None else f"{cell:.{digits}f}" for cell in cells))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("override", nargs="*", help="a.b=c, of the run file")
    parser.add_argument("--model", default="smollm2", help="a recipe or run file (default: smollm2)")
    parser.add_argument("--model-path", help="model folder in place of the run file's")
    parser.add_argument("--generators", default="colocate,server", help="which (default: colocate,server)")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the trainer (default: 1)")
    parser.add_argument("--server-gpu", type=int, help="of the visible GPUs, which a rank may not have as well")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count (default: 9)")
    parser.add_argument("--bucket-mib", type=int, default=64, help="of the server generator (default: 64)")
    add_out(parser)
    arguments = parser.parse_args()
    generators = arguments.generators.split(",")
    if unknown := set(generators) - set(GOALS):
        parser.error(f"--generators: no such generator {', '.join(unknown)}; there are {', '.join(GOALS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = {
        "benchmark": "weight_sync",
        "run": arguments.model,
        "ranks": arguments.ranks,
        "rounds": arguments.rounds,
        "bucket_mib": arguments.bucket_mib,
        "generators": {generator: measure(generator, arguments) for generator in generators},
        "goals_sync_to_clone": GOALS,
        **surroundings(LIBRARIES),
    }
    show(result)
    tell(result, arguments.out)


if __name__ == "__main__":
    main()
