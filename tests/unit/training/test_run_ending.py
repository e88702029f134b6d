"""End of a run: its last evaluation, the steps after it, and an early end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from grpox.checkpoint.progress import TrainingState
from grpox.config import EarlyStopConfig, RunConfig
from grpox.errors import RunClosed
from grpox.observing.early_stop import EarlyStop
from grpox.observing.record import config_text, finished
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World
from grpox.training.python_run import _end
from grpox.training.trainer import Trainer

VALUES = {0: 0.1, 2: 0.5, 4: 0.5, 6: 0.4, 8: 0.9, 9: 0.2}
"""Step -> accuracy; no evaluation of other steps is expected."""


class Run:
    """A trainer that takes 9 steps of nothing and evaluates every 2, with what happened in order."""

    def __init__(self, early_stop: EarlyStop | None = None, evaluates: bool = True, steps: int = 0) -> None:
        self.happened: list[str] = []
        engine = SimpleNamespace(steps=steps)
        parts: dict[str, Any] = {
            "context": None,
            "schedule": SimpleNamespace(total_steps=9, steps=self.plans),
            "feed": SimpleNamespace(progress=lambda step: step),
            "policy": SimpleNamespace(engine=engine),
            "evaluator": self if evaluates else None,
            "observers": SimpleNamespace(evaluated=lambda *_: None),
            "report": None,
            "components": None,
            "steering": SimpleNamespace(apply=self.apply, control=None),
            "checkpoints": SimpleNamespace(after_step=self.after_step, finish=lambda: None),
        }
        alone = World(0, 1, torch.device("cpu"))
        self.state = TrainingState(early_stop=early_stop)
        self.trainer: Any = Trainer(world=alone, state=self.state, times=PhaseTimes(), **parts)
        self.trainer.train_step = self.train_step

    def is_due(self, step: int, total_steps: int) -> bool:
        return step == total_steps or step % 2 == 0

    def plans(self, done: int) -> list[Any]:
        return [SimpleNamespace(step=step) for step in range(done + 1, 10)]

    def train_step(self, plan: Any) -> None:
        self.trainer.policy.engine.steps = plan.step
        self.state.metrics = {"loss": 0.0}

    def evaluate(self, step: int) -> dict[str, float]:
        self.happened.append(f"evaluation {step}")
        return {"accuracy": VALUES[step]}

    def apply(self) -> None:
        """Do nothing between two steps: no observer asks for anything."""

    def after_step(self, state: TrainingState, step: int, last: bool) -> None:
        told = state.metrics.get("evaluation/accuracy")
        self.happened.append(f"checkpoint {step} {told}" + (" last" if last else ""))


def stop(patience: int) -> EarlyStop:
    return EarlyStop(EarlyStopConfig(metric="accuracy", patience=patience))


def test_the_last_evaluation_is_there_when_the_last_checkpoint_is_saved() -> None:
    run = Run()
    summary = run.trainer.run()
    assert run.happened[-4:] == ["evaluation 8", "checkpoint 8 0.9", "evaluation 9", "checkpoint 9 0.2 last"]
    assert (summary["steps"], summary["accuracy_before"], summary["accuracy_after"]) == (9, 0.1, 0.2)
    assert "stopped_early" not in summary


def test_a_run_that_shows_no_more_gain_ends_as_one_that_took_all_its_steps() -> None:
    run = Run(stop(2))
    summary = run.trainer.run()
    assert run.happened[-2:] == ["evaluation 6", "checkpoint 6 0.4 last"]
    assert (summary["steps"], summary["accuracy_after"]) == (6, 0.4)
    assert summary["stopped_early"]["best_step"] == 2
    summary = Run(stop(3)).trainer.run()  # without a gain: 4, 6; then 0.9, and 9, which is the last anyway
    assert (summary["steps"], "stopped_early" in summary) == (9, False)


@pytest.mark.parametrize("step", [6, 9])
def test_a_run_that_goes_on_from_its_end_neither_trains_nor_evaluates_again(step: int) -> None:
    early = stop(2)
    if step == 6:
        early.see(2, {"accuracy": 0.5})
        early.see(4, {"accuracy": 0.5})
        early.see(6, {"accuracy": 0.4})
    run = Run(early, steps=step)
    run.state.evaluation_before = {"accuracy": 0.1}
    run.state.evaluation = {"accuracy": VALUES[step]}
    summary = run.trainer.run()
    assert run.happened == []
    assert (summary["steps"], summary["accuracy_after"]) == (step, VALUES[step])
    assert ("stopped_early" in summary) == (step == 6)


def test_an_evaluation_that_is_missing_is_made_and_without_evaluations_there_is_no_accuracy() -> None:
    run = Run(steps=9)
    run.state.evaluation_before = {"accuracy": 0.1}
    assert run.trainer.run()["accuracy_after"] == 0.2
    assert run.happened == ["evaluation 9"]
    run = Run(evaluates=False)
    assert "accuracy_after" not in run.trainer.run()
    assert len(run.happened) == 9


def test_a_run_is_complete_whatever_changes_nothing_that_it_computed(tmp_path: Path) -> None:
    """Also one whose record was written by a grpox that did not know all keys, or that was moved since."""

    def config_of(**changed: Any) -> RunConfig:
        given = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": ["exact"]}
        return RunConfig.model_validate(given | {"output_dir": str(tmp_path)} | changed)

    evaluation: dict[str, Any] = {"path": "h", "early_stop": {"metric": "accuracy"}}
    recorded = yaml.safe_load(config_text(config_of(evaluation=evaluation)))
    del recorded["checkpoint"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recorded | {"output_dir": "elsewhere"}))

    def is_done(summary: dict[str, Any], **changed: Any) -> bool:
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        return finished(config_of(**{"evaluation": evaluation} | changed), 9) is not None

    assert is_done({"steps": 9}, tracking={}, checkpoint={"every": 3})
    assert not is_done({"steps": 9}, train={"learning_rate": 0.5})
    assert not is_done({"steps": 9}, train={"gradient_accumulation_steps": 2})
    patient = evaluation | {"early_stop": {"metric": "accuracy", "patience": 5}}
    assert is_done({"steps": 9}, evaluation=patient)
    stopped = {"steps": 6, "stopped_early": {"step": 6}}
    assert is_done(stopped, tracking={})
    assert not is_done(stopped, evaluation=patient)  # it may go on
    assert not is_done({"steps": 6})


def test_an_observer_ends_the_run_before_the_checkpoint_of_that_step() -> None:
    run = Run()

    def apply() -> None:
        if run.trainer.policy.engine.steps == 4:
            run.state.control.stop_reason = "enough"

    run.trainer.steering.apply = apply
    summary = run.trainer.run()
    assert run.happened[-2:] == ["evaluation 4", "checkpoint 4 0.5 last"]
    assert summary["stopped_early"] == {"step": 4, "reason": "enough"}
    assert summary["accuracy_after"] == 0.5


def test_the_end_of_a_run_that_was_not_closed_is_told(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[str] = []

    @contextmanager
    def opened() -> Iterator[None]:
        try:
            yield
        except RunClosed as error:
            errors.append(str(error))
            raise

    stack = ExitStack()
    stack.enter_context(opened())
    _end(stack, "the program ended")
    assert errors == ["the program ended"]
    assert caplog.messages == ["a run was not closed: the program ended"]
