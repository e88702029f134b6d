"""The report's charts: related metrics of a run, drawn as SVG.

matplotlib draws without its window, fonts or style files, in the page's colours. A drawing contains only
numbers; titles and legends, which may contain users' names, are part of the page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpox.observing.record_files import MetricsLine
from grpox.observing.report.data import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CHARTS: tuple[tuple[str, str, Mapping[str, str] | str], ...] = (
    ("Accuracy", "on held-out prompts", {"accuracy": "accuracy"}),
    ("Pass@k", "chance that one of k completions is right", "pass_at_*"),
    (
        "Reward",
        "weighted sum, mean over the batch",
        {"reward": "reward", "before groups are replaced": "dynamic_sampling/first_reward"},
    ),
    ("Reward: *", "mean over the batch", "rewards/*/mean"),
    (
        "Groups without signal",
        "share with equal rewards",
        {"share": "frac_reward_zero_std", "replaced": "dynamic_sampling/replaced"},
    ),
    ("Loss", "of the step", {"loss": "loss"}),
    ("KL to the reference", "estimator of train.kl, nats per token", {"kl": "kl"}),
    ("KL to pi_old", "k3 estimate, nats per token", {"kl": "kl_old"}),
    ("Entropy", "nats per token", {"entropy": "entropy"}),
    ("Completions left out", "share that is off-policy", {"share": "off_policy_masked"}),
    (
        "Completion length",
        "tokens",
        {
            "mean": "completions/mean_length",
            "shortest": "completions/min_length",
            "longest": "completions/max_length",
        },
    ),
    ("Completions cut off", "share at the longest length", {"share": "completions/clipped_ratio"}),
    ("Gradient norm", "before clipping", {"norm": "grad_norm"}),
    ("Learning rate", "of the step", {"rate": "learning_rate"}),
    ("Tokens clipped", "share of tokens", "clip_ratio/*_mean"),
    (
        "Generator against trainer",
        "difference of log-probabilities",
        {"mean": "sampling/difference_mean", "largest": "sampling/difference_max"},
    ),
    (
        "Speed",
        "tokens per second",
        {"generated": "tokens_per_second/generated", "trained": "tokens_per_second/trained"},
    ),
    ("Time of a step", "seconds on rank 0, by phase", "time/*"),
)
"""Title, note, and legend -> metric; or a pattern of metrics, whose star gives the legend or the title."""
_STACKED = "time/*"
WIDTH, HEIGHT = 3.6, 1.9
"""Size of a drawing in inches of 72 units; the page scales it."""
MOST_POINTS = 200
"""Largest number of points of a curve; with more steps, a point is the mean of neighbouring steps."""
COLOURS = 8
"""Number of colours of the page, ``--c0`` to ``--c7``; further curves start again with the first."""
MOST_MARKS = 20
"""Largest number of evaluations marked by lines; with more, none is marked."""
MARKED_POINTS = 25
"""Largest number of points for which a curve has a dot at each point."""
# Placeholders: the finished drawing has the page's variables instead.
_INK, _GRID, _SERIES = "#0000e0", "#0000e1", "#0000f"
_STYLE = {
    "svg.fonttype": "none",
    "text.usetex": False,
    "font.size": 8,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.4,
    "lines.markersize": 3,
}


@dataclass(frozen=True)
class Chart:
    """Curves that share an axis."""

    title: str
    note: str
    """Measured quantity in a few words."""
    metrics: Mapping[str, str]
    """Legend -> name of the metric, in the steps or the evaluations."""
    stacked: bool = False
    """True for parts of a whole, drawn on top of each other."""


def charts_of(record: RunRecord) -> list[Chart]:
    """Return the charts of a run, without metrics that it did not log."""
    names = dict.fromkeys(name for entry in (*record.steps, *record.evaluations) for name in entry.values)
    charts = []
    for title, note, metrics in _CHARTS:
        if isinstance(metrics, str):
            prefix, suffix = metrics.split("*")
            family = [name for name in names if name.startswith(prefix) and name.endswith(suffix)]
            matches = {name.removeprefix(prefix).removesuffix(suffix): name for name in family}
        else:
            matches = {label: name for label, name in metrics.items() if name in names}
        if "*" in title:
            charts += [
                Chart(title.replace("*", label), note, {"mean": name}) for label, name in matches.items()
            ]
        elif matches:
            charts.append(Chart(title, note, matches, stacked=metrics == _STACKED))
    return charts


@dataclass(frozen=True)
class Curve:
    """Values over steps; NaN leaves a gap."""

    steps: list[float]
    values: list[float]


def binned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """Reduce a curve to at most `most` points: means of the finite values of neighbouring steps."""
    size = math.ceil(len(curve.steps) / most)
    if size <= 1:
        return curve
    starts = range(0, len(curve.steps), size)
    return Curve(
        [_mean(curve.steps[start : start + size]) for start in starts],
        [_mean(curve.values[start : start + size]) for start in starts],
    )


def curve_of(recorded: Sequence[MetricsLine], metric: str) -> Curve:
    """Return the logged values of `metric`; infinities are NaN."""
    having = [entry for entry in recorded if metric in entry.values]
    values = [entry.values[metric] for entry in having]
    return Curve([float(entry.step) for entry in having], [v if math.isfinite(v) else math.nan for v in values])


def left_out(chart: Chart, record: RunRecord) -> int:
    """Count the values of `chart` that a curve cannot show: NaN and infinities."""
    metrics = chart.metrics.values()
    recorded = (*record.steps, *record.evaluations)
    return sum(not math.isfinite(entry.values.get(metric, 0.0)) for entry in recorded for metric in metrics)


def marked_evaluations(record: RunRecord) -> list[int]:
    """Return the steps of evaluations marked by lines in every drawing; none if there are too many."""
    steps = [entry.step for entry in record.evaluations] if record.steps else []
    return steps if len(steps) <= MOST_MARKS else []


def draw(chart: Chart, record: RunRecord) -> str:
    """Draw `chart` as a sizeless ``<svg>``, in the page's colours ``--c0`` ... , ``--ink`` and ``--grid``."""
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    # The salt makes ids unique to a drawing, because all drawings share a page.
    with style.context(["default", _STYLE | {"svg.hashsalt": chart.title}]):
        figure = Figure(figsize=(WIDTH, HEIGHT), frameon=False)
        axes = figure.add_axes((0.15, 0.13, 0.835, 0.83))
        axes.patch.set_visible(False)
        if chart.stacked:
            _draw_stack(axes, chart, record)
        else:
            _draw_lines(axes, chart, record)
        for step in marked_evaluations(record):
            axes.axvline(step, color=_INK, alpha=0.5, linestyle=(0, (2, 2)), linewidth=0.8, zorder=1)
        for axis, integer in ((axes.xaxis, True), (axes.yaxis, False)):
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=integer))
            large = max(map(abs, axis.get_view_interval())) >= 1e4
            axis.set_major_formatter(EngFormatter(sep="") if large else FuncFormatter(_tick))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _for_the_page(file.getvalue())


