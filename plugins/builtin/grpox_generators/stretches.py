"""Batches of rows, padded on the left; ended rows leave the batch, so that only running rows are computed.

transformers' generate runs until its last row has ended. Here it runs in stretches: a stretch ends as soon as
the computation wasted on ended rows exceeds the cost of ending it. The next one continues with the running
rows.

Through the policy's own ZeRO-3 shards, each layer is gathered for each token on all ranks. A gather is a
collective, so all ranks must run the same number of forwards. transformers ensures this within a batch
(synced_gpus). This module does the rest: the same number of batches on each rank, and rows for a rank without
any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from grpox.contracts import Prompt
from grpox_generators.sampling import Distribution, Draw, StopTexts

CUT_COST = 0.2
"""Cost of ending a stretch, in steps of the whole batch: the cache is copied once, as each step does to extend
it, and generate starts again."""


@contextmanager
def generating(policy: Any) -> Iterator[None]:
    """Let the policy generate: in evaluation mode and without the checkpoint's sampling defaults.

    Evaluation mode also turns off gradient checkpointing, which forbids a cache of keys and values.
    """
    training, defaults = policy.training, policy.generation_config
    policy.eval()
    policy.generation_config = GenerationConfig()
    try:
        yield
    finally:
        policy.generation_config = defaults
        policy.train(training)


def most_of_all_ranks(number: int) -> int:
    """Return the largest `number` of all ranks; a collective."""
    largest = torch.tensor(number)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


class Idle(StoppingCriteria):  # type: ignore[misc]
    """Ends all rows at once: this rank only takes part in the forwards of the others."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def keep(self, remaining: Tensor) -> None:
        """Do nothing; never called, because no row leaves when ranks generate in step."""


@dataclass(frozen=True)
class PaddedPrompts:
    """B prompts; P is the length of the longest, at least 2."""

    input_ids: Tensor  # i64[B, P]
    attention_mask: Tensor  # i64[B, P]
    repeats: Tensor  # i64[B]: completions of each

    @property
    def lengths(self) -> Tensor:
        """i64[B]: number of tokens of each prompt."""
        return self.attention_mask.sum(dim=1)

    @property
    def group_rows(self) -> Tensor:
        """i64[N]: number of the prompt of each completion."""
        return torch.arange(len(self.repeats), device=self.repeats.device).repeat_interleave(self.repeats)


def pad_prompts(prompts: Sequence[Prompt], pad_token_id: int, device: torch.device) -> PaddedPrompts:
    """Pad to the longest prompt, and to 2 at least.

    The second column ensures that there are columns to prefill before the last one, and that ranks which
    generate in step run the same number of forwards.
    """
    length = max(2, *(len(prompt.token_ids) for prompt in prompts))
    input_ids = torch.full((len(prompts), length), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, length - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
        attention_mask[row, length - len(prompt.token_ids) :] = 1
    repeats = torch.tensor([prompt.num_samples for prompt in prompts])
    return PaddedPrompts(input_ids.to(device), attention_mask.to(device), repeats.to(device))


def cut(prompts: Sequence[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
    """Split into batches of at most `batch_size` completions, whole groups; a larger group is its own batch."""
    batch: list[Prompt] = []
    size = 0
    for prompt in prompts:
        if batch and size + prompt.num_samples > batch_size:
            yield batch
            batch, size = [], 0
        batch.append(prompt)
        size += prompt.num_samples
    if batch:
        yield batch


@dataclass
class Batch:
    """Completions sampled together."""

    prompts: PaddedPrompts
    cache: Any
    """Keys and values of the prompts, one row per completion; None: generate creates its own."""
    config: GenerationConfig
    """Settings with `max_new_tokens` T, `eos_token_id` and `pad_token_id`."""
    processors: Sequence[Distribution | Draw]
    stop: StopTexts | Idle
    limits: Tensor | None = None
    """i64[N]: largest length of each completion; None: `max_new_tokens` for all."""

    def run(self, model: Any, leave: bool, in_step: bool) -> Tensor:
        """Generate until all rows have ended.

        Args:
            model: model of transformers.
            leave: True: ended rows leave; needs `cache`, and no other rank in step.
            in_step: True: other ranks generate at the same time through the same shards.

        Returns:
            i64[N, P + T]: prompts with padding, then completions, then arbitrary tokens.
        """
        rows = self.prompts.group_rows
        generated, mask = self.prompts.input_ids[rows], self.prompts.attention_mask[rows]
        columns = generated.shape[1]
        end = columns + self.config.max_new_tokens
        sequences = generated.new_full((len(rows), end), self.config.pad_token_id)
        running = torch.arange(len(rows), device=generated.device)
        while True:
            self.config.max_new_tokens = end - generated.shape[1]
            ends = None if self.limits is None else columns + self.limits[running]
            stretch = Stretch(len(running), self.config.eos_token_id, self.stop, leave, generated.device, ends)
            generated = model.generate(
                input_ids=generated,
                attention_mask=mask,
                past_key_values=self.cache,
                logits_processor=LogitsProcessorList(self.processors),
                stopping_criteria=StoppingCriteriaList([stretch]),
                generation_config=self.config,
                synced_gpus=in_step,
            )
            sequences[running, : generated.shape[1]] = generated
            remaining = ~stretch.ended
            if generated.shape[1] == end or not remaining.any():
                return sequences
            running, generated, mask = running[remaining], generated[remaining], mask[remaining]
            mask = torch.nn.functional.pad(mask, (0, generated.shape[1] - mask.shape[1]), value=1)
            self.cache.reorder_cache(remaining.nonzero().squeeze(1))
            for part in (*self.processors, self.stop):
                part.keep(remaining)


class Stretch(StoppingCriteria):  # type: ignore[misc]
    """Ends rows by their own conditions, and all rows at the end of the stretch.

    Args:
        rows: B, number of rows of this stretch.
        end_ids: tokens that end a row.
        stop: further condition that ends rows.
        cuts: True if the stretch may end before its last row.
        device: device of the rows.
        ends: i64[B]: length at which each row ends, prompt included; None: no such limit.
    """

    def __init__(
        self,
        rows: int,
        end_ids: Sequence[int],
        stop: StoppingCriteria,
        cuts: bool,
        device: torch.device,
        ends: Tensor | None = None,
    ) -> None:
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        """bool[B]: rows that have ended by their own conditions."""
        self._end_ids = torch.tensor(list(end_ids), dtype=torch.long, device=device)
        self._stop = stop
        self._cuts = cuts
        self._ends = ends
        self._wasted = 0.0

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        self.ended |= torch.isin(input_ids[:, -1], self._end_ids) | self._stop(input_ids, scores, **others)
        if self._ends is not None:
            self.ended |= self._ends <= input_ids.shape[1]
        if self._cuts:
            self._wasted += float(self.ended.float().mean())
        return torch.ones_like(self.ended) if self._wasted >= CUT_COST else self.ended
