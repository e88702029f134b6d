"""The runs of a sweep as child processes, some at a time, none left behind; and the table of their results."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout
from rich.table import Table
from rich.text import Text

from grpox.cli.sweep_grid import SEED, Grid, Trial
from grpox.contracts import SweepContext, SweepResults, SweptRun
from grpox.errors import RunFailed, nearest
from grpox.errors.console import Console, folding_table
from grpox.errors.formatting import duration, pluralize
from grpox.errors.redaction import redact
from grpox.observing.observers import Observers
from grpox.observing.record_files import MetricsLine
from grpox.policy.memory_plan.fit import gpus_here
from grpox.runfile.load import load_run
from grpox.runtime import workers
from grpox.runtime.files import open_regular, write_atomically

POLL = 0.2
"""Seconds between two checks of the processes."""
END_SECONDS = 60.0
"""Seconds that interrupted runs have for their last step and checkpoint before they are killed."""
STYLES = {"RUNNING": "cyan", "FINISHED": "green", "FAILED": "red", "KILLED": "yellow", "WAITING": "dim"}

Status = Literal["FINISHED", "FAILED", "RUNNING", "WAITING", "KILLED"]


@dataclass
class Sweep:
    """A grid of checked runs."""

    run: str
    grid: Grid
    folder: Path
    trials: Sequence[Trial]
    ranks: int
    metric: str
    lowest: bool
    console: Console = field(default_factory=Console)
    _status: dict[str, tuple[Status, str]] = field(default_factory=dict)
    """Name -> status and error, for runs that have begun."""
    _observers: Observers | None = None
    """Observers of the first run, while runs are trained."""

    def show(self) -> None:
        """Print the table of the current results."""
        self.console.print(as_table(self.results(), self.grid.names))
        self._say(f"{pluralize(len(self.trials), 'run')} in {self.folder}")

    def results(self) -> SweepResults:
        """Read the results from the runs' folders."""
        return SweepResults(self.run, self.metric, self.lowest, tuple(map(self._result, self.trials)))

    def run_all(self, parallel: int) -> None:
        """Train the runs that are not complete, and print the table.

        Raises:
            RunFailed: a run failed, no run has a value of the metric, or another process runs the sweep.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(self.folder / "sweep.lock", blocking=False).acquire()
        except Timeout as error:
            what = f"another process runs the sweep in {self.folder}: wait for its end"
            raise RunFailed(what) from error
        with lock:
            results = self._run_all(parallel)
        if failed := len(results.runs) - len(results.finished):
            raise RunFailed(f"{failed} of {pluralize(len(results.runs), 'run')} did not finish")
        if results.best is None:
            known = sorted({name for run in results.runs for name in last_values(Path(run.folder))} - {"step"})
            near = nearest(self.metric, known)
            hint = f"; did you mean {near}?" if near else f"; recorded metrics: {', '.join(known[:20])}"
            raise RunFailed(f"no run recorded a value of the metric {self.metric}{hint}")

    def _run_all(self, parallel: int) -> SweepResults:
        """Run each run that is not complete to its end, `parallel` at a time; return the results.

        A failing run does not stop the others. On an interrupt, the running ones get SIGTERM, save a
        checkpoint, and are waited for.
        """
        waiting = [trial for trial in self.trials if trial.summary() is None]
        running: dict[int, tuple[Trial, workers.Child, float]] = {}  # slot -> run, process, time of its start
        done = len(self.trials) - len(waiting)
        skipped = f", {done} already complete" if done else ""
        self._say(f"{pluralize(len(self.trials), 'run')} in {self.folder}{skipped}")
        first = load_run(self.run, self.trials[0].overrides, self.ranks)
        sweep = SweepContext(
            self.trials[0].config, self.folder, self.run, axes=self.grid.axes, runs=len(self.trials)
        )
        selected = [(name, first.build(f"tracking.{name}")) for name in first.config.tracking]
        self._observers = observers = Observers(first.registry.plugins.manager, selected)
        environment, devices = observers.sweep_started(sweep), _devices(parallel, self.ranks)
        status: Status = "KILLED"
        try:
            while waiting or running:
                while waiting and len(running) < parallel:
                    slot = min(set(range(parallel)) - running.keys())
                    trial = waiting.pop(0)
                    process = self._start(trial, {**environment, **devices[slot]})
                    running[slot] = trial, process, time.monotonic()
                time.sleep(POLL)
                for slot in [slot for slot, (_, process, _) in running.items() if process.has_ended()]:
                    self._end(*running.pop(slot))
                    observers.sweep_run_ended(sweep, self._write())
            has_failed = any(result.status == "FAILED" for result in self.results().runs)
            status = "FAILED" if has_failed else "FINISHED"
        finally:
            try:
                _terminate([process for _, process, _ in running.values()])
            finally:
                in_progress = [name for name, (state, _) in self._status.items() if state == "RUNNING"]
                self._status |= dict.fromkeys(in_progress, ("KILLED", ""))
                results = self._write()
                self.console.print(as_table(results, self.grid.names))
                for line in conclusions(results):
                    self._say(line)
                if status == "KILLED":
                    self._say("repeat the command to continue the sweep")
                observers.sweep_finished(sweep, results, status)
        return results

    def _start(self, trial: Trial, environment: Mapping[str, str]) -> workers.Child:
        self._status[trial.name] = ("RUNNING", "")
        self._say(f"{trial.name}: started")
        self._write()
        with trial.log.open("ab") as log:
            # In a session of its own: Ctrl-C in the terminal reaches this process alone, which ends the runs.
            # Where this one is killed, a run gets SIGTERM, so that the command can be repeated.
            command = train_command(self.run, trial, self.ranks)
            return workers.Child(
                ["-m", workers.__name__, str(signal.SIGTERM.value), *command],
                stall=0,
                output=(log.fileno(), log.fileno()),
                environment={**os.environ, **environment},
            )

    def _end(self, trial: Trial, process: workers.Child, began: float) -> None:
        failed = process.end() != 0 or trial.summary() is None
        printed = [line.strip() for line in lines_of(trial.log) if line.strip()]
        error = redact(printed[-1]) if failed and printed else ""
        self._status[trial.name] = ("FAILED" if failed else "FINISHED", error)
        result = self._result(trial)
        value = "" if result.value is None else f", {self.metric} {result.value:.4g}"
        self._say(f"{trial.name}: {result.status}{value} ({duration(time.monotonic() - began)})")

    def _result(self, trial: Trial) -> SweptRun:
        """Read the state of a run from its folder."""
        status, error = self._status.get(trial.name, ("WAITING", ""))
        summary = trial.summary()
        recorded = last_values(trial.folder) if summary is not None or status != "WAITING" else {}
        value = recorded.get(self.metric, math.nan)
        return SweptRun(
            name=trial.name,
            setting=dict(trial.setting),
            status=status if summary is None else "FINISHED",
            value=value if math.isfinite(value) else None,
            steps=int(recorded.get("step", 0)),
            seconds=None if summary is None else summary.get("train_seconds"),
            folder=str(trial.folder),
            run_id=None if self._observers is None else self._observers.tracked_run(trial.folder),
            error=error if summary is None else "",
        )

    def _write(self) -> SweepResults:
        """Write the current results to ``sweep.json``, whole or not at all."""
        results = self.results()
        content = asdict(results) | {"best": results.best.name if results.best else None}
        write_atomically(self.folder / "sweep.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        return results

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def train_command(run: str, trial: Trial, ranks: int) -> list[str]:
    """Build the `grpox train` command, which resumes an earlier run in the same folder."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, "-m", "grpox", "train", run, *trial.overrides, "--resume", "auto"]


