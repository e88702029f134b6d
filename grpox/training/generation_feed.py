"""The generation batches of a run: each is collected when a step needs it, and cut into this rank's samples.

The tokens of some completions of each step, spread over its rewards, are chosen to be recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grpox.checkpoint.progress import TrainingState
from grpox.config import TrainConfig
from grpox.contracts import Capability, Rollout, TrainerState
from grpox.data.schedule import MicroBatchPlan, Schedule, StepPlan
from grpox.errors import RunFailed
from grpox.errors.formatting import spread
from grpox.plugins.component_state import PLAIN, odd_part
from grpox.policy.batch import Sample, TokenRecord, samples_of, upload
from grpox.rollout.collector import Collector, GenerationBatch
from grpox.runtime.world import World

Key = tuple[int, int]
"""Generation batch and row."""


@dataclass(frozen=True)
class TokenChoice:
    """Chooses the completions whose tokens are recorded, the same on all ranks.

    It chooses none from a generation batch whose completions are not saved.
    """

    schedule: Schedule
    tokens: int
    """Number of completions to record in a step, `record.tokens`."""
    every: int
    """Interval between saved generation batches, `logging.save_completions_every`."""

    def records(self, batches: Mapping[int, GenerationBatch]) -> dict[Key, TokenRecord]:
        """Choose among generation batches that were collected for one step.

        The rows that a step trains on for the first time are sorted by reward, unscored rows first. Rows at
        equal distances are chosen, the first and the last included.
        """
        of_step: dict[int, list[tuple[float, Key]]] = defaultdict(list)
        file_of = {}
        for generation in filter(self._is_saved, batches):
            totals = batches[generation].totals.numpy()
            rewards = np.nan_to_num(totals, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
            steps, parts = self.schedule.first_steps(generation), self.schedule.slices_of(generation)
            for step, part in zip(steps, parts, strict=True):
                of_step[step] += [(rewards[row], (generation, row)) for row in part.rows]
            before = range(self.schedule.generations_until(steps[0] - 1), generation)  # rows of the same step
            file_of[generation] = steps[0], 1 + len(list(filter(self._is_saved, before)))
        records = {}
        for rows in of_step.values():
            order = np.argsort([reward for reward, _ in rows], kind="stable")
            for place in spread(len(rows), self.tokens):
                _, (generation, row) = rows[order[place]]
                rollout = batches[generation].rollouts[row]
                step, number = file_of[generation]
                turns = turn_numbers(rollout)
                records[generation, row] = TokenRecord(step, number, rollout.group_id, rollout.sample, turns)
        return records

    def concerns(self, plan: StepPlan) -> bool:
        """Return True if some completions that a step trains on for the first time may be recorded."""
        return any(each.iteration == 0 and self._is_saved(each.generation) for each in plan.micro_batches)

    def _is_saved(self, generation: int) -> bool:
        return self.tokens > 0 and self.every > 0 and generation % self.every == 0


def turn_numbers(rollout: Rollout) -> np.ndarray:
    """Return the model's turn of each token, i32[T]; -1: the model did not write it."""
    turns = np.full(len(rollout.completion_ids), -1, np.int32)
    for number, turn in enumerate(rollout.turns):
        turns[turn.start : turn.end] = number
    if not rollout.turns:  # it has one
        turns[... if rollout.model_mask is None else np.array(rollout.model_mask, np.bool_)] = 0
    return turns