def _draw_lines(axes: Axes, chart: Chart, record: RunRecord) -> None:
    shown: list[float] = []
    for place, metric in enumerate(chart.metrics.values()):
        colour = f"{_SERIES}{place % COLOURS}"
        line = binned(curve_of(record.steps, metric))
        evaluated = binned(curve_of(record.evaluations, metric))
        dot = "." if len(line.steps) <= MARKED_POINTS else ""
        axes.plot(line.steps, line.values, color=colour, marker=dot)
        marks: dict[str, Any] = {"linestyle": "" if line.steps else "-", "marker": "o", "markersize": 4.5}
        axes.plot(
            evaluated.steps, evaluated.values, color=colour, markerfacecolor="none", clip_on=False, **marks
        )
        shown += [value for value in (*line.values, *evaluated.values) if not math.isnan(value)]
    _fit(axes, shown)


def _draw_stack(axes: Axes, chart: Chart, record: RunRecord) -> None:
    """Draw each metric on top of the ones before it; a missing value counts as 0."""
    curves = []
    for metric in chart.metrics.values():
        values = [entry.values.get(metric, 0.0) for entry in record.steps]
        curves.append(binned(Curve([float(entry.step) for entry in record.steps], values)))
    colours = [f"{_SERIES}{place % COLOURS}" for place in range(len(curves))]
    # A single step has no area: half a step to either side gives it one.
    steps = curves[0].steps if len(curves[0].steps) > 1 else [curves[0].steps[0] + d for d in (-0.5, 0.5)]
    heights = [curve.values * (len(steps) // len(curve.values)) for curve in curves]
    axes.stackplot(steps, heights, colors=colours, linewidth=0)
    _fit(axes, [height for curve in heights for height in curve])


def _fit(axes: Axes, values: Sequence[float]) -> None:
    """Start the axis at zero if no value is negative, and end it at one if all are zero."""
    bottom, top = axes.get_ylim()
    if min(values, default=0.0) >= 0 > bottom:
        axes.set_ylim(0, top if max(values, default=0.0) > 0 else 1)


def _tick(value: float, _place: int | None = None) -> str:
    """Format a number to fit the margin: 2,500, 0.25, 1.5e-6."""
    if abs(value) >= 1000:
        text = f"{value:,.0f}"
    elif abs(value) >= 1e-3 or value == 0:
        text = f"{value:.3g}"
    else:
        text = re.sub(r"\.?0*e-0?", "e-", f"{value:.2e}")
    return text.replace("-", "\N{MINUS SIGN}")


def _for_the_page(svg: str) -> str:
    """Adapt a drawing to the page: the page's font and colours, two decimals, and only referenced ids."""
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg[svg.index("<g ") :], flags=re.DOTALL)
    body = re.sub(r' id="[A-Za-z0-9.]+_\d+"|font-family: [^;]*; ', "", body)
    body = re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d\d)\d+|\n", r"\1", path[0]), body)
    body = re.sub(r">\s+<", "><", body)
    body = re.sub(rf"{_SERIES}(\d)", r"var(--c\1)", body)
    body = body.replace(_INK, "var(--ink)").replace(_GRID, "var(--grid)")
    return f'<svg viewBox="0 0 {WIDTH * 72:g} {HEIGHT * 72:g}">{body}'


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
