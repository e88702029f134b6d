"""Completions of given lengths from a real model, the same for whatever samples them.

Two frameworks draw different random numbers, so that one of them may happen on longer completions. Here the
end of each completion is told: its last token is EOS, and no token before is. What is sampled in between is the
model's own. Which length a completion has follows from its row in its generation batch, and from how many
batches there were before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList
from work import varied_lengths

from grpox_generators import hf
from grpox_generators.decoding import RunningRows


class Lengths:
    """The lengths of each generation batch, of `rows` completions on this rank, in turn."""

    def __init__(self, rows: int, longest: int, first_row: int = 0, all_rows: int | None = None) -> None:
        self.rows, self.longest = rows, longest
        self.first_row, self.all_rows = first_row, all_rows or rows
        self.asked = 0
        """Completions so far."""

    def take(self, count: int) -> list[int]:
        """The lengths of the next `count` completions."""
        taken = []
        for _ in range(count):
            batch, row = divmod(self.asked, self.rows)
            taken.append(varied_lengths(self.all_rows, self.longest, seed=batch)[self.first_row + row])
            self.asked += 1
        return taken


class EndsAt(LogitsProcessor):  # type: ignore[misc]
    """For transformers: completion i of the batch ends after `lengths[i]` tokens."""

    def __init__(self, lengths: Sequence[int], columns: int, end_ids: Sequence[int]) -> None:
        self.lengths = torch.tensor(lengths)
        self.columns = columns
        self.end_ids = list(end_ids)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        written = input_ids.shape[1] - self.columns
        self.lengths = self.lengths.to(scores.device)  # copied once
        force_ends(scores, self.lengths <= written + 1, self.end_ids)
        return scores


def force_ends(scores: Tensor, ending: Tensor, end_ids: Sequence[int]) -> None:
    """In place: rows bool[B] of scores [B, V] that are `ending` can give the first of `end_ids` alone, others
    none of them. Neither reads a value nor copies one to the device of `scores`, for which a host would wait.
    """
    for end in end_ids:
        scores[:, end] = -torch.inf
    scores.masked_fill_(ending.unsqueeze(1), -torch.inf)
    scores[:, end_ids[0]].masked_fill_(ending, 0.0)


def force_in_transformers(lengths: Lengths) -> None:
    """Let every `generate` of transformers in this process end its completions so."""
    generate = GenerationMixin.generate

    def forced(model: Any, *args: Any, **kwargs: Any) -> Any:
        rows, columns = kwargs["input_ids"].shape
        ends = kwargs["generation_config"].eos_token_id
        processor = EndsAt(lengths.take(rows), columns, ends if isinstance(ends, list) else [ends])
        # First, so that whoever draws or records sees it.
        kwargs["logits_processor"] = LogitsProcessorList([processor, *(kwargs.get("logits_processor") or [])])
        return generate(model, *args, **kwargs)

    GenerationMixin.generate = forced


def force_in_hf(lengths: Lengths) -> None:
    """Let every batch that the hf generator samples in this process end its completions so."""

    class ForcedRows(RunningRows):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.ends_at = torch.tensor(lengths.take(len(self.number))).to(self.number.device)

        def process(self, column: int, scores: Tensor) -> Tensor:
            scores = super().process(column, scores)
            force_ends(scores, self.ends_at[self.number] <= column + 1 - self.columns, self.ends)
            return scores

    hf.RunningRows = ForcedRows  # type: ignore[misc]


def force_in_vllm(lengths: Lengths) -> None:
    """Let every `vllm.LLM` made in this process end its completions so.

    Requests are numbered as they come, which is the order of the rows.
    """
    import vllm
    from vllm.v1.sample.logits_processor import BatchUpdate, process_dict_updates
    from vllm.v1.sample.logits_processor import LogitsProcessor as VllmLogitsProcessor

    class EndsAtInVllm(VllmLogitsProcessor):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            self.requests: dict[int, tuple[int, list[int], list[int]]] = {}
            """Request -> its length, the tokens written so far, and the tokens that end it."""

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            def added(
                params: Any, prompt_ids: list[int] | None, written: list[int]
            ) -> tuple[int, list[int], list[int]]:
                return lengths.take(1)[0], written, sorted(params.all_stop_token_ids)

            process_dict_updates(self.requests, batch_update, added)

        def apply(self, logits: Tensor) -> Tensor:
            # Every row has a request, and all have the same tokens to end with.
            ending = [length <= len(written) + 1 for _, (length, written, _) in sorted(self.requests.items())]
            if ending:
                force_ends(logits, torch.tensor(ending, device=logits.device), self.requests[0][2])
            return logits

    start = vllm.LLM.__init__

    def started(engine: Any, *args: Any, **kwargs: Any) -> None:
        start(engine, *args, **kwargs | {"logits_processors": [EndsAtInVllm]})

    vllm.LLM.__init__ = started
