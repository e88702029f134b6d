"""Terminal output of a run: a live line or a few plain lines, sample completions, a summary, the report."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from grpox.errors.formatting import duration, pluralize
from grpox.observing.early_stop import describe_early_stop
from grpox.observing.report.data import spread
from grpox.plugins.hookspecs import hookimpl
from grpox.runtime.logs import DISPLAYED, get_logger

if TYPE_CHECKING:
    from grpox.contracts import RunContext, ScoredRollout

logger = get_logger(__name__)
SHOWN = (
    ("reward", "reward {:.3f}"),
    ("loss", "loss {:.4g}"),
    ("tokens_per_second/generated", "{:,.0f} tokens/s"),
    ("step_time", "{:.1f} s/step"),
)
"""Metrics in a step's line, with their formats."""
PLAIN_LINES = 20
SAMPLE_ROWS = 4
PROMPT_WIDTH, COMPLETION_WIDTH, EXTRA_WIDTH = 100, 240, 60


class TerminalDisplay:
    """Shows the progress of a run: live on a terminal, else in about 20 lines for the whole run.

    Args:
        console: the output; default: standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._progress: Progress | None = None
        self._last_sample: int | None = None
        self._first_step: tuple[int, float] | None = None
        self._last_step = 0
        self._skipped = 0.0
        self._accuracies: dict[int, float] = {}

    @hookimpl
    def grpox_run_started(self, run: RunContext) -> None:
        self._started = time.monotonic()
        self._last_step = run.resumed_at or 0
        size = f"{pluralize(run.total_steps, 'step')} on {pluralize(run.world_size, 'rank')}"
        self._line(f"{escaped(run.source)}: {size}, into {escaped(str(run.output_dir))}")
        if run.resumed_at:
            self._line(f"resuming after step {run.resumed_at}")
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}", markup=False),
                console=self._console,
            )
            self._task: TaskID = self._progress.add_task("", total=run.total_steps, text="starting")
            self._progress.start()

    @hookimpl
    def grpox_rollouts_scored(self, run: RunContext, step: int, rollouts: Sequence[ScoredRollout]) -> None:
        every = run.config.logging.completions_every
        due = self._last_sample is None or step - self._last_sample >= every
        if every and due and rollouts:
            self._last_sample = step
            self._console.print(_sample_table(step, rollouts))

    @hookimpl
    def grpox_step_finished(self, run: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        self._last_step = step
        self._skipped = metrics.get("skipped_steps", 0)
        text = "  ".join(form.format(metrics[name]) for name, form in SHOWN if name in metrics)
        left = self._seconds_left(step, run.total_steps)
        if left is not None:
            text += f"  {duration(left)} left"
        every = math.ceil(run.total_steps / PLAIN_LINES)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, text=text)
            logger.info("step %s/%s  %s", step, run.total_steps, text, extra=DISPLAYED)
        elif step in (1, run.total_steps) or step % every == 0:
            self._line(f"step {step}/{run.total_steps}  {text}")

    @hookimpl
    def grpox_evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        accuracy = next((metrics[name] for name in metrics if name.split("/")[-1] == "accuracy"), None)
        if accuracy is not None:
            self._accuracies[step] = accuracy
        values = "  ".join(f"{escaped(name)} {value:.4g}" for name, value in _main_values(metrics).items())
        self._line(f"evaluation after step {step}: {values}")

    @hookimpl(tryfirst=True)
    def grpox_run_failed(self) -> None:
        # Called before all other observers, so that their output does not break a live line.
        self._stop()

    @hookimpl(tryfirst=True)
    def grpox_run_finished(self, run: RunContext, summary: Mapping[str, object]) -> None:
        self._stop()
        table = Table(title="run complete", show_header=False, title_justify="left")
        steps = sorted(self._accuracies)
        for step in dict.fromkeys((*steps[:1], *steps[-1:])):
            when = "before training" if step == 0 else f"after step {step}"
            table.add_row(f"accuracy {when}", f"{self._accuracies[step]:.4f}")
        table.add_row("steps", str(self._last_step))
        if isinstance(stopped := summary.get("stopped_early"), Mapping):
            table.add_row("stopped early", _plain(describe_early_stop(stopped)))
        if isinstance(best := summary.get("best_checkpoint"), Mapping):
            text = f"{best['metric']} {best['value']:.4g}: {best['checkpoint']}"
            table.add_row("best checkpoint", _plain(text))
        if self._skipped:
            table.add_row("skipped", f"{self._skipped:.0f}, NaN or infinite")
        table.add_row("time", duration(time.monotonic() - self._started))
        table.add_row("folder", _plain(str(run.output_dir)))
        self._console.print(table)

    def _seconds_left(self, step: int, total: int) -> float | None:
        """Estimate the remaining seconds from the pace after the first step; None at the first step."""
        now = time.monotonic()
        if self._first_step is None:
            self._first_step = (step, now)
        first, when = self._first_step
        return (now - when) / (step - first) * (total - step) if step > first else None

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        logger.info("%s", text, extra=DISPLAYED)

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _main_values(metrics: Mapping[str, float]) -> dict[str, float]:
    """Select the metrics for an evaluation's line; the record has all metrics."""
    shown = {
        name: value
        for name, value in metrics.items()
        if not name.startswith("completions/") and not name.endswith(("/std", "_std", "/abstained"))
    }
    if sum(name.startswith("rewards/") and name.endswith("/mean") for name in shown) == 1:
        shown.pop("reward", None)  # equal to the single reward's mean
    return shown


