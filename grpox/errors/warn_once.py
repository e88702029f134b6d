"""Warnings on standard error, each told once in a run."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from grpox.errors.redaction import redact


class TellOnce:
    """Tells warnings by a key; those of a key that was told before are dropped.

    Args:
        console: where to tell them; default: standard error.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._told: set[str] = set()

    def __call__(self, key: str, warning: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._console.print(
                redact(f"warning: {warning}"), style="yellow", markup=False, highlight=False, soft_wrap=True
            )

    def all(self, warnings: Mapping[str, str]) -> None:
        """Tell each of `warnings`, by key."""
        for key, warning in warnings.items():
            self(key, warning)
