"""THE loop: prompts -> rollouts -> rewards -> advantages -> micro-batches -> update -> weight sync.

`Trainer.run` is the run, `Trainer.train_step` one optimizer step; each of their lines calls one named part.
The generator gets the new weights when the next generation batch is collected. With `train.max_staleness: 1`
that batch is begun before the update instead, with the old weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from grpox.checkpoint.components import RunComponents
from grpox.checkpoint.progress import TrainingState
from grpox.checkpoint.saver import CheckpointSaver
from grpox.config.sampling import PREFIX, bare_name
from grpox.contracts import RunContext
from grpox.data.schedule import Schedule, StepPlan
from grpox.observing.observers import Observers
from grpox.runtime.determinism import deterministic_algorithms
from grpox.runtime.phases import WAITING, PhaseTimes
from grpox.runtime.signals import Terminated, first_signal_waits, raise_if_signalled, signalled
from grpox.runtime.world import World
from grpox.training.evaluation import Evaluation, outcomes_of
from grpox.training.generation_feed import GenerationFeed
from grpox.training.steering import Steering
from grpox.training.step_report import StepReport
from grpox.update.mismatch import first_step_measures
from grpox.update.policy_update import PolicyUpdate

Follow = Callable[[str, int, Mapping[str, float]], None]
"""Function of the event (``step``, with metrics on rank 0 alone, or ``evaluation``), the step and metrics."""
GOING_ON = "ending after this step, with a checkpoint, or the model if it is the last; once more to end at once"


@dataclass
class Trainer:
    """Runs the schedule. Its parts are put together in `grpox.training.run`."""

    context: RunContext
    world: World
    schedule: Schedule
    state: TrainingState
    feed: GenerationFeed
    policy: PolicyUpdate
    evaluator: Evaluation | None
    observers: Observers
    report: StepReport
    steering: Steering
    components: RunComponents
    checkpoints: CheckpointSaver
    times: PhaseTimes
    follow: Follow = lambda kind, step, metrics: None
    """Called on every rank after each step and evaluation."""
    has_own_numerics: bool = True
    """True if the generator does not compute its log-probabilities as the trainer does."""
    _train_seconds: float | None = None
    """Seconds until the end of the last step; None before `start`."""
    _is_first: bool = True
    """True until this process has taken a step."""

    def run(self) -> dict[str, Any]:
        """Train to the end; return the time and, with an evaluation, the results before and after."""
        self.start()
        with first_signal_waits(GOING_ON if self.world.is_main else ""):
            while not self.ended:
                self.next_step()
        if not self.state.evaluation:  # a run that goes on from its last step, not evaluated yet
            self.evaluate(self.policy.engine.steps)
        self.checkpoints.finish()
        assert self._train_seconds is not None
        return self.summary(self._train_seconds)

    def start(self) -> None:
        """Evaluate the model before the first step, if the run begins here and was not started before."""
        if self._train_seconds is not None:
            return
        if self.policy.engine.steps == 0:
            self.state.evaluation_before = self.evaluate(0)
        raise_if_signalled()
        self.state.started = time.perf_counter()
        self._train_seconds = self.state.seconds_before

    def next_step(self) -> None:
        """Take the next optimizer step, then what is due after it: evaluation, requests, checkpoint."""
        plan = next(iter(self.schedule.steps(self.policy.engine.steps)))
        self.train_step(plan)
        self._train_seconds = self.state.seconds  # the last evaluation is no part of training
        self.follow("step", plan.step, self.state.metrics)
        if self.evaluator is not None and self.evaluator.is_due(plan.step, self.schedule.total_steps):
            self.evaluate(plan.step)
        self.steering.apply()
        self.checkpoints.after_step(self.state, plan.step, last=self.ended)
        self.stop_if_signalled(plan.step)

    def train_step(self, plan: StepPlan) -> None:
        """Take one optimizer step: collect the missing samples, then update the policy."""
        start, config = time.perf_counter(), self.context.config
        if self.components.has_begin_step:
            self.components.begin_step(plan.step, self.feed.progress(plan.step - 1))
        new = self.feed.collect(plan)
        self.feed.prefetch(plan)
        micro_batches = self.feed.micro_batches(plan)
        try:
            numerics = deterministic_algorithms() if config.train.deterministic else nullcontext()
            with self.times.phase("update"), numerics:
                self.policy.score_old(self.feed.later_micro_batches(plan))
                update = self.policy.step(micro_batches)
            if self._is_first and new and (plan.step == 1 or not config.train.max_staleness):
                # After a resume the reference has other weights.
                equal = {name: update[name] for name in update if plan.step == 1 or name != "kl"}
                update |= first_step_measures(equal, config, self.policy.engine.module, self.has_own_numerics)
            self._is_first = False
            if {"loss", "grad_norm"} <= update.keys():  # a step that was not taken lacks one of them
                self.state.losses = [self.state.losses[0] + update["loss"], self.state.losses[1] + 1]
        finally:  # also of a step that ends the run
            self.report.rollouts_scored(plan.step, new)
        if self.feed.choice is not None and self.feed.choice.concerns(plan):
            self.report.tokens_recorded(plan.step, self.world.gather(self.policy.token_facts))
        if self.components.has_end_step:
            self.components.end_step(plan, micro_batches)
        self.feed.forget_used(plan)
        seconds, epoch = time.perf_counter() - start, self.feed.progress(plan.step).epoch
        self.report.step_finished(plan.step, epoch, new, micro_batches, update, seconds)

    def evaluate(self, step: int, scheduled: bool = True) -> dict[str, float]:
        """Evaluate the weights after `step` optimizer steps; empty when the run has no evaluation.

        Args:
            scheduled: the run's own evaluation, which early stopping counts.
        """
        if self.evaluator is None:
            return {}
        metrics = self.evaluator.evaluate(self.feed.progress(step))
        self.times.take()  # an evaluation's time is no part of the next step's
        self.state.evaluation = metrics
        if self.world.is_main:
            of_evaluation = {f"{PREFIX}{bare_name(name)}": metrics[name] for name in metrics}
            self.state.metrics = self.state.metrics | of_evaluation
            self.observers.evaluated(self.context, step, metrics, self.steering.control)
        if scheduled and self.state.early_stop is not None:
            self.state.early_stop.see(step, metrics)
        self.follow("evaluation", step, metrics)
        return metrics

    def evaluate_between_steps(self) -> None:
        """Evaluate the current weights on request, and apply the requests of observers at once.

        The evaluation before the first step is the run's own.
        """
        step = self.policy.engine.steps
        is_first = step == 0 and self._train_seconds is None
        self.start()
        if not is_first:
            self.evaluate(step, scheduled=False)
        self.steering.apply()
        if step and self.ended:
            self.checkpoints.after_step(self.state, step, last=True)

    @property
    def ended(self) -> bool:
        """True if the run takes no further step."""
        stops = self.state.early_stop is not None and self.state.early_stop.stops
        stops = stops or bool(self.state.control.stop_reason)
        return stops or self.policy.engine.steps >= self.schedule.total_steps

    def stop_if_signalled(self, step: int) -> None:
        """End all ranks after a checkpoint, if any rank has a signal; a collective between two steps.

        After the last step, the run is finished instead.
        """
        with self.times.phase(WAITING):
            signals = self.world.gather([signalled()])
        if any(signals) and not self.ended:
            self.checkpoints.save(self.state, step, wait=True)
            raise_if_signalled()
            raise Terminated  # the signal came to another rank alone

    def summary(self, train_seconds: float) -> dict[str, Any]:
        """Return the run's length, its skipped steps and the results of its evaluations."""
        steps, state = self.policy.engine.steps, self.state
        summary: dict[str, Any] = {"train_seconds": train_seconds, "steps": steps}
        total, count = state.losses
        if count:
            summary["training_loss"] = total / count
        if state.skipped.total:
            summary["skipped_steps"] = state.skipped.total
        if state.alarms is not None:  # rank 0 has seen the metrics, all ranks return the summary
            own = state.alarms.state.raised if self.world.is_main else []
            summary["alarms"] = [alarm.entry() for alarm in self.world.gather(own)]
        if self.evaluator:
            summary |= outcomes_of(state.evaluation_before, state.evaluation)
        if state.control.stop_reason:
            summary["stopped_early"] = {"step": steps, "reason": state.control.stop_reason}
        elif state.early_stop is not None and steps < self.schedule.total_steps:
            summary["stopped_early"] = state.early_stop.summary(steps)
        return summary
