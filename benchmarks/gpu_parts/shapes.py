"""The update at the shapes of Qwen2.5-0.5B and 1.5B with random weights: tokens a second and MFU.

grpox's `PolicyUpdate`, a bare loop on DeepSpeed ZeRO-3, and one in PyTorch alone take the same steps: sequences
of 1024 tokens, three quarters of them completions, each with its own prompt, all of which teach; so nothing can
be left out, and no prompt is shared. In bfloat16, PyTorch alone has no float32 master weights; the other two
have. MFU is operations a second over the data sheet's bf16 peak. Each candidate has a process of its own, which
frees the memory of the one before.
"""

from __future__ import annotations

import gc
import json
from dataclasses import asdict
from typing import Any

import torch
from ranks import run_ranks

from gpu_parts.models import QWEN_05B, QWEN_15B, TINY, Shape, described, peak_of_device
from gpu_parts.part import GIB, Part
from gpu_parts.steps import CANDIDATES, Candidate, config_of, micro_batches, tokens_of
from grpox.runtime.setup import quieten
from grpox.runtime.world import start_world

SIZES: dict[str, Any] = {
    "tokens": (2048, 8192, 16_384, 32_768),
    "prompt": 256,
    "completion": 768,
    "passes": 4,
    "rounds": 3,
    "checkpointing_from": 32_768,
    "dtype": "bfloat16",
}
"""Tokens of a pass, and of a sequence; passes of a step; steps that count; from which size on activations are
recomputed."""
SMALL: dict[str, Any] = SIZES | {
    "tokens": (32, 64),
    "prompt": 4,
    "completion": 12,
    "passes": 2,
    "rounds": 1,
    "checkpointing_from": 64,
    "dtype": "float32",
}
SHAPES = {"0.5B": QWEN_05B, "1.5B": QWEN_15B}
AGREEMENT = {"float32": 1e-3, "bfloat16": 3e-2}
"""Largest relative difference of the candidates' gradient norms, by dtype."""


def measure(part: Part) -> None:
    """Record for each shape and candidate the figures by tokens of a pass, and the ratios to grpox."""
    for name, shape in ({"tiny": TINY} if part.small else SHAPES).items():
        part.record(name, described(shape))
        for candidate in CANDIDATES:
            given = {"shape": asdict(shape), "candidate": candidate, "sizes": SMALL if part.small else SIZES}
            part.attempt(f"{name}, {candidate}", lambda g=given: in_own_process(part, g))
        compare(part, name)


def in_own_process(part: Part, given: dict[str, Any]) -> dict[str, Any]:
    """Measure a candidate in a process of its own; the small form stays in this one, which is faster."""
    if part.small:
        return figures_of(json.loads(json.dumps(given)))
    import os

    try:
        return run_ranks("gpu_shape.py", given, 1, os.environ)[0]
    except SystemExit as error:
        raise RuntimeError(str(error)) from error


def compare(part: Part, name: str) -> None:
    """Check that the candidates have one gradient, and record how many times as fast grpox is."""
    ours = part.figures[f"{name}, grpox"].get("by_tokens", {})
    for other in CANDIDATES[1:]:
        theirs = part.figures[f"{name}, {other}"].get("by_tokens", {})
        ratios = {}
        for tokens in ours.keys() & theirs.keys():
            if "grad_norm" not in ours[tokens] or "grad_norm" not in theirs[tokens]:
                continue
            one, two = ours[tokens]["grad_norm"], theirs[tokens]["grad_norm"]
            tolerance = AGREEMENT[(SMALL if part.small else SIZES)["dtype"]]
            part.check(f"{name}, {tokens} tokens: norm against {other}", abs(one / two - 1), tolerance)
            ratios[tokens] = ours[tokens]["tokens_per_second"] / theirs[tokens]["tokens_per_second"]
        part.record(f"{name}, speed of grpox to {other}", ratios)


def figures_of(given: dict[str, Any]) -> dict[str, Any]:
    """Measure one candidate at all numbers of tokens; a size that does not fit is named and ends the list."""
    quieten()
    world, shape, sizes = start_world(), Shape(**given["shape"]), given["sizes"]
    length = sizes["prompt"] + sizes["completion"]
    first = config_of(sizes["tokens"][0] // length, sizes["completion"], sizes["tokens"][0], sizes["dtype"])
    candidate = Candidate(given["candidate"], shape, first, world)
    found: dict[str, Any] = {"mode": candidate.mode, "by_tokens": {}}
    recomputes = False
    for tokens in sizes["tokens"]:
        if tokens >= sizes["checkpointing_from"] and not recomputes:
            candidate.checkpoint_activations()
            recomputes = True
        try:
            point = measure_tokens(candidate, shape, sizes, tokens)
        except torch.OutOfMemoryError as error:
            found["by_tokens"][str(tokens)] = {"out_of_memory": str(error).splitlines()[0]}
            break
        found["by_tokens"][str(tokens)] = point | {"recomputes_activations": recomputes}
    if candidate.name == "grpox":
        candidate.engine.close()
    gc.collect()
    return found


def measure_tokens(candidate: Candidate, shape: Shape, sizes: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Time steps whose passes have so many tokens."""
    length = sizes["prompt"] + sizes["completion"]
    rows, device = tokens // length, candidate.world.device
    step = candidate.step_of(config_of(rows, sizes["completion"], tokens, sizes["dtype"]))
    batches = micro_batches(
        sizes["passes"], rows, sizes["prompt"], sizes["completion"], shape.vocabulary, device
    )
    timer = Part(device, False, None, None)  # type: ignore[arg-type] # only its clock is used
    norms: list[float] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = timer.seconds(lambda: norms.append(step(batches)), sizes["rounds"], 1)
    every = rows * length * sizes["passes"]
    operations = shape.operations(every, tokens_of(batches), length)
    peak = peak_of_device(device)
    return {
        "seconds": seconds,
        "tokens_per_second": every / seconds,
        "tflop_per_second": operations / seconds * 1e-12,
        "mfu": None if peak is None else operations / seconds * 1e-12 / peak,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None,
        "grad_norm": norms[-1],
    }
