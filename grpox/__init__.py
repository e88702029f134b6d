"""grpox: GRPO post-training in which every algorithmic part is a plugin, on DeepSpeed ZeRO-3."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpox.config import RunConfig
    from grpox.plugins.hookspecs import CommandSpec, ComponentSpec, hookimpl
    from grpox.plugins.registry import build
    from grpox.training.python_run import Run, train

__version__ = "0.1.0"
__all__ = ["CommandSpec", "ComponentSpec", "Run", "RunConfig", "build", "hookimpl", "train"]

_LAZY = {
    "CommandSpec": "grpox.plugins.hookspecs",
    "ComponentSpec": "grpox.plugins.hookspecs",
    "Run": "grpox.training.python_run",
    "RunConfig": "grpox.config",
    "build": "grpox.plugins.registry",
    "hookimpl": "grpox.plugins.hookspecs",
    "train": "grpox.training.python_run",
}

# How often an idle OpenMP thread of libgomp looks for work before it sleeps: for some tenths of a millisecond.
# libgomp reads the variable when torch loads it. By default it looks 300000 times: where another program needs
# the processors, that keeps them from the very threads that are waited for.
if "torch" not in sys.modules:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def __getattr__(name: str) -> Any:
    """Import a name on its first use.

    Plugins import grpox, and listing them must stay fast; and until the command line's own code runs, Ctrl-C
    is a traceback.
    """
    if name not in _LAZY:
        raise AttributeError(f"module 'grpox' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
