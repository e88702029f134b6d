"""The random numbers of every library of a process: saved, and put back.

Of several visible GPUs only the rank's own has its state saved: the state of another would allocate memory
there, and a resumed rank may see fewer GPUs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the state of Python's, numpy's and torch's generators, in plain values and tensors."""
    version, numbers, gauss = random.getstate()
    name, keys, place, has, cached = np.random.get_state(legacy=True)
    of_numpy = torch.from_numpy(np.asarray(keys, dtype=np.int64)), int(place), int(has), float(cached)
    return {
        "python": (version, list(numbers), gauss),
        "numpy": (str(name), *of_numpy),
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in _own_gpu()],
    }


def fresh_random_state(*seeds: int) -> dict[str, Any]:
    """Return the state of a newly seeded process, for a rank that joins a run at some step."""
    first, second, third = np.random.SeedSequence(seeds).generate_state(3)
    with preserve_random_state():
        random.seed(int(first))
        np.random.seed(int(second))
        torch.manual_seed(int(third))
        return random_state()


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a result of `random_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    for device in _own_gpu() if state["cuda"] else ():
        # An earlier grpox saved the states of all visible GPUs.
        place = device if device < len(state["cuda"]) else 0
        torch.cuda.set_rng_state(state["cuda"][place], device)


def _own_gpu() -> list[int]:
    """List the GPU of this process; empty without one."""
    return [torch.cuda.current_device()] if torch.cuda.is_available() else []


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the state of all generators after the block."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=_own_gpu()):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
