"""A number with its noun: ``1 step``, ``2 steps``."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`number` and `noun`, with an s where there is not exactly one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
