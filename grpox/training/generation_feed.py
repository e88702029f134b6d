"""The generation batches of a run: each collected when a step needs it, cut into this rank's samples.

Of the completions of a step some are chosen whose tokens are recorded, spread over its rewards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from grpox.checkpoint.progress import TrainingState
from grpox.config import TrainConfig
from grpox.contracts import Capability, TrainerState
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
    """Chooses completions when their generation batch is collected, alike on all ranks.

    Of a generation batch whose completions are not saved it chooses none.
    """

    schedule: Schedule
    tokens: int
    """Completions of a step, `record.tokens`."""
    every: int
    """Generation batches between those that are saved, `logging.save_completions_every`."""

    def records(self, batches: Mapping[int, GenerationBatch]) -> Iterator[tuple[Key, TokenRecord]]:
        """Choose among generation batches that were collected for one step.

        The rows that a step trains on for the first time are put in order of reward, those without one first,
        and taken at equal distances, the first and the last among them.
        """
        of_step: dict[int, list[Key]] = defaultdict(list)
        rewards = {}
        for generation, batch in batches.items():
            if self._is_saved(generation):
                own = np.nan_to_num(batch.totals.numpy(), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
                rewards[generation] = own
                steps = self.schedule.first_steps(generation)
                for step, part in zip(steps, self.schedule.slices_of(generation), strict=True):
                    of_step[step] += [(generation, row) for row in part.rows]
        for keys in of_step.values():
            order = np.argsort([rewards[generation][row] for generation, row in keys], kind="stable")
            for place in spread(len(keys), self.tokens):
                generation, row = key = keys[order[place]]
                yield key, self._record(generation, row, batches[generation])

    def concerns(self, plan: StepPlan) -> bool:
        """Tell whether a step goes over completions for the first time of which some may be recorded."""
        return any(each.iteration == 0 and self._is_saved(each.generation) for each in plan.micro_batches)

    def _is_saved(self, generation: int) -> bool:
        return self.tokens > 0 and self.every > 0 and generation % self.every == 0

    def _record(self, generation: int, row: int, batch: GenerationBatch) -> TokenRecord:
        rollout = batch.rollouts[row]
        turns = np.full(len(rollout.completion_ids), -1, np.int32)
        for number, turn in enumerate(rollout.turns):
            turns[turn.start : turn.end] = number
        if not rollout.turns:  # it has one
            turns[... if rollout.model_mask is None else np.array(rollout.model_mask, np.bool_)] = 0
        step = self.schedule.first_steps(generation)[0]
        before = takewhile(
            lambda other: self.schedule.first_steps(other)[0] == step, range(generation - 1, -1, -1)
        )
        part = 1 + sum(map(self._is_saved, before))
        return TokenRecord(step, part, rollout.group_id, rollout.sample, turns)


@dataclass
class GenerationFeed:
    """Gives each step its micro-batches. The training state holds the samples while a step needs them."""

    config: TrainConfig
    schedule: Schedule
    collector: Collector
    state: TrainingState
    world: World
    needs: Collection[str] = ()
    """Capabilities that the loss needs; the samples carry nothing for others."""
    choice: TokenChoice | None = None
    """Chooses the samples whose tokens are recorded; None: none."""

    def collect(self, plan: StepPlan) -> list[GenerationBatch]:
        """Collect the missing generation batches of a step, then release the generator; a collective."""
        sampled = {generation for generation, _ in self.state.samples}
        needed = {micro_batch.generation for micro_batch in plan.micro_batches}
        new = {each: self._collect(each, plan.step) for each in sorted(needed - sampled)}
        self.collector.sampler.release()
        for key, record in self.choice.records(new) if self.choice is not None else ():
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
        rows = [row for part in self.schedule.slices_of(generation) for row in part.rank_rows(self.world.rank)]
        samples = samples_of(
            [batch.rollouts[row] for row in rows],
            batch.scaled.of_rows(rows),
            self.config.mask_truncated_completions,
        )
        for sample, reward in zip(samples, batch.totals[rows].tolist(), strict=True):
            sample.reward = reward
        if self.config.old_logprobs == "generator":
            keep_reported(samples, generation, self.world.device)
        self._carry(samples, rows, generation, batch)
        self.state.samples |= {(generation, row): sample for row, sample in zip(rows, samples, strict=True)}
        return batch

    def _carry(
        self, samples: Sequence[Sample], rows: Sequence[int], generation: int, batch: GenerationBatch
    ) -> None:
        """Let the samples of `rows` of a generation batch carry what only the run's loss needs."""
        plan, needs = self.schedule.plan, self.needs
        groups = [row // plan.num_generations for row in rows]
        of_group: dict[int, dict[str, Any]] = {}
        if Capability.COLUMNS in needs:
            numbers = list(dict.fromkeys(groups))
            _, columns = self.collector.prompts.rows([batch.indices[number] for number in numbers])
            check_plain(columns)
            of_group = {
                number: {name: values[place] for name, values in columns.items()}
                for place, number in enumerate(numbers)
            }
        for sample, row, group in zip(samples, rows, groups, strict=True):
            if Capability.REWARDS in needs:
                sample.rewards = batch.rewards[row].numpy()
            if Capability.GROUP_IDS in needs:
                sample.group_id = generation * plan.prompts_per_generation + group
            if Capability.SEQUENCE_IDS in needs:
                sample.sequence_id = generation * plan.generation_batch_size + row
            sample.columns = of_group.get(group)

    def prefetch(self, plan: StepPlan) -> None:
        """Begin the generation batch after those of the step, if there is one and samples may be old."""
        following = self.schedule.generations_until(plan.step)
        stale = self.config.max_staleness > 0
        if stale and following not in self.state.prefetched and following < self.schedule.total_generations:
            indices = self.schedule.sampler.prompts_for(following)
            self.state.prefetched[following] = self.collector.prefetch(following, indices)

    def micro_batches(self, plan: StepPlan) -> list[list[Sample]]:
        """List this rank's samples of a step, by micro-batch."""
        return [self._samples(micro_batch) for micro_batch in plan.micro_batches]

    def later_micro_batches(self, plan: StepPlan) -> list[list[Sample]]:
        """List the micro-batches of the generation batches in use that are not the step's."""
        now = {(micro_batch.generation, micro_batch.rows) for micro_batch in plan.micro_batches}
        return [
            self._samples(micro_batch)
            for generation in dict.fromkeys(generation for generation, _ in self.state.samples)
            for micro_batch in self.schedule.slices_of(generation)
            if (generation, micro_batch.rows) not in now
        ]

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


def check_plain(columns: Mapping[str, Sequence[Any]]) -> None:
    """Check that a checkpoint can hold the columns that a loss needs; raises RunFailed."""
    types = (*PLAIN, bytes)
    for name, values in columns.items():
        if (odd := odd_part(list(values), types=types, keys=types)) is not None:
            raise RunFailed(
                f"the loss needs the dataset's columns, and column '{name}' holds a {type(odd[1]).__name__}, "
                "which no checkpoint can hold: turn it into numbers or text, or remove the column from the data"
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