@dataclass
class GenerationFeed:
    """Gives each step its micro-batches. The training state holds the samples while a step needs them."""

    config: TrainConfig
    schedule: Schedule
    collector: Collector
    state: TrainingState
    world: World
    needs: Collection[str] = ()
    """Capabilities that the loss needs; samples carry fields for these alone."""
    choice: TokenChoice | None = None
    """Chooses the samples whose tokens are recorded; None: none."""

    def collect(self, plan: StepPlan) -> list[GenerationBatch]:
        """Collect the missing generation batches of a step, then release the generator; a collective."""
        stored = {generation for generation, _ in self.state.samples}
        new = {each: self._collect(each, plan.step) for each in plan.generations if each not in stored}
        self.collector.sampler.release()
        records = {} if self.choice is None else self.choice.records(new)
        for key, record in records.items():
            if key in self.state.samples:  # this rank trains on it
                self.state.samples[key].token_record = record
        return list(new.values())

    def _collect(self, generation: int, step: int) -> GenerationBatch:
        progress, cursor = self.progress(step - 1), self.state.cursor  # before the draw moves the epoch on
        if cursor is not None:
            batch = self.collector.collect(generation, cursor.batch(), progress, draw=cursor.more)
        else:
            indices = self.schedule.sampler.prompts_for(generation)
            prefetched = self.state.prefetched.pop(generation, None)
            batch = self.collector.collect(generation, indices, progress, prefetched)
        self._add_samples(generation, batch)
        return batch

    def _add_samples(self, generation: int, batch: GenerationBatch) -> None:
        """Add this rank's samples of a generation batch, with the fields that the run's loss needs.

        The columns are read now, because the next generation batch moves the window of a stream.
        """
        plan, needs = self.schedule.plan, self.needs
        rows = [row for part in self.schedule.slices_of(generation) for row in part.rank_rows(self.world.rank)]
        rollouts, advantages = [batch.rollouts[row] for row in rows], batch.scaled.of_rows(rows)
        samples = samples_of(rollouts, advantages, self.config.mask_truncated_completions)
        if self.config.old_logprobs == "generator":
            keep_reported(samples, generation, self.world.device)
        columns: dict[int, Mapping[str, Any]] = {}
        if Capability.COLUMNS in needs:
            groups = list(dict.fromkeys(row // plan.num_generations for row in rows))
            of_groups = self.collector.prompts.columns_of([batch.indices[group] for group in groups])
            check_plain(of_groups)
            columns = dict(zip(groups, of_groups, strict=True))
        for row, reward, sample in zip(rows, batch.totals[rows].tolist(), samples, strict=True):
            group = row // plan.num_generations
            sample.reward = reward
            if Capability.REWARDS in needs:
                sample.rewards = batch.rewards[row].numpy()
            if Capability.GROUP_IDS in needs:
                sample.group_id = generation * plan.prompts_per_generation + group
            if Capability.SEQUENCE_IDS in needs:
                sample.sequence_id = generation * plan.generation_batch_size + row
            sample.columns = columns.get(group)
            self.state.samples[generation, row] = sample

    def prefetch(self, plan: StepPlan) -> None:
        """Begin the next generation batch, if there is one and samples may be old."""
        if self.config.max_staleness == 0:
            return
        following = self.schedule.generations_until(plan.step)
        if following not in self.state.prefetched and following < self.schedule.total_generations:
            indices = self.schedule.sampler.prompts_for(following)
            self.state.prefetched[following] = self.collector.prefetch(following, indices)

    def micro_batches(self, plan: StepPlan) -> list[list[Sample]]:
        """List this rank's samples of a step, by micro-batch."""
        return list(map(self._samples, plan.micro_batches))

    def later_micro_batches(self, plan: StepPlan) -> list[list[Sample]]:
        """List the other micro-batches of the step's generation batches."""
        now, later = [(each.generation, each.rows) for each in plan.micro_batches], []
        for generation in plan.generations:
            for part in self.schedule.slices_of(generation):
                if (generation, part.rows) not in now:
                    later.append(self._samples(part))
        return later

    def forget_used(self, plan: StepPlan) -> None:
        """Drop the samples of generation batches that no later step trains on."""
        needed = self.schedule.first_generation_after(plan)
        self.state.samples = {key: each for key, each in self.state.samples.items() if key[0] >= needed}

    def progress(self, steps_done: int) -> TrainerState:
        """Return the progress of the run, for reward functions."""
        total = self.schedule.total_steps
        if self.state.cursor is not None:
            return TrainerState(steps_done, total, self.state.cursor.epoch)
        generations = steps_done / float(self.schedule.plan.optimizer_steps_per_generation)
        return TrainerState(steps_done, total, generations / self.schedule.sampler.generations_per_epoch)

    def _samples(self, micro_batch: MicroBatchPlan) -> list[Sample]:
        rows = micro_batch.rank_rows(self.world.rank)
        return [self.state.samples[micro_batch.generation, row] for row in rows]


def check_plain(rows: Sequence[Mapping[str, Any]]) -> None:
    """Check that a checkpoint can hold the columns of rows, which a loss needs; raises RunFailed."""
    types = (*PLAIN, bytes)
    for row in rows:
        for name, value in row.items():
            if (odd := odd_part(value, types=types, keys=types)) is not None:
                kind = type(odd[1]).__name__
                raise RunFailed(
                    f"the loss needs the dataset's columns, and column '{name}' holds a {kind}, which no "
                    "checkpoint can hold: turn it into numbers or text, or remove the column from the data"
                )


def keep_reported(samples: Sequence[Sample], generation: int, device: torch.device) -> None:
    """Set pi_old to what the generator reported; raises RunFailed if a trained token has no log-probability."""
    missing = sum(int((np.isnan(each.sampler_logprobs) & each.token_mask).sum()) for each in samples)
    if missing:
        raise RunFailed(
            f"train.old_logprobs: generator, but it reported no log-probability for {missing} of "
            f"{sum(int(each.token_mask.sum()) for each in samples)} tokens of generation batch {generation}"
        )
    reported = np.nan_to_num(np.concatenate([each.sampler_logprobs for each in samples]))
    lengths = [len(each.completion) for each in samples]
    for sample, row in zip(samples, torch.split(upload([reported], device)[0], lengths), strict=True):
        sample.old_logprobs = row
