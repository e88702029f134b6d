"""Numbers and lists as people read them: ``1 step``, ``2 steps``, ``3 min 05 s``, ``a, b, c, ...``."""

from __future__ import annotations

from collections.abc import Iterable

MOST_NAMES = 3
"""Names that a message lists at most."""


def some(names: Iterable[str]) -> str:
    """List the first `MOST_NAMES` of the sorted `names`, with dots for more."""
    ordered = sorted(names)
    return ", ".join(ordered[:MOST_NAMES]) + (", ..." if len(ordered) > MOST_NAMES else "")


def with_article(noun: str) -> str:
    """Return ``a loss``, ``an environment``."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def pluralize(number: int, noun: str) -> str:
    """Join `number` and `noun`, in the plural unless the number is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Write seconds; from a minute on, minutes and seconds; from an hour on, hours and minutes."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes: ``512 B``, ``3.1 MiB``."""
    unit, *larger = ("B", "KiB", "MiB", "GiB", "TiB")
    while larger and num_bytes >= 1024:
        num_bytes, unit, *larger = num_bytes / 1024, *larger
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the indices 0 to count-1, evenly spaced, including first and last.

    A single one is the middle.
    """
    if most == 1 < count:
        return [count // 2]
    picked = min(count, most)
    return [round(place * (count - 1) / max(picked - 1, 1)) for place in range(picked)]
