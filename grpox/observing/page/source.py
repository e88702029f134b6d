"""Answers what the page of a run asks for, from the files in the run's folder, while the run writes them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from grpox.errors import ConfigError
from grpox.errors.formatting import duration, pluralize
from grpox.errors.redaction import redact, redacted
from grpox.observing.alarms import FILE as ALARMS
from grpox.observing.alarms import alarms_in, describe_alarm
from grpox.observing.early_stop import describe_early_stop
from grpox.observing.page.columns import Column, MetricsColumns, Numbers, decimate, plain, window
from grpox.observing.page.data import CONFIG, FAILURE, METRICS, SUMMARY, VERSIONS, read_config, read_json
from grpox.observing.page.rows import tokens_of
from grpox.observing.page.search import CompletionSearch
from grpox.observing.record_files import MOST_STEPS
from grpox.runfile.yaml_lines import Dumper
from grpox.runtime.files import readable
from grpox.runtime.run_lock import is_locked

Curve = tuple[Numbers, Numbers]
"""Steps and values."""
SYSTEM = "system"
"""Folder of the machines' measurements; the module that writes it imports torch."""
PACE_STEPS = 20
"""Number of last steps from which the rest of a run is estimated."""
_FIRST = ("reward", "evaluation/accuracy", "evaluation/success", "evaluation/reward")
"""Metrics that the page shows first."""
_TIME = "time/"
"""Prefix of the seconds of a step's phases."""


