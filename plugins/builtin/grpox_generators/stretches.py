"""Rows that have ended leave the batch, so that the others alone are computed on.

transformers' generate runs until its last row has ended. Here it runs in stretches: one is cut as soon as what
was computed for ended rows would have paid for the cut, and the next goes on with the rows still running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from grpox_generators.draw import Draw
from grpox_generators.padding import PaddedPrompts
from grpox_generators.sampling import Distribution
from grpox_generators.sharded import Idle
from grpox_generators.stopping import StopTexts

CUT_COST = 0.2
"""What a cut costs, in steps of the whole batch: it copies the cache once, as each step does to append to it,
and enters generate again."""


@dataclass
class Batch:
    """Completions sampled together."""

    prompts: PaddedPrompts
    cache: Any
    """Keys and values of the prompts, a row for each completion; None: generate makes its own."""
    config: GenerationConfig
    """With `max_new_tokens` T, `eos_token_id` and `pad_token_id`."""
    processors: Sequence[Distribution | Draw]
    stop: StopTexts | Idle

    def run(self, model: Any, leave: bool, in_step: bool) -> Tensor:
        """Generate until all have ended.

        Args:
            model: transformers'.
            leave: rows that have ended leave; needs `cache`, and no other rank in step.
            in_step: other ranks generate at the same time through the same shards.

        Returns:
            i64[N, P + T], prompts with padding, completions, anything.
        """
        rows = self.prompts.group_rows
        found, mask = self.prompts.input_ids[rows], self.prompts.attention_mask[rows]
        end = found.shape[1] + self.config.max_new_tokens
        sequences = found.new_full((len(rows), end), self.config.pad_token_id)
        running = torch.arange(len(rows), device=found.device)
        while True:
            self.config.max_new_tokens = end - found.shape[1]
            stretch = Stretch(len(running), self.config.eos_token_id, self.stop, leave, found.device)
            found = model.generate(
                input_ids=found,
                attention_mask=mask,
                past_key_values=self.cache,
                logits_processor=LogitsProcessorList(self.processors),
                stopping_criteria=StoppingCriteriaList([stretch]),
                generation_config=self.config,
                synced_gpus=in_step,
            )
            sequences[running, : found.shape[1]] = found
            kept = ~stretch.ended
            if found.shape[1] == end or not kept.any():
                return sequences
            running, found, mask = running[kept], found[kept], mask[kept]
            mask = torch.nn.functional.pad(mask, (0, found.shape[1] - mask.shape[1]), value=1)
            self._keep(kept)

    def _keep(self, kept: Tensor) -> None:
        """Go on with the rows bool[B] alone."""
        self.cache.reorder_cache(kept.nonzero().squeeze(1))
        for part in (*self.processors, self.stop):
            part.keep(kept)


class Stretch(StoppingCriteria):  # type: ignore[misc]
    """Ends the rows that have ended, and all of them at a cut.

    Args:
        rows: B, of this stretch.
        end_ids: tokens that end a row.
        stop: what else ends rows.
        cuts: whether there may be a cut.
        device: of the rows.
    """

    def __init__(
        self, rows: int, end_ids: Sequence[int], stop: StoppingCriteria, cuts: bool, device: torch.device
    ) -> None:
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        """bool[B]: rows that have ended, by a cut or not."""
        self._end_ids = torch.tensor(list(end_ids), dtype=torch.long, device=device)
        self._stop = stop
        self._cuts = cuts
        self._wasted = 0.0

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        self.ended |= torch.isin(input_ids[:, -1], self._end_ids) | self._stop(input_ids, scores, **others)
        if self._cuts:
            self._wasted += float(self.ended.float().mean())
        return torch.ones_like(self.ended) if self._wasted >= CUT_COST else self.ended