def sample_rows(rollouts: Sequence[ScoredRollout], rows: int = SAMPLE_ROWS) -> list[ScoredRollout]:
    """Select rollouts evenly by rank of reward, best first; rollouts without a reward (NaN) rank last."""
    ranked = sorted(rollouts, key=lambda scored: (math.isnan(scored.reward), -scored.reward))
    return [ranked[place] for place in spread(len(ranked), rows)]


def escaped(text: str) -> str:
    """Escape control characters and line breaks of a text for the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shortened(text: str, width: int) -> str:
    """Cut a text in its middle to `width` characters, because answers are at the end."""
    if len(text) <= width:
        return text
    shown = width - 5
    return f"{text[: shown - shown // 2]} ... {text[len(text) - shown // 2 :]}"


def _sample_table(step: int, rollouts: Sequence[ScoredRollout]) -> Table:
    table = Table(title=f"completions for step {step}", title_justify="left", show_lines=True)
    table.add_column("prompt", overflow="fold", ratio=2)
    table.add_column("completion", overflow="fold", ratio=3)
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column("advantage", justify="right", no_wrap=True)
    shown = sample_rows(rollouts)
    extras = dict.fromkeys(name for scored in shown for name in scored.extra)
    for name in extras:
        table.add_column(_plain(name), overflow="fold", ratio=1)
    for scored in shown:
        table.add_row(
            _plain(shortened(scored.prompt, PROMPT_WIDTH)),
            _plain(shortened(scored.completion, COMPLETION_WIDTH)),
            f"{scored.reward:.3f}",
            f"{scored.advantage:+.3f}",
            *(_plain(shortened(str(scored.extra.get(name, "")), EXTRA_WIDTH)) for name in extras),
        )
    return table


def _plain(text: str) -> Text:
    """Wrap a string in Text, because rich would read [brackets] in a str as markup."""
    return Text(escaped(text), overflow="fold")


class RunReport:
    """Writes ``report.html`` from the local record, and logs its path.

    A failed run has a report if it has finished an optimizer step.
    """

    def __init__(self) -> None:
        self._has_steps = self._has_evaluations = False

    @hookimpl
    def grpox_step_finished(self) -> None:
        self._has_steps = True

    @hookimpl
    def grpox_evaluated(self) -> None:
        self._has_evaluations = True

    @hookimpl
    def grpox_run_failed(self, run: RunContext) -> None:
        if self._has_steps:
            self._write(run)

    @hookimpl
    def grpox_run_finished(self, run: RunContext) -> None:
        if self._has_steps or self._has_evaluations:
            self._write(run)

    def _write(self, run: RunContext) -> None:
        # Imported here because it takes half a second.
        from grpox.observing.report.page import write_report

        logger.info("report: %s", escaped(str(write_report(run.output_dir))))
