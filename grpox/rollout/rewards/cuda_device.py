"""CUDA's current device belongs to a thread: a new one would begin with that of rank 0."""

from __future__ import annotations

import sys


def current_device() -> int | None:
    """The index of this thread's device; None without CUDA, or where nothing has imported torch."""
    torch = sys.modules.get("torch")  # where nobody has imported it, nobody has chosen a device
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else None


def use_device(index: int | None) -> None:
    """Make what `current_device` told in another thread the device of this one."""
    if index is not None:
        sys.modules["torch"].cuda.set_device(index)
