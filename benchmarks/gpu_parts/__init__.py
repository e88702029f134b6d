"""The parts of gpu.py: one module for each, whose `measure` is called in a process of its own.

A module imports at its top only what the core of grpox itself needs; a library that a GPU machine may lack is
imported in the function that needs it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple


class Plan(NamedTuple):
    """Time and needs of a part."""

    seconds: int
    """Estimate for an H100; a part is ended after twice as many."""
    gpus: int = 0
    package: str = ""


PARTS = {
    "probe": Plan(20),
    "head": Plan(30),
    "parity": Plan(40),
    "train": Plan(60),
    "syncs": Plan(45),
    "shapes": Plan(80),
    "quickstart": Plan(90),
    "generator": Plan(50),
    "ceilings": Plan(15),
    "memory": Plan(100),
    "attention": Plan(80),
    "trl": Plan(180, package="trl"),
    "multi_gpu": Plan(200, gpus=2),
    "vllm": Plan(150, gpus=1, package="vllm"),
    "nccl_transfer": Plan(200, gpus=2, package="vllm"),
}
"""Parts in their order: the most needed first, because a budget ends the list anywhere."""


def lacking(plan: Plan, gpus: int) -> str:
    """Say what a part needs that is absent here; empty if nothing is. NCCL refuses two ranks on one GPU."""
    if gpus < plan.gpus:
        return f"needs {plan.gpus} CUDA devices, and {gpus} are here"
    if plan.package and find_spec(plan.package) is None:
        return f"needs the package {plan.package}, which is not installed"
    return ""
