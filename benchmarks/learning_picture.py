"""Curves of several runs a kind: the mean over seeds, and their spread as a band."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

SMOOTH = 5
"""Batches whose mean is a point."""
COLUMNS = 4


def draw(curves: Mapping[str, Sequence[Sequence[float]]], path: Path) -> None:
    """Draw each kind in a panel of its own, all others in grey behind it; the two of a pair in one panel."""
    from matplotlib.figure import Figure

    together = len(curves) <= 2
    panels = [tuple(curves)] if together else [(name,) for name in curves]
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    size = (5.0, 3.2) if together else (2.3 * columns, 1.9 * lines)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axis, names in zip(axes, panels, strict=False):
        for name, of_seeds in curves.items():
            smooth = [_smoothed(curve) for curve in of_seeds]
            means = [statistics.mean(values) for values in zip(*smooth, strict=True)]
            batches = range(1, len(means) + 1)
            if name not in names:
                axis.plot(batches, means, color="0.82", linewidth=0.8)
                continue
            colour = f"C{list(names).index(name)}"
            axis.plot(batches, means, color=colour, linewidth=1.6, label=name, zorder=3)
            band = zip(*[(min(values), max(values)) for values in zip(*smooth, strict=True)], strict=True)
            axis.fill_between(batches, *band, color=colour, alpha=0.2, linewidth=0, zorder=2)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
        if together:
            axis.legend(frameon=False, loc="lower right")
        else:
            axis.set_title(names[0], fontsize=9)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.supxlabel("generation batch", fontsize=9)
    figure.supylabel("accuracy of what is sampled", fontsize=9)
    figure.savefig(path)


def _smoothed(curve: Sequence[float]) -> list[float]:
    """Each point the mean of the batches up to it, at most `SMOOTH`."""
    return [statistics.mean(curve[max(0, end - SMOOTH) : end]) for end in range(1, len(curve) + 1)]
