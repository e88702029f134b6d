"""Curves of several runs a kind: the mean over seeds, and their spread as a band."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SMOOTH = 5
"""Batches whose mean is a point."""
COLUMNS = 4
Curves = Sequence[Sequence[float]]


def draw(curves: Mapping[str, Curves], path: Path) -> None:
    """Draw all kinds in one panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 3.2), layout="constrained")
    axis = figure.subplots()
    for number, (name, of_seeds) in enumerate(curves.items()):
        _band(axis, [_smoothed(curve) for curve in of_seeds], f"C{number}", name)
    axis.set_ylim(0, 1)
    axis.legend(frameon=False, loc="lower right")
    figure.supxlabel("generation batch", fontsize=9)
    figure.supylabel("accuracy of what is sampled", fontsize=9)
    figure.savefig(path)


def draw_differences(curves: Mapping[str, Curves], base: str, path: Path) -> None:
    """Draw each kind but `base` in a panel of its own: its curves less those of `base` with the same seeds."""
    from matplotlib.figure import Figure

    others = {name: of_seeds for name, of_seeds in curves.items() if name != base}
    lines = -(-len(others) // COLUMNS)
    figure = Figure(figsize=(2.3 * COLUMNS, 1.9 * lines), layout="constrained")
    axes = figure.subplots(lines, COLUMNS, sharex=True, sharey=True, squeeze=False).flatten()
    for axis, (name, of_seeds) in zip(axes, others.items(), strict=False):
        pairs = zip(of_seeds, curves[base], strict=True)
        less = [[one - other for one, other in zip(*map(_smoothed, pair), strict=True)] for pair in pairs]
        axis.axhline(0, color="0.5", linewidth=0.8)
        _band(axis, less, "C0", name)
        axis.set_title(name, fontsize=9)
    for axis in axes[len(others) :]:
        axis.set_visible(False)
    figure.supxlabel("generation batch", fontsize=9)
    figure.supylabel(f"accuracy less that of {base}", fontsize=9)
    figure.savefig(path)


def _band(axis: Any, of_seeds: Curves, colour: str, name: str) -> None:
    """The mean over seeds, within the least and the most."""
    at_each = list(zip(*of_seeds, strict=True))
    batches = range(1, len(at_each) + 1)
    axis.plot(batches, list(map(statistics.mean, at_each)), color=colour, linewidth=1.6, label=name, zorder=3)
    axis.fill_between(
        batches, list(map(min, at_each)), list(map(max, at_each)), color=colour, alpha=0.2, linewidth=0
    )
    axis.grid(alpha=0.3)


def _smoothed(curve: Sequence[float]) -> list[float]:
    """Each point the mean of the batches up to it, at most `SMOOTH`."""
    return [statistics.mean(curve[max(0, end - SMOOTH) : end]) for end in range(1, len(curve) + 1)]