class RunSource:
    """The data of one run. Each public method is one question of the page, and returns plain values for JSON.

    Nothing is cached but what was read: an answer shows the files as they are. Calls from several threads wait
    for each other, except those to the completions.

    Args:
        folder: the run's output_dir; it may be empty, or missing until the run begins.
        name: name of the run on the page; default: the folder's.
    """

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder = folder.absolute()
        self.name = name or readable(self.folder.name)
        self._metrics = MetricsColumns(self.folder / METRICS)
        self._machines: dict[str, MetricsColumns] = {}
        self._lock = threading.RLock()
        self._search = CompletionSearch(self.folder)
        self.completions = self._search.search
        self._unreadable: list[str] = []
        """Faults of the files that the last answer of `run` read."""

    def prepare(self) -> None:
        """Read the metrics in a thread, so that the first answer finds them read."""
        threading.Thread(target=self.phases, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop the search in completions."""
        self._search.close()

    @property
    def status(self) -> str:
        """Status of the run: running, finished, failed or unfinished; the last is a killed run's.

        A run that is about to begin, without any record yet, counts as running.
        """
        if (self.folder / SUMMARY).exists():
            return "finished"
        if (self.folder / FAILURE).exists():
            return "failed"
        has_begun = any((self.folder / name).exists() for name in (METRICS, VERSIONS))
        has_begun |= self._metrics.generation > 0  # its folder was removed
        return "unfinished" if has_begun and not is_locked(self.folder) else "running"

    def run(self) -> dict[str, Any]:
        """Describe the run: outcome, progress, alarms, components, versions, machines and config."""
        with self._lock:
            self._read()
            self._unreadable.clear()
            versions, summary = self._mapping(VERSIONS), self._mapping(SUMMARY)
            text, config = self._read_config()
            alarms = alarms_in(summary or self._mapping(ALARMS))
            stopped = summary.get("stopped_early")
            steps = _steps(summary, versions, config)
            status = self.status
            return {
                "name": self.name,
                "folder": readable(self.folder),
                "status": status,
                "source": str(versions.get("source") or readable(self.folder.name)),
                "model": _section(config, "model").get("path"),
                "step": self._metrics.step,
                "steps": steps,
                "seconds": self._seconds(summary, status),
                "seconds_left": self._seconds_left(steps) if status == "running" else None,
                "error": redact(str(self._mapping(FAILURE).get("error") or "")),
                "stopped_early": describe_early_stop(stopped) if isinstance(stopped, Mapping) else "",
                "alarms": [{**alarm, "text": describe_alarm(alarm)} for alarm in alarms],
                "tiles": [list(tile) for tile in self._tiles(summary, status)],
                "components": [list(component) for component in components_of(config)],
                "versions": versions.get("versions") or {},
                "git_commit": versions.get("git_commit"),
                "config": text,
                "ranks": self._ranks(versions),
                "problems": list(self._problems()),
                "version": self._version(status),
            }

    def metrics(
        self,
        since: int = 0,
        first: float | None = None,
        last: float | None = None,
        points: int = 800,
        generation: int | None = None,
    ) -> dict[str, Any]:
        """Return the curves of metrics, each as steps and values.

        Args:
            since: `position` of an earlier answer; only values after it are returned.
            first: first step of the curves; None: the run's.
            last: last step of the curves.
            points: a curve has about this many points at most: see `decimate`.
            generation: `generation` of the answer that `since` is from; if the file was begun anew meanwhile,
                all values are returned.
        """
        with self._lock:
            self._read()
            metrics = self._metrics
            is_same = generation in (None, metrics.generation)
            line = metrics.line_at(since) if is_same and 0 < since <= metrics.position else 0
            series, described = {}, []
            for name, whole, curve in self._curves(line):
                described.append(_describe(name, whole))
                series[name] = [plain(each) for each in decimate(*window(*curve, first, last), points)]
            described.sort(key=_place)
            return {
                "position": metrics.position,
                "generation": metrics.generation,
                "names": described,
                "series": series,
            }

    def phases(self, step: int | None = None) -> dict[str, Any]:
        """Return the seconds of each phase of a step, on rank 0, and their history.

        Args:
            step: None: the last one.
        """
        with self._lock:
            self._read()
            columns = {name: column for name, column in self._metrics.columns.items() if name.startswith(_TIME)}
            curves = {name.removeprefix(_TIME): column.curve() for name, column in columns.items()}
            at = self._metrics.step if step is None else step
            phases = []
            for name, (steps, seconds) in curves.items():
                here = seconds[steps == at]
                if len(here) and math.isfinite(here[0]):
                    phases.append([name, float(here[0])])
            history = {name: [plain(each) for each in curve] for name, curve in _thinned(curves).items()}
            return {"step": at, "phases": phases, "history": history}

    def tokens(self, id: str) -> dict[str, Any]:
        """Return the tokens of a completion with their numbers; none where the run did not save them.

        Raises:
            ConfigError: no saved completion has this id.
        """
        return {"tokens": tokens_of(self.folder, id)}

    def _read(self) -> None:
        """Read what the run has written since the last call."""
        self._metrics.read()
        for path in sorted((self.folder / SYSTEM).glob("*.jsonl")):
            self._machines.setdefault(path.stem, MetricsColumns(path)).read()

    def _curves(self, line: int) -> Iterator[tuple[str, Curve, Curve]]:
        """Yield name, curve, and curve from a line on of each metric; curves of machines are always whole."""
        for name, column in self._metrics.columns.items():
            whole = column.curve()
            yield name, whole, column.curve(line) if line else whole
        for machine in self._machines.values():
            for name, column in machine.columns.items():
                curve = self._over_steps(machine, column)
                yield name, curve, curve

    def _over_steps(self, machine: MetricsColumns, column: Column) -> Curve:
        """Place the measurements of a machine between the steps during which they were taken."""
        numbers, values = column.curve()
        measured, moments = machine.times.curve()
        if not len(numbers) or not len(measured):
            return numbers, values
        moment = np.interp(numbers, measured, moments)
        steps, ends = self._metrics.times.curve()
        ends = np.maximum.accumulate(ends) if len(ends) else ends
        if not len(steps):
            return np.zeros_like(moment[-1:]), values[-1:]
        places = np.interp(moment, np.append(self._metrics.began - 1e-3, ends), np.append(0.0, steps))
        is_last = np.append(places[1:] != places[:-1], True)
        return places[is_last], values[is_last]

    def _read_config(self) -> tuple[str, Mapping[str, Any]]:
        """Return the config as text without secrets, and as data."""
        try:
            stat = (self.folder / CONFIG).stat()
            return _config_of(self.folder, stat.st_mtime_ns, stat.st_size)
        except ConfigError as error:
            self._unreadable.append(f"{CONFIG} {error.problems[0].what}")
        except OSError:  # there is none yet
            pass
        return "", {}

    def _mapping(self, name: str) -> Mapping[str, Any]:
        """Read a JSON file of the record; empty if it cannot be read, which `_problems` tells."""
        try:
            return read_json(self.folder / name)
        except ConfigError as error:
            self._unreadable.append(f"{name} {error.problems[0].what}")
            return {}

    def _ranks(self, versions: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the machines with their last measurements, and the number of ranks on the first."""
        machines: list[dict[str, Any]] = []
        for name, columns in sorted(self._machines.items(), key=lambda each: (len(each[0]), each[0])):
            last = {}
            for metric, column in columns.columns.items():
                label = metric.removeprefix(f"{SYSTEM}/").removeprefix(f"{name}/")
                last[label] = plain([column.last])[0]
            gpus = {label.split("_")[1] for label in last if label.startswith("gpu_")}
            device = pluralize(len(gpus), "GPU") if gpus else "CPU"
            machines.append({"host": name, "device": device, "values": last})
        size = versions.get("world_size")
        if not isinstance(size, int):
            return machines
        if len(machines) < 2:
            machine = machines[0] if machines else {}
            return [{"rank": rank, **machine} for rank in range(size)]
        each = -(-size // len(machines))
        return [{"rank": rank, **machines[min(rank // each, len(machines) - 1)]} for rank in range(size)]

    def _problems(self) -> Iterator[str]:
        if self._metrics.generation and not self.folder.exists():
            yield "the run's folder no longer exists: it was removed or renamed"
        yield from filter(None, [self._metrics.problem, *self._unreadable, self._search.problem])
        if lines := list(self._metrics.damaged):
            yield f"{METRICS}: {pluralize(len(lines), 'line')} cannot be read, the first is line {lines[0]}"

    def _seconds(self, summary: Mapping[str, Any], status: str) -> float:
        """Return the seconds of training so far."""
        metrics = self._metrics
        if isinstance(summary.get("train_seconds"), int | float):
            return float(summary["train_seconds"])
        now = time.time() if status == "running" else metrics.ended
        if (resumed := self._resumed()) is not None:
            return metrics.seconds + max(0.0, now - max(resumed, metrics.ended))
        started = metrics.began
        if math.isnan(started):
            with suppress(OSError):
                started = (self.folder / VERSIONS).stat().st_mtime
        elif (column := metrics.columns.get("step_time")) is not None and math.isfinite(column.first):
            started -= column.first
        return max(0.0, now - started) if math.isfinite(now - started) else 0.0

    def _resumed(self) -> float | None:
        """Return the Unix time of the last resume; None for a run that was not resumed.

        Each process of a run writes its versions anew, before its first line of metrics.
        """
        with suppress(OSError):
            written = (self.folder / VERSIONS).stat().st_mtime
            return written if written > self._metrics.began else None
        return None

    def _seconds_left(self, steps: int | None) -> float | None:
        """Estimate the rest of a run from its last steps; None before the second step.

        The steps before a resume do not count: the pause between is no part of their time.
        """
        done, moments = self._metrics.times.curve()
        if (resumed := self._resumed()) is not None and (is_new := moments > resumed).any():
            done, moments = done[is_new], moments[is_new]
        if steps is None or len(done) < 2:
            return None
        last = slice(-PACE_STEPS - 1, None)
        span = done[last][-1] - done[last][0]
        pace = (moments[last][-1] - moments[last][0]) / span
        return max(0.0, float(pace * (steps - done[-1])))

    def _version(self, status: str) -> list[Any]:
        """Return a value that differs from the last one if anything has changed."""
        files = [self.folder / name for name in (SUMMARY, FAILURE, ALARMS, CONFIG, VERSIONS, "completions")]
        positions = [source.position for source in (self._metrics, *self._machines.values())]
        times = [path.stat().st_mtime_ns if path.exists() else 0 for path in files]
        return [status, self._metrics.generation, *positions, *times]

    def _tiles(self, summary: Mapping[str, Any], status: str) -> Iterator[tuple[str, str, str]]:
        """Yield (name, value, remark) for the numbers at the top of the page."""
        columns = self._metrics.columns
        for name, metric in (
            ("accuracy", "evaluation/accuracy"),
            ("success", "evaluation/success"),
            ("reward", "reward"),
        ):
            if metric in columns:
                steps, values = columns[metric].curve()
                ends = [(steps[0], values[0]), (steps[-1], values[-1])]
                shown = dict.fromkeys(f"{value:.3g}" for _, value in ends)
                when = dict.fromkeys(f"at step {step:.0f}" if step else "before training" for step, _ in ends)
                yield name, " \N{RIGHTWARDS ARROW} ".join(shown), " and ".join(when)
        yield "steps", number(self._metrics.step), "of the optimizer"
        yield "time", duration(self._seconds(summary, status)), "of training"
        if "num_tokens" in columns:
            yield "tokens", number(columns["num_tokens"].last), "prompts and completions"
        trained, total = (summary.get(name) for name in ("trained_parameters", "parameters"))
        if trained and total and trained != total:
            yield "trained", f"{trained / total:.2%}", f"{trained:,} of {total:,} parameters, in adapters"


@lru_cache
def _config_of(folder: Path, mtime_ns: int, size: int) -> tuple[str, Mapping[str, Any]]:
    """Read a config, once as long as the file stays as it is: it takes a part of a second."""
    text, content = read_config(folder)
    config = redacted(content)
    if config != content:  # another program has written secrets into it
        text = yaml.dump(config, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text, config


def number(value: float | None) -> str:
    """Format a number with four digits, and whole numbers in full; None becomes a dash."""
    if value is None:
        return "\N{EN DASH}"
    text = f"{value:,.0f}" if abs(value) >= 1e4 and math.isfinite(value) else f"{value:.4g}"
    return text.replace("-", "\N{MINUS SIGN}") if value < 0 else text


def components_of(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, name, parameters) of each component of a run."""
    names = ("evaluation", "train", "data", "tracking")
    evaluation, train, data, tracking = (_section(config, name) for name in names)
    refs: list[tuple[str, Any]] = []
    for kind, section in (("reward", config), ("reward of evaluations", evaluation)):
        rewards = section.get("rewards")
        refs += [(kind, ref) for ref in rewards] if isinstance(rewards, list) else []
    refs += [(kind, config.get(kind)) for kind in ("generator", "advantage", "loss", "correction")]
    refs += [(kind, train.get(kind)) for kind in ("optimizer", "scheduler")]
    refs += [("dataset", data.get("source"))]
    refs += [("observer", {"name": name, **_section(tracking, name)}) for name in tracking]
    for kind, ref in refs:
        if isinstance(ref, Mapping):
            values = {key: value for key, value in ref.items() if key not in ("name", "path")}
            parameters = ", ".join(f"{key}: {value}" for key, value in values.items() if value is not None)
            yield kind, str(ref.get("name") or ref.get("path")), parameters


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _steps(*records: Mapping[str, Any]) -> int | None:
    """Return the planned steps of a run from its summary, versions or config; None if they name none."""
    summary, versions, config = records
    known = (versions.get("total_steps"), _section(config, "train").get("max_steps"), summary.get("steps"))
    return next((steps for steps in known if isinstance(steps, int) and 0 <= steps <= MOST_STEPS), None)


def _thinned(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Reduce the curves of all phases to the same steps: those at which their sum is lowest or highest."""
    every = np.unique(np.concatenate([np.empty(0), *(steps for steps, _ in curves.values())]))
    total = np.zeros(len(every))
    for steps, seconds in curves.values():
        total[np.searchsorted(every, steps)] += np.where(np.isfinite(seconds), seconds, 0.0)
    chosen, _ = decimate(every, total, 800)
    thinned = {}
    for name, (steps, seconds) in curves.items():
        is_chosen = np.isin(steps, chosen)
        thinned[name] = steps[is_chosen], seconds[is_chosen]
    return thinned


def _describe(name: str, curve: Curve) -> dict[str, Any]:
    """Return the entry of a metric in the list of names."""
    values = curve[1]
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (math.nan, math.nan)
    first, last, least, most = plain([values[0], values[-1], low, high]) if len(values) else [None] * 4
    return {
        "name": name,
        "first": first,
        "last": last,
        "min": least,
        "max": most,
        "not_finite": len(values) - len(finite),
        "is_flat": not low < high,
    }


def _place(entry: Mapping[str, Any]) -> tuple[bool, int, str]:
    """Order names: flat ones last; before them reward, evaluations, rewards, the others."""
    name = str(entry["name"])
    if name in _FIRST:
        return False, _FIRST.index(name), name
    rank = next(place for place, start in enumerate(("evaluation/", "rewards/", "")) if name.startswith(start))
    return bool(entry["is_flat"]), len(_FIRST) + rank, name