def _terminate(processes: Sequence[workers.Child]) -> None:
    for process in processes:
        # Not to the process group: a launcher forwards the signal, and a second signal would end a run at once.
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + END_SECONDS
    for process in processes:
        while not process.has_ended() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()


def _devices(parallel: int, ranks: int) -> list[dict[str, str]]:
    """Assign GPUs to each slot if there are enough for all slots; else assign none."""
    if parallel == 1:
        return [{}]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(number) for number in range(len(gpus_here()))]
    if len(devices) < parallel * ranks:
        return [{}] * parallel
    groups = (devices[slot * ranks : (slot + 1) * ranks] for slot in range(parallel))
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]


# -- Results -----------------------------------------------------------------------------------------------


def last_values(folder: Path) -> dict[str, float]:
    """Read the last value of each metric in metrics.jsonl, evaluations under ``evaluation/``, and ``step``."""
    values: dict[str, float] = {}
    for line in lines_of(folder / "metrics.jsonl"):
        with suppress(ValueError):  # a line cut off by a kill
            parsed = MetricsLine.parse(line)
            values |= parsed.named_values | {"step": float(parsed.step)}
    return values


def lines_of(path: Path) -> list[str]:
    """Read the lines of a run's file; none if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def as_table(results: SweepResults, names: Mapping[str, str]) -> Table:
    """Draw a table for the terminal; the best run is marked.

    Args:
        names: key of an axis -> heading.
    """
    table = folding_table("", *names.values())
    table.add_column("status", no_wrap=True)
    for heading in (results.metric, "steps", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("folder", overflow="fold")
    best = results.best
    for result in results.runs:
        table.add_row(
            "*" if result is best else "",
            *(Text(result.setting[key]) for key in names),
            Text(result.status, STYLES[result.status]),
            "" if result.value is None else f"{result.value:.4g}",
            str(result.steps),
            "" if result.seconds is None else duration(result.seconds),
            Text(result.folder),
            style="bold" if result is best else "",
        )
    return table


def conclusions(results: SweepResults) -> Iterator[str]:
    """Yield the lines below the table: statistics over seeds, the best run, and the failed ones.

    For each setting with several seeds, a line has the metric's mean and standard deviation over the seeds.
    """
    groups = defaultdict[str, list[float]](list)
    for result in results.finished:
        if SEED in result.setting and result.value is not None:
            setting = [f"{key}={value}" for key, value in result.setting.items() if key != SEED]
            groups[f"{', '.join(setting)}: " if setting else ""].append(result.value)
    for where, values in groups.items():
        if len(values) > 1:
            mean, spread = statistics.mean(values), statistics.stdev(values)
            yield f"{where}{results.metric} {mean:.4g} +- {spread:.2g} over {len(values)} seeds"
    if best := results.best:
        yield f"best: {best.name}, {results.metric} {best.value:.4g}"
    for result in results.runs:
        if result.status == "FAILED":
            yield f"failed: {result.name}: {result.error or 'see its log'}\n    {result.folder}.log"
