"""grpox on this machine's GPU: is it right, how fast is it, and how close to what the device can do.

    python benchmarks/gpu.py --out gpu.json                    all parts
    python benchmarks/gpu.py --parts head,parity --out gpu.json
    python benchmarks/gpu.py --device cpu --small              all parts in a minute: do they work

    probe           the calls of libraries that the other parts need, one by one; cuDNN's attention on and off
    head            log-probabilities from hidden states, by rows per chunk; value and gradient against float32
    parity          the gradient of each built-in loss in each forward mode against float64 on the CPU
    train           a run of the 1.5B shape with default settings, 128 completions a step: memory by phase
    syncs           lines at which the host waits for the device during a step
    shapes          the update at the shape of Qwen2.5-1.5B, beside bare DeepSpeed and bare PyTorch
    quickstart      the quickstart learns; a resumed run continues as the whole one
    generator       the hf generator: do its log-probabilities agree with the trainer's; tokens a second
    ceilings        bytes copied and bf16 operations a second: what the other figures are compared with
    memory          peak memory of each phase of a run, compared with `grpox plan --memory`
    attention       varlen, flex and sdpa on packed sequences and behind a common prompt: output, gradient, time
    trl             the same run through grpox and TRL
    multi_gpu       the update on several ranks
    vllm            the generator vllm-colocate, as in `generator`
    nccl_transfer   weights to a vLLM server over NCCL

Each part runs in a process of its own, with a time limit. The file of --out is written whenever a part ends:
{"environment": ..., "parts": {name: {"status": "ok", "failed" or "skipped", "reason": ..., figures}}}. A part
fails where it raises or a figure is out of its tolerance, and is skipped where the machine lacks something.
--budget SECONDS skips parts for which too little time is left, and ends the one that runs when all is used;
the figures of a part that is ended stay. Exits with 1 if a part failed. No part needs a network.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_environment import environment_of
from gpu_parts import PARTS, lacking

PATIENCE = 10.0
"""Seconds between asking a part's processes to end and killing them."""
TAIL = 1500
"""Characters of a part's output that are the reason if it ended without a word."""


def part_within(name: str, arguments: argparse.Namespace, gpus: int, left: float) -> dict[str, Any]:
    """Run a part, if the machine and the `left` seconds of the budget suffice; returns verdict and figures."""
    plan, budget = PARTS[name], f"of the budget of {arguments.budget or 0:g} s"
    limit = arguments.limit or 2 * plan.seconds
    if reason := lacking(plan, gpus):
        return {"status": "skipped", "reason": reason, "seconds": 0.0}
    if left < plan.seconds / 2:
        reason = f"takes about {plan.seconds} s, and {max(left, 0):.0f} s are left {budget}"
        return {"status": "skipped", "reason": reason, "seconds": 0.0}
    if limit <= left:
        return run_part(name, arguments, limit, ("failed", f"took more than {limit:g} s"))
    return run_part(name, arguments, left, ("skipped", f"took more than the {left:.0f} s left {budget}"))


def run_part(name: str, arguments: argparse.Namespace, limit: float, late: tuple[str, str]) -> dict[str, Any]:
    """Run one part in a process of its own; returns its verdict and figures.

    Args:
        limit: seconds after which it is ended.
        late: status and reason if it is ended; it fails in any case if one of its figures did.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        out, log = Path(folder) / "figures.json", Path(folder) / "log"
        given = {"name": name, "device": arguments.device, "small": arguments.small, "folder": folder}
        told = Path(folder) / "arguments.json"
        told.write_text(json.dumps(given | {"out": str(out)}))
        start = time.perf_counter()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("gpu_part.py")), str(told)],
                env=variables(arguments.device),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            ended = wait_or_end(process, limit)
        part: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"status": "running"}
        if part["status"] == "running":
            status, reason = late
            if ended:
                said = log.read_text(errors="replace")[-TAIL:].strip()
                status, reason = "failed", f"ended with code {process.returncode}: {said}"
            if failures := part.get("reason"):
                status, reason = "failed", f"{failures}; {reason}"
            part |= {"status": status, "reason": reason}
        return part | {"seconds": round(time.perf_counter() - start, 1)}


def wait_or_end(process: subprocess.Popen[bytes], limit: float) -> bool:
    """Wait for a process, whose session is ended after `limit` seconds; True if it ended by itself."""
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        end_session(process, signal.SIGTERM)
        return False
    except BaseException:
        end_session(process, signal.SIGTERM)
        raise
    end_session(process, signal.SIGKILL)  # what it may have left behind holds memory of the device
    return True


def end_session(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to all processes of a session, and kill those that remain."""
    for each, wait in ((number, PATIENCE), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, each)
            process.wait(wait)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def variables(device: str) -> dict[str, str]:
    """Environment variables of a part's process."""
    own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        own["CUDA_VISIBLE_DEVICES"] = ""
    threads = 1 if device == "cpu" else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(threads)} | os.environ | own


def named_parts(text: str | None, parser: argparse.ArgumentParser) -> list[str]:
    """Read --parts: names in the order of the table; an unknown one is an error."""
    if text is None:
        return list(PARTS)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PARTS:
            near = difflib.get_close_matches(name, PARTS, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            parser.error(f"--parts: there is no part {name!r}{meant} Known: {', '.join(PARTS)}")
    if not names:
        parser.error(f"--parts: names none. Known: {', '.join(PARTS)}")
    return [name for name in PARTS if name in names]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", help="comma-separated (default: all)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="(default: cuda)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, whose figures say nothing")
    parser.add_argument("--limit", type=float, help="seconds for each part, in place of its own limit")
    parser.add_argument("--budget", type=float, help="seconds for all parts together (default: no limit)")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="(default: %(default)s)")
    arguments = parser.parse_args()
    arguments.parts = named_parts(arguments.parts, parser)
    if arguments.device == "cpu" and not arguments.small:
        parser.error("--device cpu: needs --small, because the sizes are those of a GPU")
    return arguments


def main() -> None:
    start, arguments = time.monotonic(), parsed()
    result: dict[str, Any] = {"environment": environment_of(arguments.device), "parts": {}}
    if arguments.device == "cuda" and not result["environment"]["gpus"]:
        sys.exit("torch finds no CUDA device here; --device cpu --small runs the parts on the CPU")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write(arguments.out, result)
    gpus = len(result["environment"]["gpus"]) if arguments.device == "cuda" else 0
    end = start + (arguments.budget or float("inf"))
    for name in arguments.parts:
        print(f"{name:14} ...", file=sys.stderr, flush=True)
        result["parts"][name] = part = part_within(name, arguments, gpus, end - time.monotonic())
        write(arguments.out, result)
        reason = " ".join(part["reason"].split())[:300]
        print(f"{name:14} {part['status']:8} {part['seconds']:6.1f} s  {reason}", file=sys.stderr, flush=True)
    print(json.dumps(result))
    sys.exit(any(part["status"] == "failed" for part in result["parts"].values()))


def write(path: Path, result: dict[str, Any]) -> None:
    """Replace the file of --out at once."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    os.replace(new, path)


if __name__ == "__main__":
    main()
