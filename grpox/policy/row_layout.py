"""How the sequences of a micro-batch lie in the rows of a forward pass.

Completions of one prompt can lie in one row behind a single copy of it, each seeing the prompt and itself
alone. That saves the repeated prompts and costs attention between completions, computed only to be masked: a
row grows while the first is worth more than the second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpox.policy.batch import RolloutBatch, TokenSequence, from_lists

PAIRS_PER_TOKEN = 2
"""Times the hidden size: pairs of positions whose attention costs what one token costs elsewhere in a layer. By
operations it would be 6; attention gets less out of a machine than large products do."""


@dataclass(frozen=True)
class Row:
    """Sequences that share a prompt, by their number, and the positions that the row takes."""

    members: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class Layout:
    """The rows of a micro-batch as the model reads them, R rows of L positions, padded on the right or packed.

    Padding needs no mask, as no position sees what comes after it.
    """

    input_ids: Tensor  # i64[R, L]
    position_ids: Tensor  # i64[R, L], counted from the row's prompt in each of its sequences
    sees: Tensor | None  # bool[R, 1, L, L]: query sees key; None: every position sees all before it in its row,
    # or, where sequences are packed, since its sequence began
    places: Tensor  # i64[N]: of each token in the mask, where it lies in it, of B * T
    sources: Tensor  # i64[N]: the position that predicts it, of R * L
    targets: Tensor  # i64[N]: the tokens themselves


def rows_of(
    sequences: Sequence[TokenSequence],
    shared_width: int,
    most: int | None = None,
    longest: int | None = None,
) -> list[Row]:
    """The rows that `sequences` lie in, longest first.

    Args:
        shared_width: the hidden size of a model in which sequences can share their prompt; 0: none share.
        most: sequences in a row; default: as many as pay.
        longest: positions in a row that several sequences share.
    """
    groups = defaultdict(list)
    for number, sequence in enumerate(sequences):
        groups[sequence.prompt if shared_width else number].append(number)
    lengths = [len(sequence) for sequence in sequences]
    rows = []
    for numbers in groups.values():
        members: list[int] = []
        length = 0
        for number in sorted(numbers, key=lambda number: -lengths[number]):
            sequence = sequences[number]
            longer = length + len(sequence.completion)
            saved = len(sequence.prompt) * shared_width * PAIRS_PER_TOKEN
            pays = longer**2 - length**2 - lengths[number] ** 2 < saved
            fits = (most is None or len(members) < most) and (longest is None or longer <= longest)
            if members and pays and fits:
                members, length = [*members, number], longer
            else:
                rows += [Row(tuple(members), length)] if members else []
                members, length = [number], lengths[number]
        rows.append(Row(tuple(members), length))
    return sorted(rows, key=lambda row: -row.length)


def lay_out(batch: RolloutBatch, shared_width: int, packed: bool = False, pad_token_id: int = 0) -> Layout:
    """Lay a micro-batch out in rows, on its own device.

    Args:
        shared_width: see `rows_of`.
        packed: all in one row without padding, R = 1. Where positions begin anew a sequence begins; attention
            must know that, since there is no mask.
        pad_token_id: any token of the vocabulary; what is computed for it is used nowhere.
    """
    sequences = batch.sequences
    rows = rows_of(sequences, shared_width)
    longest = rows[0].length
    size = sum(row.length for row in rows) if packed else len(rows) * longest
    counting = np.arange(size)
    ids = np.full(size, pad_token_id, dtype=np.int64)
    positions = np.empty(size, dtype=np.int64)
    segments = np.zeros(size, dtype=np.int64)  # 0: prompt or padding, 1 ..: completions
    predictors = np.zeros(tuple(batch.token_mask.shape), dtype=np.int64)
    begin = 0
    for row in rows:
        prompt = sequences[row.members[0]].prompt
        end = begin + len(prompt)
        ids[begin:end], positions[begin:end] = prompt, counting[: len(prompt)]
        for segment, member in enumerate(row.members, start=1):
            completion = sequences[member].completion
            start, end = end, end + len(completion)
            ids[start:end], segments[start:end] = completion, segment
            positions[start:end] = counting[len(prompt) : len(prompt) + len(completion)]
            # The first token is predicted by the end of the prompt, wherever the rest lies.
            predictors[member, :1] = begin + len(prompt) - 1
            predictors[member, 1 : len(completion)] = counting[start : end - 1]
        if not packed:
            # Padding counts on: positions that begin anew would say that another sequence begins.
            positions[end : begin + longest] = counting[row.length : row.length + begin + longest - end]
        begin += row.length if packed else longest
    device = batch.input_ids.device
    places = batch.token_mask.flatten().nonzero().squeeze(1)

    columns = size if packed else longest
    shares = any(len(row.members) > 1 for row in rows)
    return Layout(
        input_ids=from_lists(ids, np.int64, device).view(-1, columns),
        position_ids=from_lists(positions, np.int64, device).view(-1, columns),
        sees=_sees(from_lists(segments, np.int64, device).view(-1, columns)) if shares else None,
        places=places,
        sources=from_lists(predictors, np.int64, device).flatten().index_select(0, places),
        targets=batch.completion_ids.flatten().index_select(0, places),
    )


def _sees(segments: Tensor) -> Tensor:
    """bool[R, 1, L, L] from segments i64[R, L]: what came before, in the same segment or in the prompt."""
    # NumPy's: torch's would wake every thread for it.
    before = torch.from_numpy(np.tri(segments.shape[1], dtype=bool)).to(segments.device)
    query, key = segments.unsqueeze(2), segments.unsqueeze(1)
    return (before & ((key == query) | (key == 0))).unsqueeze(1)
