"""THE loop: prompts -> rollouts -> rewards -> advantages -> micro-batches -> update -> weight sync.

`Trainer.run` is the run, `Trainer.train_step` one optimizer step; each of their lines calls one named part.
The generator takes the new weights when the next generation batch is collected, not before they are needed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from grpox.collect import Collector, GenerationBatch
from grpox.contracts import RunContext, TrainerState
from grpox.evaluation import Evaluator
from grpox.metrics import PhaseTimes
from grpox.observing.observers import Observers
from grpox.rewards.log import mean_logged, with_logged
from grpox.rollout import collate
from grpox.sampling import MicroBatch, Schedule, StepPlan
from grpox.signals import raise_if_signalled
from grpox.step_report import step_metrics
from grpox.update import PolicyUpdate, Slice
from grpox.world import World


@dataclass
class Trainer:
    """Runs the schedule. Its parts are put together in `grpox.run`."""

    context: RunContext
    world: World
    schedule: Schedule
    collector: Collector
    policy: PolicyUpdate
    evaluator: Evaluator | None
    observers: Observers
    pad_token_id: int
    slices: dict[tuple[int, int], Slice] = field(default_factory=dict)
    """This rank's slices of the generation batches in use, by generation and first row."""
    num_tokens: int = 0

    def run(self) -> dict[str, float]:
        """Train to the end; returns the accuracy before and after (if there is an evaluation) and the time."""
        before = self.evaluate(0)
        start = time.perf_counter()
        for plan in self.schedule.steps():
            self.train_step(plan)
            if self.evaluation_due(plan.step):
                self.evaluate(plan.step)
        train_seconds = time.perf_counter() - start
        after = self.evaluate(self.schedule.total_steps)
        raise_if_signalled()  # before the model is saved
        summary: dict[str, float] = {"train_seconds": train_seconds, "steps": self.schedule.total_steps}
        if self.evaluator:
            summary |= {"accuracy_before": before["accuracy"], "accuracy_after": after["accuracy"]}
        return summary

    def train_step(self, plan: StepPlan) -> None:
        """One optimizer step: sample what it needs and is not there yet, then update the policy."""
        raise_if_signalled()
        start = time.perf_counter()
        new = [self.collect(generation, plan.step) for generation in self.missing(plan)]
        slices = [self.slices[_place(micro_batch)] for micro_batch in plan.micro_batches]
        with self.times.phase("update"):
            self.policy.score_old(s for s in self.slices.values() if s not in slices)
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

    def collect(self, generation: int, step: int) -> GenerationBatch:
        """Sample and score a generation batch, and cut it into this rank's slices."""
        indices = self.schedule.sampler.prompts_for(generation)
        batch = self.collector.collect(generation, indices, self.state(step - 1))
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
            self.slices[_place(micro_batch)] = Slice(tensors)
        if self.world.is_main:
            self.observers.rollouts_scored(self.context, step, self.collector.scored(batch))
        return batch

    def forget_used(self, plan: StepPlan) -> None:
        """Drop the slices of generation batches that no later step trains on."""
        needed = self.schedule.first_generation_after(plan)
        self.slices = {place: s for place, s in self.slices.items() if place[0] >= needed}

    def evaluation_due(self, step: int) -> bool:
        """Whether to evaluate after `step`; the evaluation after the last step comes by itself."""
        every = self.evaluator.config.every if self.evaluator else 0
        return every > 0 and step % every == 0 and step < self.schedule.total_steps

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the weights after `step` optimizer steps; empty when the run has no evaluation."""
        if self.evaluator is None:
            return {}
        raise_if_signalled()
        metrics = self.evaluator.evaluate(self.state(step))
        self.times.take()  # an evaluation's time is no part of the next step's
        if self.world.is_main:
            self.observers.evaluated(self.context, step, metrics)
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
            self.observers.step_finished(self.context, plan.step, metrics)

    def state(self, steps_done: int) -> TrainerState:
        """What reward functions are told about the run."""
        generations = steps_done / float(self.schedule.plan.optimizer_steps_per_generation)
        epoch = generations / self.schedule.sampler.generations_per_epoch
        return TrainerState(global_step=steps_done, max_steps=self.schedule.total_steps, epoch=epoch)


def _place(micro_batch: MicroBatch) -> tuple[int, int]:
    return micro_batch.generation, micro_batch.rows.start
