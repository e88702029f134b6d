"""Contract of every observer, as a suite that calls it as the trainer does."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from itertools import product
from pathlib import Path

from grpox.contracts import Rollout, RunContext, ScoredRollout
from grpox.observing.control import RunControl
from grpox.observing.observers import Observers
from grpox.observing.record import LocalRecord, files_of_observers
from grpox.plugins.loader import new_manager
from grpox.runfile.load import load_run
from grpox.testing.conformance import Conformance, require

METRICS = {"reward": 0.5, "loss": -0.1, "grad_norm": 1.5, "time/generate": 0.2}
HYPERPARAMETERS = {"learning_rate_factor": 1.0, "beta": 0.04, "entropy_coef": 0.001}
ALARM = {"name": "kl_runaway", "step": 2, "value": "nan"}
ODD_METRICS = {"reward": float("nan"), "loss": float("inf"), "mine/with a space": -0.0, "kl": 1e-30}


class ObserverConformance(Conformance):
    """The checks of an observer. Each run is a short one, into a folder that is removed afterwards."""

    kind = "observer"

    def test_runs(self) -> None:
        """Follows a run from start to end, and raises nowhere."""
        with self._started() as (run, observers):
            _middle(observers, run, dict(METRICS))
            observers.checkpoint_saved(run, 2, run.output_dir)
            _finish(observers, run, {"steps": 2, "reward": 0.5})

    def test_failed_runs(self) -> None:
        """Follows a run that fails, in the middle or before its first step."""
        for error, middle in product((RuntimeError("out of memory"), KeyboardInterrupt()), (True, False)):
            with self._started() as (run, observers):
                if middle:
                    _middle(observers, run, dict(METRICS))
                observers.run_failed(run, error)

    def test_odd_numbers(self) -> None:
        """Takes metrics that are not finite, names with spaces, and rewards that are None."""
        with self._started() as (run, observers):
            _middle(observers, run, ODD_METRICS)
            _finish(observers, run, {"steps": 2, "reward": None})

    def test_two_runs(self) -> None:
        """One process may run twice: the second run is another one."""
        self.test_runs()
        self.test_runs()

    @contextmanager
    def _started(self) -> Iterator[tuple[RunContext, Observers]]:
        """Start a run with its observers; in the end none of them may have raised."""
        observer = self.build()  # outside the folder: its path may be relative
        with _folder() as folder:
            config = load_run("quickstart", [f"output_dir={folder}"]).config
            run = RunContext(config, folder, 2, 1, {"grpox": "0"}, None, "quickstart")
            # Trackers upload what the run's own record has written.
            record = LocalRecord(files_of_observers([observer]))
            observers = Observers(new_manager(), [("record", record), ("it", observer)])
            observers.run_started(run)
            yield run, observers
            what = observers.first_failure.removeprefix("observer 'it' ")
            advice = "in a run that is a warning, and what it should have recorded is lost"
            require(not observers.failures, what, advice=advice)


def _middle(observers: Observers, run: RunContext, metrics: dict[str, float]) -> None:
    """Report two steps, an alarm and an evaluation."""
    control = RunControl(HYPERPARAMETERS, dict.fromkeys(HYPERPARAMETERS, _accept))
    observers.evaluated(run, 0, {"eval/accuracy": 0.3}, control)
    for step in (1, 2):
        observers.rollouts_scored(run, step, _rollouts())
        observers.step_finished(run, step, metrics, control)
    observers.alarm_raised(run, 2, ALARM, control)
    observers.evaluated(run, 2, {"eval/accuracy": metrics["reward"]}, control)


def _accept(value: float) -> None:
    """Accept the values that a run accepts; a ValueError refuses others."""
    if value < 0:
        raise ValueError(f"{value:g} is negative")


def _finish(observers: Observers, run: RunContext, summary: dict[str, object]) -> None:
    """Report the end of the run; its summary is on disk before."""
    (run.output_dir / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    observers.run_finished(run, summary)


def _rollouts() -> list[ScoredRollout]:
    """Build a scored rollout, and one on which every reward function abstained."""
    scored = Rollout(0, 0, (5, 6), (7, 2), "stop", 0, (-0.1, -0.2))
    unscored = Rollout(0, 1, (5, 6), (8,), "length", 0)
    return [
        ScoredRollout(scored, "2+3=", "5", {"exact": 1.0, "brief": None}, 1.0, 0.7, {"note": "right"}),
        ScoredRollout(unscored, "2+3=", "\u4e2d", {"exact": None, "brief": None}, float("nan"), 0.0),
    ]


@contextmanager
def _folder() -> Iterator[Path]:
    """Create a run's folder within a temporary working directory, which is removed with it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, chdir(name):
        folder = Path(name) / "run"
        folder.mkdir()
        yield folder
