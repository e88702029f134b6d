"""Terminal output of a run: a live line or a few plain lines, sample completions, a summary, the report."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from grpox.config.sampling import bare_name
from grpox.errors import escaped
from grpox.errors.console import Console
from grpox.errors.formatting import duration, pluralize, spread
from grpox.observing.alarms import FILE as ALARMS
from grpox.observing.alarms import alarms_in, describe_alarm
from grpox.observing.conversation import ends, speeches
from grpox.observing.early_stop import describe_early_stop
from grpox.plugins.hookspecs import hookimpl
from grpox.runtime.files import read_mapping
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
DISPENSABLE = ("tokens_per_second/generated", "loss", "step_time")
"""Metrics that a narrow terminal leaves out, the first one first."""
BAR_WIDTH, NARROW = 24, 100
"""Width of the live bar; width of a terminal below which the bar is left out."""
ANSWERS = ("answer", "solution", "ground_truth", "target", "label")
"""Usual names of the column with the right answer, where no reward names one."""
PLAIN_LINES = 20
SAMPLE_ROWS = 4
PROMPT_WIDTH, COMPLETION_WIDTH, EXTRA_WIDTH = 100, 240, 60
ANSWER_WIDTH, LABEL_WIDTH = 60, 16
MOST_MESSAGES, MESSAGE_WIDTH = 6, 80
"""Messages of a conversation that are shown, and the width of each."""
RESULTS = ("accuracy", "success")
"""Metrics of evaluations that the summary of a run shows."""


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
        self._skipped = self._in_steps = 0.0
        self._first_start: float | None = None
        self._results: dict[str, dict[int, float]] = {name: {} for name in RESULTS}
        self._sets: Collection[str] = ()

    @hookimpl
    def grpox_run_started(self, run: RunContext) -> None:
        evaluation = run.config.evaluation
        if evaluation is not None:
            results = dict.fromkeys((bare_name(run.config.main_metric), *RESULTS))
            names = ["", *(f"{name}/" for name in evaluation.sets)]
            self._results = {f"{name}{result}": {} for name in names for result in results}
            self._sets = evaluation.sets
        self._last_step = run.resumed_at or 0
        size = f"{pluralize(run.total_steps, 'step')} on {pluralize(run.world_size, 'rank')}"
        self._line(f"{escaped(run.source)}: {size}, into {escaped(str(run.output_dir))}")
        if run.resumed_at:
            self._line(f"resuming after step {run.resumed_at}")
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                *([] if self._console.width < NARROW else [BarColumn(bar_width=BAR_WIDTH)]),
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
            self._console.print(_sample_table(step, rollouts, answer_column(run, rollouts[0].columns)))

    @hookimpl
    def grpox_step_finished(self, run: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        self._last_step = step
        self._skipped = metrics.get("skipped_steps", 0)
        seconds = metrics.get("step_time", 0.0)
        if self._first_start is None:
            self._first_start = time.time() - seconds
        self._in_steps += seconds
        parts, now = {}, time.monotonic()
        for name, form in SHOWN:
            if name in metrics:
                parts[name] = form.format(metrics[name])
        self._first_step = first, since = self._first_step or (step, now)
        if step > first:  # from the pace after the first step
            parts["left"] = f"{duration((now - since) / (step - first) * (run.total_steps - step))} left"
        line = "  ".join((f"step {step}/{run.total_steps}", *parts.values()))
        every = math.ceil(run.total_steps / PLAIN_LINES)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, text=self._fitting(parts, run.total_steps))
        elif step in (1, run.total_steps) or step % every == 0:
            try:  # without rich, which has nothing to do for a line of numbers
                print(line, file=self._console.file, flush=True)
            except BrokenPipeError:
                self._console.on_broken_pipe()
        else:
            return
        logger.info("%s", line, extra=DISPLAYED)

    @hookimpl
    def grpox_evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, by_step in self._results.items():
            if name in metrics:
                by_step[step] = metrics[name]
        # Of each of several sets, its result.
        own = {name: value for name, value in metrics.items() if name.partition("/")[0] not in self._sets}
        shown = _main_values(own) | {name: metrics[name] for name in self._results if name in metrics}
        values = "  ".join(f"{escaped(name)} {value:.4g}" for name, value in shown.items())
        self._line(f"evaluation after step {step}: {values}")

    @hookimpl(tryfirst=True)
    def grpox_run_failed(self, run: RunContext) -> None:
        # Called before all other observers, so that their output does not break a live line.
        self._stop()
        for alarm in alarms_in(read_mapping(run.output_dir / ALARMS)):
            self._line(f"alarm {escaped(describe_alarm(alarm))}")

    @hookimpl(tryfirst=True)
    def grpox_run_finished(self, run: RunContext, summary: Mapping[str, object]) -> None:
        self._stop()
        table = Table(title="run complete", show_header=False, title_justify="left")
        for name, by_step in self._results.items():
            steps = sorted(by_step)
            for step in dict.fromkeys((*steps[:1], *steps[-1:])):
                when = "before training" if step == 0 else f"after step {step}"
                table.add_row(f"{name} {when}", f"{by_step[step]:.4f}")
        table.add_row("steps", str(self._last_step))
        if isinstance(stopped := summary.get("stopped_early"), Mapping):
            table.add_row("stopped early", _plain(describe_early_stop(stopped)))
        if isinstance(best := summary.get("best_checkpoint"), Mapping):
            text = f"{best['metric']} {best['value']:.4g}: {best['checkpoint']}"
            table.add_row("best checkpoint", _plain(text))
        if self._skipped:
            table.add_row("skipped", f"{self._skipped:.0f}, NaN or infinite")
        for alarm in alarms_in(summary):
            table.add_row("alarm", _plain(describe_alarm(alarm, advice=False)))
        if run.started is not None:
            total = time.time() - run.started
            times = [duration(total)]
            if self._first_start is not None:
                before = self._first_start - run.started
                rest = max(0.0, total - before - self._in_steps)
                times += [f"{duration(before)} before the first step", f"{duration(self._in_steps)} in steps"]
                times += [f"{duration(rest)} evaluating and saving"]
            table.add_row("time", "\n".join(times))
        table.add_row("folder", _plain(str(run.output_dir)))
        self._console.print(table)

    def _fitting(self, parts: Mapping[str, str], total_steps: int) -> str:
        """Leave out the dispensable parts that have no room in the live line."""
        bar = 0 if self._console.width < NARROW else BAR_WIDTH + 1
        room = self._console.width - len(f"step {total_steps}/{total_steps} ") - bar
        shown = dict(parts)
        for name in DISPENSABLE:
            if len("  ".join(shown.values())) > room:
                shown.pop(name, None)
        return "  ".join(shown.values())

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
        if not name.startswith(("completions/", "turns/", "tools/", "episodes/"))
        and not name.endswith(("/std", "_std", "/abstained"))
    }
    if sum(name.startswith("rewards/") and name.endswith("/mean") for name in shown) == 1:
        shown.pop("reward", None)  # equal to the single reward's mean
    return shown


def sample_rows(rollouts: Sequence[ScoredRollout], rows: int = SAMPLE_ROWS) -> list[ScoredRollout]:
    """Select rollouts evenly by rank of reward, best first; rollouts without a reward (NaN) rank last."""
    ranked = sorted(rollouts, key=lambda scored: (math.isnan(scored.reward), -scored.reward))
    return [ranked[place] for place in spread(len(ranked), rows)]


def shortened(text: str, width: int) -> str:
    """Cut a text in its middle to `width` characters, because answers are at the end."""
    if len(text) <= width:
        return text
    shown = width - 5
    return f"{text[: shown - shown // 2]} ... {text[len(text) - shown // 2 :]}"


def answer_column(run: RunContext, columns: Mapping[str, object]) -> str | None:
    """Return the column with the right answer: that which a reward names, else one of the usual name."""
    named = [reward.params.get("column") for reward in run.config.rewards]
    return next((name for name in (*named, *ANSWERS) if isinstance(name, str) and name in columns), None)


def _sample_table(step: int, rollouts: Sequence[ScoredRollout], answer: str | None = None) -> Table:
    """Show completions beside what was asked, the column with the right answer, and the scores."""
    table = Table(title=f"completions for step {step}", title_justify="left", show_lines=True)
    table.add_column("prompt", overflow="fold", ratio=2)
    table.add_column("completion", overflow="fold", ratio=3)
    if answer is not None:
        table.add_column(_plain(answer), overflow="fold", ratio=1)
    table.add_column("scores", no_wrap=True)
    for scored in sample_rows(rollouts):
        right = [] if answer is None else [str(scored.columns.get(answer, ""))]
        table.add_row(
            _plain(shortened(scored.question or scored.prompt, PROMPT_WIDTH)),
            _completion(scored),
            *(_plain(shortened(text, ANSWER_WIDTH)) for text in right),
            _scores(scored),
        )
    return table


def _scores(scored: ScoredRollout) -> Text:
    """Write the sum, each reward that is not the sum itself, and the advantage, one below the other."""
    values = [("reward", f"{scored.reward:.3f}")]
    if list(scored.rewards.values()) != [scored.reward]:
        for label, value in scored.rewards.items():
            short = shortened(escaped(label), LABEL_WIDTH)  # perhaps the same of two labels
            values.append((f"  {short}", "none" if value is None else f"{value:.3f}"))
    values.append(("advantage", f"{scored.advantage:+.3f}"))
    left, right = (max(map(len, texts)) for texts in zip(*values, strict=True))
    return Text("\n".join(f"{label:<{left}} {value:>{right}}" for label, value in values))


def _completion(scored: ScoredRollout) -> Text:
    """Write a completion, or the first and the last messages of a conversation, and what rewards logged."""
    lines, episode = [shortened(scored.completion, COMPLETION_WIDTH)], scored.rollout.episode
    if episode is not None and len(episode.messages) > 1:
        messages = [f"{speaker}: {text}" for speaker, text in speeches(episode.messages)]
        first, left_out, last = ends([shortened(each, MESSAGE_WIDTH) for each in messages], MOST_MESSAGES)
        between = [f"... {pluralize(left_out, 'message')} ..."] if left_out else []
        lines = [*first, *between, *last]
    extra = scored.extra.items()
    lines += [f"{name}: {shortened(str(value), EXTRA_WIDTH)}" for name, value in extra if value != ""]
    return Text("\n", overflow="fold").join(map(_plain, lines))


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
        from grpox.observing.page.report import write_report

        logger.info("report: %s", escaped(str(write_report(run.output_dir))))
