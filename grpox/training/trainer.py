"""THE loop: prompts -> rollouts -> rewards -> advantages -> micro-batches -> update -> weight sync.

`Trainer.run` is the run, `Trainer.train_step` one optimizer step; each of their lines calls one named part.
The generator takes the new weights when the next generation batch is collected, not before they are needed.
With `train.max_staleness: 1` that batch is begun before the update instead, with the weights of then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from grpox.checkpoint.saver import CheckpointSaver
from grpox.config.evaluation_settings import PREFIX, bare_name
from grpox.contracts import RunContext, TrainerState
from grpox.data.prompt_cursor import PromptDraws
from grpox.data.schedule import MicroBatch, Schedule, StepPlan
from grpox.errors import RunFailed
from grpox.observing.early_stop import EarlyStop
from grpox.observing.observers import Observers
from grpox.observing.step_metrics import step_metrics
from grpox.policy.batch import RolloutBatch, collate
from grpox.rollout.collector import Collector, GenerationBatch
from grpox.rollout.prefetch import Begun
from grpox.rollout.rewards.log import mean_logged, with_logged
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.signals import Terminated, first_signal_waits, raise_if_signalled, signalled
from grpox.runtime.world import World
from grpox.training.evaluation import Evaluator
from grpox.update.micro_batch import Slice
from grpox.update.mismatch import mismatch_warnings
from grpox.update.policy_update import PolicyUpdate

GOING_ON = "ending after this step, with a checkpoint; once more to end at once"


@dataclass
class Trainer:
    """Runs the schedule. Its parts are put together in `grpox.training.run`."""

    context: RunContext
    world: World
    schedule: Schedule
    collector: Collector
    policy: PolicyUpdate
    evaluator: Evaluator | None
    observers: Observers
    pad_token_id: int
    checkpoints: CheckpointSaver
    logprobs_promised: bool = False
    """Whether the generator says that it reports every token's log-probability."""
    slices: dict[tuple[int, int], Slice] = field(default_factory=dict)
    """This rank's slices of the generation batches in use, by generation and first row."""
    begun: dict[int, Begun] = field(default_factory=dict)
    """Generation batches that are sampled while the policy is updated; none at max_staleness 0."""
    draws: PromptDraws | None = None
    """What tells the prompts of a generation batch in place of the schedule, with dynamic sampling."""
    num_tokens: int = 0
    before: dict[str, float] = field(default_factory=dict)
    """What the evaluation before the first step gave."""
    after: dict[str, float] = field(default_factory=dict)
    """What the last evaluation gave; of a run that goes on, that of the step it goes on from."""
    early_stop: EarlyStop | None = None
    latest: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step, those of its evaluation below ``evaluation/``; on rank 0."""
    seconds_before: float = 0.0
    """Of training before the checkpoint that the run went on from."""
    started: float = field(default_factory=time.perf_counter)

    def run(self) -> dict[str, Any]:
        """Train to the end; returns the accuracy before and after (if there is an evaluation) and the time."""
        done = self.policy.engine.steps
        if done == 0:
            self.before = self.evaluate(0)
        raise_if_signalled()
        self.started = time.perf_counter()
        train_seconds = self.seconds_before
        with first_signal_waits(GOING_ON if self.world.is_main else ""):
            for plan in self.schedule.steps(done):
                if self.ended:
                    break
                self.train_step(plan)
                train_seconds = self.seconds()  # the last evaluation is no part of training
                if self.evaluation_due(plan.step):
                    self.evaluate(plan.step)
                self.checkpoints.after_step(self, plan.step)
                self.stop_if_signalled(plan.step)
        if not self.after:  # a run that goes on from its last step, whose evaluation was not made yet
            self.evaluate(self.policy.engine.steps)
        self.checkpoints.finish()
        raise_if_signalled()  # before the model is saved
        return self.summary(train_seconds)

    def summary(self, train_seconds: float) -> dict[str, Any]:
        """What the run came to."""
        steps = self.policy.engine.steps
        summary: dict[str, Any] = {"train_seconds": train_seconds, "steps": steps}
        if self.policy.nonfinite.skipped:
            summary["skipped_steps"] = self.policy.nonfinite.skipped
        if self.evaluator:
            summary |= {"accuracy_before": self.before["accuracy"], "accuracy_after": self.after["accuracy"]}
        if self.early_stop is not None and steps < self.schedule.total_steps:
            summary["stopped_early"] = self.early_stop.summary(steps)
        return summary

    @property
    def ended(self) -> bool:
        """Whether the run takes no further step."""
        stops = self.early_stop is not None and self.early_stop.stops
        return stops or self.policy.engine.steps >= self.schedule.total_steps

    def seconds(self) -> float:
        """Of training so far, what was before a resumed checkpoint included."""
        return self.seconds_before + time.perf_counter() - self.started

    def stop_if_signalled(self, step: int) -> None:
        """Between two steps: if any rank was told to end, save a checkpoint and end on all; a collective."""
        if any(self.world.gather([signalled()])):
            self.checkpoints.save(self, step, wait=True)
            raise_if_signalled()
            raise Terminated  # the signal came to another rank alone

    def train_step(self, plan: StepPlan) -> None:
        """One optimizer step: sample what it needs and is not there yet, then update the policy."""
        start = time.perf_counter()
        new = [self.collect(generation, plan.step) for generation in self.missing(plan)]
        self.begin_next(plan)
        slices = [self.slices[_place(micro_batch)] for micro_batch in plan.micro_batches]
        with self.times.phase("update"):
            self.policy.score_old([s for s in self.slices.values() if s not in slices])
            update = self.policy.step(slices)
        self.forget_used(plan)
        metrics = step_metrics(update, new, slices, self.times.take(), time.perf_counter() - start)
        self.report(plan, new, metrics)

    @property
    def times(self) -> PhaseTimes:
        return self.collector.sampler.times

    def missing(self, plan: StepPlan) -> list[int]:
        """Generation batches that the step trains on and that are not sampled yet."""
        sampled = {generation for generation, _ in self.slices}
        return sorted({micro_batch.generation for micro_batch in plan.micro_batches} - sampled)

    def begin_next(self, plan: StepPlan) -> None:
        """Where samples may be old, begin the generation batch after those of the step, if there is one."""
        following = self.schedule.generations_until(plan.step)
        ahead = self.context.config.train.max_staleness > 0
        if ahead and following not in self.begun and following < self.schedule.total_generations:
            indices = self.schedule.sampler.prompts_for(following)
            self.begun[following] = self.collector.begin(following, indices)

    def collect(self, generation: int, step: int) -> GenerationBatch:
        """Sample and score a generation batch, and cut it into this rank's slices."""
        batch = self.sampled(generation, step)
        for micro_batch in self.schedule.slices_of(generation):
            rows = micro_batch.rank_rows(self.world.rank)
            rollouts = batch.rollouts[rows.start : rows.stop]
            advantages = batch.advantages[rows.start : rows.stop].tolist()
            tensors = collate(
                rollouts,
                advantages,
                self.pad_token_id,
                self.world.device,
                mask_truncated=self.context.config.train.mask_truncated_completions,
            )
            of_generator = self.context.config.train.old_logprobs == "generator"
            old = _reported(tensors, generation) if of_generator else None
            self.slices[_place(micro_batch)] = Slice(tensors, old)
        if self.world.is_main:
            self.observers.rollouts_scored(self.context, step, self.collector.scored(batch))
        return batch

    def sampled(self, generation: int, step: int) -> GenerationBatch:
        """A generation batch of the prompts whose turn it is, for `step`."""
        if self.draws is not None:
            state = self.state(step - 1)  # before the draw moves the epoch on
            return self.collector.collect(generation, self.draws.batch(), state, draw=self.draws.more)
        indices = self.schedule.sampler.prompts_for(generation)
        begun = self.begun.pop(generation, None)
        return self.collector.collect(generation, indices, self.state(step - 1), begun)

    def forget_used(self, plan: StepPlan) -> None:
        """Drop the slices of generation batches that no later step trains on."""
        needed = self.schedule.first_generation_after(plan)
        self.slices = {place: s for place, s in self.slices.items() if place[0] >= needed}

    def evaluation_due(self, step: int) -> bool:
        """Whether to evaluate after `step`, as after the last one in any case."""
        if self.evaluator is None:
            return False
        every = self.evaluator.config.every
        return step == self.schedule.total_steps or (every > 0 and step % every == 0)

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the weights after `step` optimizer steps; empty when the run has no evaluation."""
        if self.evaluator is None:
            return {}
        metrics = self.evaluator.evaluate(self.state(step))
        self.times.take()  # an evaluation's time is no part of the next step's
        self.after = metrics
        if self.world.is_main:
            self.latest = self.latest | {f"{PREFIX}{bare_name(name)}": metrics[name] for name in metrics}
            self.observers.evaluated(self.context, step, metrics)
        if self.early_stop is not None:
            self.early_stop.see(step, metrics)
        return metrics

    def report(self, plan: StepPlan, new: list[GenerationBatch], metrics: dict[str, float]) -> None:
        """Tell the observers about a finished step."""
        for batch in new:
            self.num_tokens += sum(len(r.prompt_ids) + len(r.completion_ids) for r in batch.rollouts)
        if self.world.is_main:
            failures = sum(self.observers.failures.values())
            extra = {"num_tokens": self.num_tokens, "epoch": self.state(plan.step).epoch}
            metrics, renamed = with_logged(
                metrics | extra | {"observers/failures": failures}, mean_logged(batch.logged for batch in new)
            )
            self.collector.sampler.warn.all({what: what for what in renamed})
            alarms = mismatch_warnings(metrics, plan.step, promised=self.logprobs_promised)
            self.collector.sampler.warn.all(alarms)
            self.latest = metrics
            self.observers.step_finished(self.context, plan.step, metrics)

    def state(self, steps_done: int) -> TrainerState:
        """What reward functions are told about the run."""
        if self.draws is not None:
            return TrainerState(steps_done, self.schedule.total_steps, self.draws.epoch)
        generations = steps_done / float(self.schedule.plan.optimizer_steps_per_generation)
        epoch = generations / self.schedule.sampler.generations_per_epoch
        return TrainerState(global_step=steps_done, max_steps=self.schedule.total_steps, epoch=epoch)


def _reported(batch: RolloutBatch, generation: int) -> Tensor:
    """What the generator reported, f32[B, T], as pi_old.

    Raises:
        RunFailed: for some token it reported nothing.
    """
    missing = int((batch.sampler_logprobs.isnan() & batch.token_mask).sum())
    if missing:
        raise RunFailed(
            f"train.old_logprobs: generator, but it reported no log-probability for {missing} of "
            f"{int(batch.token_mask.sum())} tokens of a micro-batch of generation batch {generation}"
        )
    return batch.sampler_logprobs.nan_to_num()


def _place(micro_batch: MicroBatch) -> tuple[int, int]:
    return micro_batch.generation, micro_batch.rows.start
