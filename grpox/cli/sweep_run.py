"""A sweep from its command to its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from grpox.cli.sweep_children import Child, plan_children
from grpox.cli.sweep_grid import Grid, read_grid
from grpox.cli.sweep_processes import Running, last_lines, run_all, train_command
from grpox.cli.sweep_results import (
    FAILED,
    FINISHED,
    KILLED,
    RUNNING,
    WAITING,
    Status,
    as_table,
    last_step,
    last_values,
    result_of,
    told,
    write,
)
from grpox.config import RunConfig
from grpox.contracts import SweepContext, SweepResults, SweptRun
from grpox.errors import ConfigError, Problem, RunFailed, nearest
from grpox.errors.formatting import counted, duration
from grpox.errors.redaction import redact
from grpox.observing.observers import Observers
from grpox.runfile.load import load_run
from grpox.runtime import launch


@dataclass
class Sweep:
    """A grid whose runs are all known to be right."""

    run: str
    grid: Grid
    folder: Path
    children: Sequence[Child]
    ranks: int
    metric: str
    lowest: bool
    console: Console = field(default_factory=Console)
    _status: dict[str, tuple[Status, str]] = field(default_factory=dict)
    """Name -> status and error, of those that have begun."""
    _observers: Observers | None = None
    """Variables of the first run, while runs are trained."""

    def show(self) -> None:
        """The table as things stand."""
        self.console.print(as_table(self.results(), self.grid.names))
        self.console.print(
            f"{counted(len(self.children), 'run')} in {self.folder}", markup=False, soft_wrap=True
        )

    def results(self) -> SweepResults:
        """As their folders have it."""
        return SweepResults(self.run, self.metric, self.lowest, tuple(map(self._result, self.children)))

    def _result(self, child: Child) -> SweptRun:
        tracked = None if self._observers is None else self._observers.tracked_run(child.folder)
        return result_of(child, self.metric, *self._of(child), tracked)

    def run_all(self, parallel: int) -> None:
        """Train those that are not complete, and print the table.

        Raises:
            RunFailed: some of them failed, or none has a value of the metric; or the sweep goes on elsewhere.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with _held(self.folder):
            self._run_all(parallel)

    def _run_all(self, parallel: int) -> None:
        todo = [child for child in self.children if child.summary() is None]
        done = len(self.children) - len(todo)
        skipped = f", {done} of them complete already" if done else ""
        self._say(f"{counted(len(self.children), 'run')} in {self.folder}{skipped}")
        sweep = SweepContext(
            config=self.children[0].config,
            folder=self.folder,
            source=self.run,
            axes={axis.key: axis.values for axis in self.grid.axes},
            runs=len(self.children),
        )
        self._observers = observers = self._followers()
        environment = observers.sweep_started(sweep)
        interrupted = True
        try:
            self._train(todo, parallel, environment, lambda: observers.sweep_run_ended(sweep, self._write()))
            interrupted = False
        finally:
            status = self._conclude(interrupted)
            observers.sweep_finished(sweep, self.results(), status)
        self._judge(self.results())

    def _followers(self) -> Observers:
        """The observers that the first run selects; they are told of the sweep."""
        run = load_run(self.run, self.children[0].overrides, self.ranks)
        selected = [(name, run.build(f"tracking.{name}")) for name in run.config.tracking]
        return Observers(run.registry.plugins.manager, selected)

    def _write(self) -> SweepResults:
        """Write ``sweep.json`` as things stand."""
        results = self.results()
        write(results, self.folder)
        return results

    def _train(
        self,
        todo: Sequence[Child],
        parallel: int,
        environment: Mapping[str, str],
        tell: Callable[[], object],
    ) -> None:
        with _Bars(self.console) as bars:

            def started(child: Child) -> None:
                self._status[child.name] = (RUNNING, "")
                bars.begin(child)
                if not bars.shown:
                    self._say(f"{child.name}: started")
                self._write()

            def ended(child: Child, code: int, seconds: float) -> None:
                failed = code != 0 or child.summary() is None
                error = redact("; ".join(last_lines(child.log, 1))) if failed else ""
                self._status[child.name] = (FAILED if failed else FINISHED, error)
                bars.end(child)
                result = self._result(child)
                value = "" if result.value is None else f", {self.metric} {result.value:.4g}"
                self._say(f"{child.name}: {result.status}{value} ({duration(seconds)})")
                tell()

            run_all(
                todo,
                lambda child: train_command(self.run, child, self.ranks),
                environment,
                parallel,
                self.ranks,
                started,
                bars.look,
                ended,
            )

    def _conclude(self, interrupted: bool) -> Status:
        """Write and print what the runs came to; returns what the sweep did."""
        if interrupted:
            for child in self.children:
                if self._of(child)[0] == RUNNING:
                    self._status[child.name] = (KILLED, "")
        results = self._write()
        failed = any(result.status == FAILED for result in results.runs)
        self.console.print(as_table(results, self.grid.names))
        for line in told(results):
            self._say(line)
        if interrupted:
            self._say("the same command goes on from here")
        return KILLED if interrupted else FAILED if failed else FINISHED

    def _judge(self, results: SweepResults) -> None:
        failed = [result for result in results.runs if result.status != FINISHED]
        if failed:
            raise RunFailed(f"{len(failed)} of {counted(len(results.runs), 'run')} did not finish")
        if results.best is None:
            raise RunFailed(self._no_values(results.runs))

    def _no_values(self, runs: Sequence[SweptRun]) -> str:
        known = sorted({name for result in runs for name in last_values(Path(result.folder))} - {"step"})
        near = nearest(self.metric, known)
        hint = f"; did you mean {near}?" if near else f": they have {', '.join(known[:20])}"
        return f"no run recorded a value of the metric {self.metric}{hint}"

    def _of(self, child: Child) -> tuple[Status, str]:
        return self._status.get(child.name, (WAITING, ""))

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def prepare(
    run: str,
    arguments: Sequence[str],
    seeds: str | None,
    folder: Path | None,
    ranks: int,
    metric: str | None,
    lowest: bool,
) -> Sweep:
    """Read the grid and check every run of it.

    Raises:
        ConfigError: with every problem found; or this is one of several ranks.
    """
    if launch.world_size() > 1:
        what = "is one process, which starts those of its runs"
        raise ConfigError(
            Problem(what, "grpox sweep", allowed="no launcher; --nproc-per-node P for P ranks a run")
        )
    grid = read_grid(arguments, seeds)
    folder, children = plan_children(run, grid, folder, ranks)
    config = children[0].config
    default = config.checkpoint.best or _default_metric(config)
    is_lowest = lowest or (metric is None and config.checkpoint.best is not None and _wants_lowest(config))
    return Sweep(run, grid, folder, children, ranks, metric or default, is_lowest)


def _default_metric(config: RunConfig) -> str:
    return "reward" if config.evaluation is None else "evaluation/accuracy"


def _wants_lowest(config: RunConfig) -> bool:
    return config.checkpoint.best_is in ("lowest", "min")


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Keep a second sweep out of the folder, until this one ends in whatever way."""
    try:
        with FileLock(folder / "sweep.lock", blocking=False):
            yield
    except Timeout as error:
        raise RunFailed(f"another process runs the sweep in {folder}: wait until it has ended") from error


class _Bars:
    """A bar for each run that goes on, in a terminal; elsewhere nothing."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        self.shown = console.is_terminal
        self._progress = Progress(
            *columns, TimeElapsedColumn(), console=console, transient=True, disable=not self.shown
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, child: Child) -> None:
        total = child.config.train.max_steps
        self._tasks[child.name] = self._progress.add_task(child.name, total=total if total > 0 else None)

    def look(self, running: Sequence[Running]) -> None:
        """How far each of them is."""
        for each in running if self.shown else ():
            self._progress.update(self._tasks[each.child.name], completed=last_step(each.child.folder))

    def end(self, child: Child) -> None:
        self._progress.remove_task(self._tasks.pop(child.name))
