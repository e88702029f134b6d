"""Tokens a second of the generators beside those of vLLM by itself, on the same prompts in one run.

    python benchmarks/generation.py [--model quickstart] [--model-path FOLDER] [--prompts 256] [--samples 16]
                                    [--tokens 8] [--repeats 5] [--candidates bare,colocate] [--out FILE.json]

Every candidate is a process of its own, warm, and they sample in turns, in another order each time.

    hf, colocate, server   grpox's generators; not the sync of weights, which is before and not timed
    bare                   vllm.LLM(...).generate, asked for what a generator asks: seeds and log-probabilities
    bare-in-process        the same, its engine in the calling process as that of colocate
    plain                  vllm.LLM(...).generate, asked for n, temperature and length alone

Ratios are medians over those to `bare` in the same repeat: of tokens a second, and of tokens a CPU second,
which other work on the machine changes less. The last line is a JSON object with every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from outcome import add_out, tell
from rich.console import Console
from rich.table import Table
from serving import serving
from surroundings import surroundings

from grpox.runfile.load import load_run

LIBRARIES = ("grpox", "torch", "transformers", "deepspeed")
CANDIDATES = ("bare", "bare-in-process", "plain", "colocate", "server", "hf")
ENGINE = {"max_num_seqs": 256, "max_num_batched_tokens": 4096}
"""Told to all: the defaults of vLLM's server are not those of its class LLM."""
CACHE_GIB = 0.5
AS_COLOCATE = {
    "kv_cache_memory_bytes": int(CACHE_GIB * 2**30),
    "enable_prefix_caching": True,
    "generation_config": "vllm",
    "logprobs_mode": "processed_logprobs",
}
"""Settings that colocate passes to its engine, for vLLM without grpox."""
GOAL = 0.9
"""Goal for colocate and server, as a share of the tokens per second of `bare`."""


@contextmanager
def candidate(name: str, arguments: argparse.Namespace, overrides: list[str]) -> Iterator[Connection]:
    """A process that samples for each seed it is sent, once it has sampled for the first time."""
    given: dict[str, Any] = {"run": arguments.model, "overrides": list(overrides)}
    given |= {"prompts": arguments.prompts, "samples": arguments.samples, "bare": False, "servers": []}
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if name == "server":
            model = load_run(arguments.model, overrides).config.model
            options = ["--kv-cache-gib", str(CACHE_GIB), "--"]
            options += [word for key, n in ENGINE.items() for word in (f"--{key.replace('_', '-')}", str(n))]
            served = stack.enter_context(serving(model.path, model.dtype, options))
            environment |= served.environment
            given["servers"] = [served.pid]
            given["overrides"].append(f"generator={{name: vllm-server, urls: ['{served.url}']}}")
        elif name == "colocate":
            own = f"kv_cache_gib: {CACHE_GIB}, engine: {json.dumps(ENGINE)}"
            given["overrides"].append(f"generator={{name: vllm-colocate, {own}}}")
        elif name == "hf":
            given["overrides"].append("generator=hf")
        else:
            given |= {"bare": True, "plain": name == "plain"}
            given["engine"] = ENGINE | AS_COLOCATE
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if name == "bare-in-process" else "1"
        yield stack.enter_context(process(given, folder, environment))


@contextmanager
def process(given: dict[str, Any], folder: Path, environment: dict[str, str]) -> Iterator[Connection]:
    (folder / "arguments.json").write_text(json.dumps(given))
    script, log = Path(__file__).with_name("generation_candidate.py"), folder / "log"
    connection, theirs = Pipe()
    command = [sys.executable, str(script), str(theirs.fileno()), str(folder / "arguments.json")]
    with connection, theirs, log.open("w") as output:
        streams: dict[str, Any] = {"stdout": output, "stderr": output, "pass_fds": [theirs.fileno()]}
        child = subprocess.Popen(command, env=environment, **streams)
        theirs.close()
        try:
            connection.recv()
            yield connection
            connection.send(None)
        except (EOFError, OSError):
            if child.poll() in (None, 0):  # it was another
                raise
            told = f"a candidate ended with {child.returncode}:\n{log.read_text()[-3000:]}"
            raise SystemExit(told) from None
        finally:
            connection.close()
            child.wait(60)


def measure(names: list[str], arguments: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Seconds and tokens of each candidate, repeat by repeat."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with ExitStack() as stack:
        connections = {name: stack.enter_context(candidate(name, arguments, overrides)) for name in names}
        for repeat in range(arguments.repeats):
            first = repeat % len(names)
            for name in names[first:] + names[:first]:
                connections[name].send(repeat + 1)
                taken[name].append(connections[name].recv())
    return {name: figures(taken[name], taken["bare"]) for name in names}


def figures(own: list[dict[str, float]], bare: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the repeats, and each of them."""
    result: dict[str, Any] = {}
    for clock, name in (("seconds", "to_bare"), ("cpu_seconds", "to_bare_by_cpu_time")):
        speeds, theirs = ([one["tokens"] / one[clock] for one in side] for side in (own, bare))
        ratios = [speed / other for speed, other in zip(speeds, theirs, strict=True)]
        result |= {f"tokens_per_{clock.removesuffix('s')}": statistics.median(speeds)}
        result |= {name: statistics.median(ratios), f"{name}_of_repeats": ratios}
    return result | {"repeats": own}


def show(result: dict[str, Any]) -> None:
    title = f"{result['run']}: {result['prompts']} x {result['samples']} of up to {result['tokens']} tokens"
    table = Table("candidate", "tokens/s", "to bare", "least", "most", "to bare, CPU time", title=title)
    for name, own in result["candidates"].items():
        ratios = own["to_bare_of_repeats"]
        cells = (own["to_bare"], min(ratios), max(ratios), own["to_bare_by_cpu_time"])
        table.add_row(name, f"{own['tokens_per_second']:,.0f}", *(f"{cell:.2f}" for cell in cells))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="quickstart", help="a recipe or run file (default: quickstart)")
    parser.add_argument("--model-path", help="model folder in place of the run file's")
    parser.add_argument("--prompts", type=int, default=256, help="(default: 256)")
    parser.add_argument("--samples", type=int, default=16, help="of each prompt (default: 16)")
    parser.add_argument("--tokens", type=int, default=8, help="at most, of each sample (default: 8)")
    parser.add_argument("--repeats", type=int, default=5, help="of all candidates (default: 5)")
    parser.add_argument("--candidates", default=",".join(CANDIDATES), help="(default: %(default)s)")
    add_out(parser)
    arguments = parser.parse_args()
    names = list(dict.fromkeys(["bare", *arguments.candidates.split(",")]))
    if unknown := set(names) - set(CANDIDATES):
        parser.error(f"--candidates: unknown {', '.join(unknown)}; there are {', '.join(CANDIDATES)}")
    overrides = [f"sampling.max_completion_length={arguments.tokens}"]
    if arguments.model_path:
        overrides.append(f"model.path={Path(arguments.model_path).absolute()}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = {
        "benchmark": "generation",
        "run": arguments.model,
        **{key: getattr(arguments, key) for key in ("prompts", "samples", "tokens", "repeats")},
        "candidates": measure(names, arguments, overrides),
        "goal_to_bare": GOAL,
        **surroundings(LIBRARIES),
    }
    show(result)
    tell(result, arguments.out)


if __name__ == "__main__":
    main()
