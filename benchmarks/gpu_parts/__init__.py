"""The parts of gpu.py: one module for each, whose `measure` is called in a process of its own.

A module imports at its top only what the core of grpox itself needs; a library that a GPU machine may lack is
imported in the function that needs it.
"""

from __future__ import annotations

LIMITS = {
    "ceilings": 180,
    "head": 300,
    "attention": 420,
    "parity": 300,
    "syncs": 240,
    "quickstart": 480,
    "generator": 300,
    "memory": 300,
    "shapes": 900,
    "trl": 900,
    "multi_gpu": 420,
    "vllm": 600,
    "nccl_transfer": 600,
}
"""Parts in their order -> seconds after which a part is ended. The short ones come first."""
