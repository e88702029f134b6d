"""THE loop: prompts -> rollouts -> rewards -> advantages -> micro-batches -> update -> weight sync.

`Trainer.run` is the run, `Trainer.train_step` one optimizer step; each of their lines calls one named part.
The generator gets the new weights when the next generation batch is collected. With `train.max_staleness: 1`
that batch is begun before the update instead, with the old weights.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from grpox.checkpoint.progress import TrainingState
from grpox.checkpoint.saver import CheckpointSaver
from grpox.config.sampling import PREFIX, bare_name
from grpox.contracts import RunContext
from grpox.data.schedule import Schedule, StepPlan
from grpox.observing.observers import Observers
from grpox.runtime.determinism import deterministic_algorithms
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.signals import Terminated, first_signal_waits, raise_if_signalled, signalled
from grpox.runtime.world import World
from grpox.training.components import RunComponents
from grpox.training.evaluation import Evaluator
from grpox.training.generation_feed import GenerationFeed
from grpox.training.steering import Steering
from grpox.training.step_report import StepReport
from grpox.update.policy_update import PolicyUpdate

GOING_ON = "ending after this step, with a checkpoint; once more to end at once"


@dataclass
class Trainer:
    """Runs the schedule. Its parts are put together in `grpox.training.run`."""

    context: RunContext
    world: World
    schedule: Schedule
    state: TrainingState
    feed: GenerationFeed
    policy: PolicyUpdate
    evaluator: Evaluator | None
    observers: Observers
    report: StepReport
    steering: Steering
    components: RunComponents
    checkpoints: CheckpointSaver
    times: PhaseTimes

    def run(self) -> dict[str, Any]:
        """Train to the end; returns the accuracy before and after (if there is an evaluation) and the time."""
        done = self.policy.engine.steps
        if done == 0:
            self.state.evaluation_before = self.evaluate(0)
        raise_if_signalled()
        self.state.started = time.perf_counter()
        train_seconds = self.state.seconds_before
        with first_signal_waits(GOING_ON if self.world.is_main else ""):
            for plan in self.schedule.steps(done):
                if self.ended:
                    break
                self.train_step(plan)
                train_seconds = self.state.seconds  # the last evaluation is no part of training
                if self.evaluator is not None and self.evaluator.is_due(plan.step, self.schedule.total_steps):
                    self.evaluate(plan.step)
                self.steering.apply()
                self.checkpoints.after_step(self.state, plan.step, last=self.ended)
                self.stop_if_signalled(plan.step)
        if not self.state.evaluation:  # a run that goes on from its last step, not evaluated yet
            self.evaluate(self.policy.engine.steps)
        self.checkpoints.finish()
        raise_if_signalled()  # before the model is saved
        return self.summary(train_seconds)

    def train_step(self, plan: StepPlan) -> None:
        """Take one optimizer step: collect the missing samples, then update the policy."""
        start = time.perf_counter()
        self.components.begin_step(plan.step, self.feed.progress(plan.step - 1))
        new = self.feed.collect(plan)
        self.feed.prefetch(plan)
        micro_batches = self.feed.micro_batches(plan)
        try:
            with self.times.phase("update"), deterministic_algorithms(self.context.config.train.deterministic):
                self.policy.score_old(self.feed.later_micro_batches(plan))
                update = self.policy.step(micro_batches)
        finally:  # also of a step that ends the run
            self.report.rollouts_scored(plan.step, new)
        self.components.end_step(plan, micro_batches)
        self.feed.forget_used(plan)
        seconds, epoch = time.perf_counter() - start, self.feed.progress(plan.step).epoch
        self.report.step_finished(plan.step, epoch, new, micro_batches, update, seconds)

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the weights after `step` optimizer steps; empty when the run has no evaluation."""
        if self.evaluator is None:
            return {}
        metrics = self.evaluator.evaluate(self.feed.progress(step))
        self.times.take()  # an evaluation's time is no part of the next step's
        self.state.evaluation = metrics
        if self.world.is_main:
            of_evaluation = {f"{PREFIX}{bare_name(name)}": metrics[name] for name in metrics}
            self.state.metrics = self.state.metrics | of_evaluation
            self.observers.evaluated(self.context, step, metrics, self.steering.control)
        if self.state.early_stop is not None:
            self.state.early_stop.see(step, metrics)
        return metrics

    @property
    def ended(self) -> bool:
        """True when the run takes no further step."""
        stops = self.state.early_stop is not None and self.state.early_stop.stops
        stops = stops or bool(self.state.control.stop_reason)
        return stops or self.policy.engine.steps >= self.schedule.total_steps

    def stop_if_signalled(self, step: int) -> None:
        """End all ranks after a checkpoint, if any rank has a signal; a collective between two steps."""
        if any(self.world.gather([signalled()])):
            self.checkpoints.save(self.state, step, wait=True)
            raise_if_signalled()
            raise Terminated  # the signal came to another rank alone

    def summary(self, train_seconds: float) -> dict[str, Any]:
        """Return the run's length, its skipped steps and its accuracy."""
        steps, state = self.policy.engine.steps, self.state
        summary: dict[str, Any] = {"train_seconds": train_seconds, "steps": steps}
        if state.skipped.total:
            summary["skipped_steps"] = state.skipped.total
        if self.evaluator:
            before, after = state.evaluation_before["accuracy"], state.evaluation["accuracy"]
            summary |= {"accuracy_before": before, "accuracy_after": after}
        if state.control.stop_reason:
            summary["stopped_early"] = {"step": steps, "reason": state.control.stop_reason}
        elif state.early_stop is not None and steps < self.schedule.total_steps:
            summary["stopped_early"] = state.early_stop.summary(steps)
        return summary
