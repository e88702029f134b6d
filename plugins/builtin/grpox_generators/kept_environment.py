"""The environment of a training process, kept from what vLLM sets in it for processes of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = ("LOCAL_WORLD_SIZE", "LD_PRELOAD")
"""The number of this machine's ranks, for which vLLM's CPU build sets that of its engine; and libraries for its
workers, which the processes of rewards would load too."""


@contextmanager
def environment_kept() -> Iterator[None]:
    """While an engine is started: these variables are afterwards what they were."""
    before = {name: os.environ.get(name) for name in NAMES}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
