"""A sweep from its command to its table: runs as child processes, some at a time, none left behind."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from grpox.cli.sweep_grid import Child, Grid, plan_children, read_grid
from grpox.cli.sweep_results import as_table, conclusions, last_values, lines_of
from grpox.contracts import SweepContext, SweepResults, SweptRun
from grpox.errors import ConfigError, RunFailed, nearest
from grpox.errors.console import Console
from grpox.errors.formatting import duration, pluralize
from grpox.errors.redaction import redact
from grpox.observing.observers import Observers
from grpox.policy.memory_plan.fit import gpus_here
from grpox.runfile.load import load_run
from grpox.runtime import launch, workers
from grpox.runtime.files import write_atomically

POLL = 0.2
"""Seconds between two checks of the processes."""
END_SECONDS = 60.0
"""Seconds that interrupted runs have for their last step and checkpoint before they are killed."""

Status = Literal["FINISHED", "FAILED", "RUNNING", "WAITING", "KILLED"]


@dataclass
class Sweep:
    """A grid of checked runs."""

    run: str
    grid: Grid
    folder: Path
    children: Sequence[Child]
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
        self._say(f"{pluralize(len(self.children), 'run')} in {self.folder}")

    def results(self) -> SweepResults:
        """Read the results from the runs' folders."""
        return SweepResults(self.run, self.metric, self.lowest, tuple(map(self._result, self.children)))

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
            self._run_all(parallel)
        results = self.results()
        if failed := len(results.runs) - len(results.finished):
            raise RunFailed(f"{failed} of {pluralize(len(results.runs), 'run')} did not finish")
        if results.best is None:
            known = sorted({name for run in results.runs for name in last_values(Path(run.folder))} - {"step"})
            near = nearest(self.metric, known)
            hint = f"; did you mean {near}?" if near else f"; recorded metrics: {', '.join(known[:20])}"
            raise RunFailed(f"no run recorded a value of the metric {self.metric}{hint}")

    def _run_all(self, parallel: int) -> None:
        """Run each run that is not complete to its end, `parallel` at a time.

        A failing run does not stop the others. On an interrupt, the running ones get SIGTERM, save a
        checkpoint, and are waited for.
        """
        waiting = [child for child in self.children if child.summary() is None]
        running: dict[int, tuple[Child, workers.Child, float]] = {}  # slot -> run, process, time of its start
        done = len(self.children) - len(waiting)
        skipped = f", {done} already complete" if done else ""
        self._say(f"{pluralize(len(self.children), 'run')} in {self.folder}{skipped}")
        first = load_run(self.run, self.children[0].overrides, self.ranks)
        sweep = SweepContext(
            config=self.children[0].config,
            folder=self.folder,
            source=self.run,
            axes=self.grid.axes,
            runs=len(self.children),
        )
        selected = [(name, first.build(f"tracking.{name}")) for name in first.config.tracking]
        self._observers = observers = Observers(first.registry.plugins.manager, selected)
        environment, devices = observers.sweep_started(sweep), _devices(parallel, self.ranks)
        status: Status = "KILLED"
        try:
            while waiting or running:
                while waiting and len(running) < parallel:
                    slot = min(set(range(parallel)) - running.keys())
                    child = waiting.pop(0)
                    process = self._start(child, {**environment, **devices[slot]})
                    running[slot] = child, process, time.monotonic()
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
                self._conclude(status)
                observers.sweep_finished(sweep, self.results(), status)

    def _start(self, child: Child, environment: Mapping[str, str]) -> workers.Child:
        self._status[child.name] = ("RUNNING", "")
        self._say(f"{child.name}: started")
        self._write()
        child.log.parent.mkdir(parents=True, exist_ok=True)
        with child.log.open("ab") as log:
            # In a session of its own: Ctrl-C in the terminal reaches this process alone, which ends the runs.
            # Where this one is killed, a run gets SIGTERM, so that the command can be repeated.
            command = train_command(self.run, child, self.ranks)
            return workers.Child(
                ["-m", workers.__name__, str(signal.SIGTERM.value), *command],
                stall=0,
                output=(log.fileno(), log.fileno()),
                environment={**os.environ, **environment},
            )

    def _end(self, child: Child, process: workers.Child, began: float) -> None:
        failed = process.end() != 0 or child.summary() is None
        printed = [line.strip() for line in lines_of(child.log) if line.strip()]
        error = redact(printed[-1]) if failed and printed else ""
        self._status[child.name] = ("FAILED" if failed else "FINISHED", error)
        result = self._result(child)
        value = "" if result.value is None else f", {self.metric} {result.value:.4g}"
        self._say(f"{child.name}: {result.status}{value} ({duration(time.monotonic() - began)})")

    def _result(self, child: Child) -> SweptRun:
        """Read the state of a run from its folder."""
        status, error = self._status.get(child.name, ("WAITING", ""))
        summary = child.summary()
        recorded = last_values(child.folder) if summary is not None or status != "WAITING" else {}
        value = recorded.get(self.metric, math.nan)
        return SweptRun(
            name=child.name,
            setting=dict(child.setting),
            status=status if summary is None else "FINISHED",
            value=value if math.isfinite(value) else None,
            steps=int(recorded.get("step", 0)),
            seconds=None if summary is None else summary.get("train_seconds"),
            folder=str(child.folder),
            run_id=None if self._observers is None else self._observers.tracked_run(child.folder),
            error=error if summary is None else "",
        )

    def _write(self) -> SweepResults:
        """Write the current results to ``sweep.json``, whole or not at all."""
        results = self.results()
        content = asdict(results) | {"best": results.best.name if results.best else None}
        write_atomically(self.folder / "sweep.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        return results

    def _conclude(self, status: Status) -> None:
        """Write and print the results of the runs."""
        if status == "KILLED":
            for name, (state, _) in self._status.items():
                if state == "RUNNING":
                    self._status[name] = ("KILLED", "")
        results = self._write()
        self.console.print(as_table(results, self.grid.names))
        for line in conclusions(results):
            self._say(line)
        if status == "KILLED":
            self._say("repeat the command to continue the sweep")

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
        ConfigError: the grid or a run is wrong (lists every problem), or this process is one of several ranks.
    """
    if launch.world_size() > 1:
        what = "must be started as one process: it starts the processes of its runs"
        raise ConfigError(what, "grpox sweep", allowed="no launcher; --nproc-per-node P for P ranks per run")
    grid = read_grid(arguments, seeds)
    folder, children = plan_children(run, grid, folder, ranks)
    config = children[0].config
    if metric is None and config.checkpoint.best is not None:
        metric, lowest = config.checkpoint.best, lowest or config.checkpoint.best_is in ("lowest", "min")
    return Sweep(run, grid, folder, children, ranks, metric or config.main_metric, lowest)


def train_command(run: str, child: Child, ranks: int) -> list[str]:
    """Build the `grpox train` command, which resumes an earlier run in the same folder."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, "-m", "grpox", "train", run, *child.overrides, "--resume", "auto"]


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
