"""The names of `grpox.runtime.workers` that plugins may use."""

from grpox.runtime.workers import (
    Child,
    ChildCut,
    ChildEnded,
    ChildFailed,
    ChildLate,
    Restarted,
    connect_to_parent,
)

__all__ = ["Child", "ChildCut", "ChildEnded", "ChildFailed", "ChildLate", "Restarted", "connect_to_parent"]
