"""The update at the shape of Qwen2.5-1.5B with random weights: tokens a second and MFU.

grpox's `PolicyUpdate`, a bare loop on DeepSpeed ZeRO-3, and one in PyTorch alone take the same steps: sequences
of 1024 tokens, three quarters of them completions, each with its own prompt, all of which teach; so nothing can
be left out, and no prompt is shared. In bfloat16, PyTorch alone has no float32 master weights; the other two
have. MFU is operations a second over the data sheet's bf16 peak; recomputed operations do not count. Each
candidate has a process of its own, which frees the memory of the one before.
"""

from __future__ import annotations

import gc
import os
from dataclasses import asdict
from typing import Any

import torch
from ranks import run_ranks

from gpu_parts.models import QWEN_15B, TINY, Shape, described, peak_of_device
from gpu_parts.part import GIB, Part
from gpu_parts.steps import CANDIDATES, Candidate, config_of, micro_batches, tokens_of
from grpox.runtime.setup import quieten
from grpox.runtime.world import start_world

SIZES: dict[str, Any] = {
    "tokens": (8192, 16_384),
    "prompt": 256,
    "completion": 768,
    "passes": 4,
    "rounds": 3,
    "checkpointing_from": 32_768,
    "dtype": "bfloat16",
}
"""Tokens of a pass, and of a sequence; most passes of a step; steps that count; from which size on activations
are recomputed in any case."""
STEP_TOKENS, LEAST_PASSES = 32_768, 2
"""Large passes are fewer: a step of them takes seconds."""
USABLE = 0.85
"""Part of a GPU's memory that the estimate may fill before activations are recomputed."""
SMALL: dict[str, Any] = SIZES | {
    "tokens": (32, 64),
    "prompt": 4,
    "completion": 12,
    "passes": 2,
    "rounds": 1,
    "checkpointing_from": 64,
    "dtype": "float32",
}
SHAPES = {"1.5B": QWEN_15B}
AGREEMENT = {"float32": 1e-3, "bfloat16": 3e-2}
"""Largest relative difference of the candidates' gradient norms, by dtype."""


def measure(part: Part) -> None:
    """Record for each shape and candidate the figures by tokens of a pass, and the ratios to grpox."""
    for name, shape in ({"tiny": TINY} if part.small else SHAPES).items():
        part.record(name, described(shape))
        for candidate in CANDIDATES:
            given = {"shape": asdict(shape), "candidate": candidate, "sizes": SMALL if part.small else SIZES}
            given["name"] = f"{name}, {candidate}"
            part.attempt(given["name"], lambda g=given: in_own_process(part, g))
        compare(part, name)


def in_own_process(part: Part, given: dict[str, Any]) -> dict[str, Any]:
    """Measure a candidate in a process of its own; the small form stays in this one, which is faster."""
    if part.small:
        return figures_of(part, given)
    given |= {"part": {"folder": str(part.folder), "out": str(part.out)}}
    given["part"] |= {"figures": part.figures, "failures": part.failures}
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


def figures_of(part: Part, given: dict[str, Any]) -> dict[str, Any]:
    """Measure one candidate at all numbers of tokens; a size that does not fit is named and ends the list.

    The figures are recorded after each size, because a large one may exceed the part's time.
    """
    quieten()
    world, shape, sizes = start_world(), Shape(**given["shape"]), given["sizes"]
    length = sizes["prompt"] + sizes["completion"]
    first = config_of(sizes["tokens"][0] // length, sizes["completion"], sizes["tokens"][0], sizes["dtype"])
    candidate = Candidate(given["candidate"], shape, first, world)
    found: dict[str, Any] = {"mode": candidate.mode, "by_tokens": {}}
    recomputes, memory = False, memory_of(world.device)
    for tokens in sizes["tokens"]:
        if not recomputes and needs_recomputation(shape, tokens, sizes["checkpointing_from"], memory):
            candidate.checkpoint_activations()
            recomputes = True
        try:
            point = measure_tokens(part, candidate, shape, sizes, tokens)
        except torch.OutOfMemoryError as error:
            found["by_tokens"][str(tokens)] = {"out_of_memory": str(error).splitlines()[0]}
            break
        found["by_tokens"][str(tokens)] = point | {"recomputes_activations": recomputes}
        part.record(given["name"], found)
    if candidate.name == "grpox":
        candidate.engine.close()
    gc.collect()
    return found


def memory_of(device: torch.device) -> float:
    """Return the bytes of a GPU; infinite on a CPU, where the small form decides by tokens alone."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else float("inf")


def needs_recomputation(shape: Shape, tokens: int, always_from: int, memory: float) -> bool:
    """Decide by an estimate, because a pass without it is faster, and one that does not fit gives no figure."""
    return tokens >= always_from or shape.state_bytes + shape.activation_bytes(tokens) > USABLE * memory


def measure_tokens(
    part: Part, candidate: Candidate, shape: Shape, sizes: dict[str, Any], tokens: int
) -> dict[str, Any]:
    """Time steps whose passes have so many tokens."""
    length = sizes["prompt"] + sizes["completion"]
    rows, device = tokens // length, candidate.world.device
    step = candidate.step_of(config_of(rows, sizes["completion"], tokens, sizes["dtype"]))
    passes = min(sizes["passes"], max(LEAST_PASSES, STEP_TOKENS // tokens))
    batches = micro_batches(passes, rows, sizes["prompt"], sizes["completion"], shape.vocabulary, device)
    norms: list[float] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = part.seconds(lambda: norms.append(step(batches)), sizes["rounds"], 1)
    every = rows * length * passes
    operations = shape.operations(every, tokens_of(batches), length)
    peak = peak_of_device(device)
    return {
        "passes": passes,
        "seconds": seconds,
        "tokens_per_second": every / seconds,
        "tflop_per_second": operations / seconds * 1e-12,
        "mfu": None if peak is None else operations / seconds * 1e-12 / peak,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None,
        "grad_norm": norms[-1],
    }
