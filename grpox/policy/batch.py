"""Samples of different lengths to train on, and the batch of tensors in which a model reads several of them.

A forward mode sets how the model reads them: padded as its own forward pass expects, or in rows. Completions of
one prompt can share a row behind a single copy of the prompt; each attends only to the prompt and itself. This
saves the repeated prompts, but computes attention between completions only to mask it. A row grows while the
saving exceeds this cost.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from types import NoneType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from grpox.contracts import Rollout
from grpox.runtime.foreign_code import copied

Tokens = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TokenRecord:
    """A completion whose tokens are saved in the run's record; the first four fields identify it."""

    step: int
    """First step that trains on its generation batch; with `part`, the name of its file of completions."""
    part: int
    """Number of the generation batch among those saved in this step, from 1."""
    group: int
    sample: int
    turns: np.ndarray  # i32[T]: the model's turn of each token, from 0; -1: an observation


@dataclass(eq=False)
class Sample:
    """One completion of T tokens as a rank trains on it, without padding.

    The first five fields stay in the memory of the host, as numbers that decide what is computed; the
    log-probabilities that passes over the sample have computed stay on the device.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    token_mask: np.ndarray  # bool[T]: tokens that the model wrote and that are trained on
    sampler_logprobs: np.ndarray  # f32[T], NaN where the generator reported none
    advantage: float | np.ndarray
    """One number, or f32[T] where tokens have different ones; 0 then where the model did not write."""
    old_logprobs: Tensor | None = None
    """f32[T] under the policy before this generation batch's first update; None before that update."""
    reference_logprobs: Tensor | None = None
    """f32[T] under the reference; None while not needed."""
    policy_keep: Tensor | None = None
    """bool[T]: tokens that the policy loss of the current step includes; None between steps, and if it
    includes all."""
    reward: float = math.nan
    """Weighted sum of the rewards; NaN where every function abstained."""
    rewards: np.ndarray | None = None
    """f32[K], NaN where a function abstained. This and the next fields are None unless the loss needs them."""
    group_id: int | None = None
    """Equal for samples of one prompt in one generation batch of the run, and for no others."""
    sequence_id: int | None = None
    """Number of the sample in the run."""
    columns: Mapping[str, Any] | None = None
    """Column of the dataset -> its value in the row of the prompt."""
    observed: int = 0
    """Number of tokens that the model did not write."""
    token_record: TokenRecord | None = None
    """Set if the first pass over the sample must be recorded; None otherwise, and after it was recorded."""

    @property
    def model_length(self) -> int:
        """Number of tokens that the model wrote, trained on or not."""
        return len(self.completion) - self.observed

    @property
    def mean_advantage(self) -> float:
        """The mean over the tokens that are trained on, 0 without any."""
        if not isinstance(self.advantage, np.ndarray):
            return self.advantage
        return float(self.advantage[self.token_mask].mean()) if self.token_mask.any() else 0.0

    def __len__(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt) + len(self.completion)


TRUNCATED = ("length", "budget")
"""Finish reasons of completions that ended because they had no more room."""


def samples_of(
    rollouts: Sequence[Rollout], advantages: Sequence[float | np.ndarray], mask_truncated: bool = False
) -> list[Sample]:
    """Turn rollouts with their advantages into samples.

    Args:
        advantages: for each completion a number, or f32[T].
        mask_truncated: exclude completions that reached the longest length from the token mask. They still
            count as sequences, and their rewards count in their groups' statistics.
    """
    samples = []
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        length = len(rollout.completion_ids)
        logprobs = np.full(length, np.nan, dtype=np.float32)
        if rollout.sampler_logprobs is not None:
            logprobs[:] = rollout.sampler_logprobs
        mask = np.ones(length, dtype=np.bool_)
        if rollout.model_mask is not None:
            mask[:] = rollout.model_mask
        observed = length - int(mask.sum())
        if mask_truncated and rollout.finish_reason in TRUNCATED:
            mask[:] = False
        prompt, completion = tuple(rollout.prompt_ids), tuple(rollout.completion_ids)
        own = advantage if isinstance(advantage, np.ndarray) else float(advantage)
        samples.append(Sample(prompt, completion, mask, logprobs, own, observed=observed))
    return samples


DEPENDS = "gave other numbers alone and together"
"""Text in the failure of a mode in which a sequence depends on the other sequences of a micro-batch."""


@dataclass(frozen=True)
class ForwardMode:
    """Savings in a model's forward pass."""

    chunked: bool = False
    """True: the head returns chosen log-probabilities instead of all logits."""
    shared_width: int = 0
    """Hidden size if sequences can share their prompt in a row; 0: they cannot."""
    packed: bool = False
    """True: the sequences of a micro-batch are in one row without padding. A sequence begins where positions
    restart from 0; attention must respect this, since there is no mask."""
    by_lengths: bool = False
    """True: attention accepts lengths of sequences, so transformers builds no mask, except for rows with shared
    prompts."""
    failures: tuple[str, ...] = field(default=(), compare=False)
    """Errors raised by the trials of other modes, for the user."""

    def __str__(self) -> str:
        """Key of the run file that enables the mode."""
        way = "packing" if self.packed else "prefix_sharing" if self.shared_width else "chunked_logprobs"
        return f"train.{way}" if self.chunked else "the model's own forward pass"

    @property
    def dependence(self) -> str:
        """The failure of the model's own forward pass beside other sequences; empty without one."""
        return next((each for each in self.failures if DEPENDS in each and str(FULL_LOGITS) in each), "")


FULL_LOGITS = ForwardMode()


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """B samples that go through the model together on one rank, as it reads them in one forward mode.

    The model reads R rows of L positions. Padding on the right needs no mask, because no position attends to
    later ones. Losses read values of the completions' tokens as [B, T]: one row for each sample, padded on the
    right to the longest completion. `as_rows` and `cut` change between that view and single tokens.
    """

    samples: Sequence[Sample]
    mode: ForwardMode
    host_mask: np.ndarray  # bool[B, T], as token_mask, for decisions that need not wait for the device
    lengths: np.ndarray  # i64[2, B]: tokens of each prompt, and of each completion
    begins: np.ndarray  # i64[2, B]: the positions, of R * L, in which they begin
    longest: int
    """Positions of the longest row or sequence."""
    token_mask: Tensor  # bool[B, T]: tokens that are trained on
    token_places: Tensor  # i64[N]: where these tokens lie, of B * T
    places: Tensor  # i64[tokens of all completions]: where they lie, of B * T
    sampler_logprobs: Tensor  # f32[B, T], NaN where the generator reported none
    advantages: Tensor  # f32[B], or f32[B, T] where tokens have different ones
    input_ids: Tensor  # i64[R, L], 0 where there is padding
    position_ids: Tensor  # i64[R, L], counted from the prompt's first token in each sequence
    segments: Tensor | None = None
    """i64[R, L]. For the model's own forward pass 0: padding, 1: a token. Else 0: prompt or padding, 1 ..: the
    completions of a row; None if no row has several."""
    starts: Tensor | None = None
    """i32[S + 1]: where each of S sequences begins, of R * L, and R * L; None: attention needs no lengths."""
    sources: Tensor | None = None
    """i64[N]: the position, of R * L, that predicts a token that is trained on; None: own forward pass."""
    targets: Tensor | None = None
    """i64[N]: the tokens themselves; None: own forward pass."""

    @property
    def attention_mask(self) -> Tensor | None:
        """i64[R, L] for the model's own forward pass, 1 where there is a token; else bool[R, 1, L, L] or None.

        In the latter, [r, 0, i, j] is True if position i attends to j: an earlier one in its own segment or in
        the prompt. It is large, so each call computes it again. None: a position attends to all earlier ones in
        its row, or, if sequences are packed, in its sequence.
        """
        if self.segments is None or not self.mode.chunked:
            return self.segments
        length, device = self.segments.shape[1], self.segments.device
        if device.type == "cpu":  # NumPy's: torch's comparison would wake every thread for it
            before = upload([np.tri(length, dtype=bool)], device)[0]
        else:
            order = torch.arange(length, device=device)
            before = order.unsqueeze(1) >= order
        query, key = self.segments.unsqueeze(2), self.segments.unsqueeze(1)
        return (before & ((key == query) | (key == 0))).unsqueeze(1)

    def model_inputs(self) -> dict[str, Any]:
        """Return the arguments of a model's forward: the tokens, and the positions that each position sees.

        transformers passes a mask of four dimensions on unchanged. With lengths, the mask is a placeholder that
        attention by lengths never reads: without it transformers would search the positions, which are on the
        device, for the sequences.
        """
        inputs = {"input_ids": self.input_ids, "position_ids": self.position_ids}
        if self.starts is None:
            return {**inputs, "attention_mask": self.attention_mask}
        return {
            **inputs,
            "attention_mask": torch.empty(1, 1, 1, 1, dtype=torch.bool, device=self.starts.device),
            "cu_seq_lens_q": self.starts,
            "cu_seq_lens_k": self.starts,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }

    @property
    def attended_positions(self) -> Tensor:
        """i64[all tokens]: where each token of each sequence lies, of R * L.

        Tokens of a shared prompt come once for each sequence that shares it.
        """
        order = self.begins[1].argsort(kind="stable")
        begins, lengths = (each[:, order].T.ravel() for each in (self.begins, self.lengths))
        return self._upload(np.repeat(begins, lengths) + _count(lengths))

    def as_rows(self, values: Tensor, places: Tensor | None = None) -> Tensor:
        """Return values of single tokens as [B, T], with zeros elsewhere.

        Args:
            values: [N] for the tokens that are trained on, or [M] for the tokens at `places`.
            places: i64[M], of B * T.
        """
        rows = values.new_zeros(self.token_mask.numel())
        where = self.token_places if places is None else places
        return rows.index_copy_(0, where, values).view_as(self.token_mask)

    def cut(self, values: Tensor) -> list[Tensor]:
        """Cut [B, T] into one tensor [T_i] per sample."""
        return list(torch.split(values.flatten().index_select(0, self.places), self.lengths[1].tolist()))

    def pad_known(self, rows: Sequence[Tensor | None], others: Tensor | None = None) -> Tensor | None:
        """Pad one tensor [T_i] per sample to [B, T]; a sample with None gets its row of `others`, [B, T].

        Returns:
            None if all are None.

        Raises:
            ValueError: some are None, and `others` is None.
        """
        known = [row for row in rows if row is not None]
        if not known:
            return None
        if len(known) < len(rows):
            if others is None:
                raise ValueError(f"known for {len(known)} of {len(rows)} samples of a micro-batch")
            known = [own if row is None else row for row, own in zip(rows, self.cut(others), strict=True)]
        return self.as_rows(torch.cat(known), self.places)

    def rows(self, named: Mapping[str, Tensor]) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Cut named values [B, T] by sample: [T_i] by name, with the sample's token mask, bool[T_i]."""
        columns = {name: self.cut(values) for name, values in named.items()}
        return [
            ({name: values[row] for name, values in columns.items()}, mask)
            for row, mask in enumerate(self.cut(self.token_mask))
        ]

    @property
    def rewards(self) -> Tensor | None:
        """f32[B, K], NaN where a function abstained; None if the samples have none."""
        rows = self._carried("rewards")
        return None if rows is None else self._upload(np.stack(rows).astype(np.float32, copy=False))

    def ids(self, name: Literal["group_id", "sequence_id"]) -> Tensor | None:
        """i64[B]: this number of each sample; None if the samples have none."""
        numbers = self._carried(name)
        return None if numbers is None else self._upload(np.array(numbers, dtype=np.int64))

    @property
    def columns(self) -> dict[str, list[Any]] | None:
        """Column of the dataset -> B values, which are copies; None if the samples have none."""
        rows = self._carried("columns")
        return None if rows is None else {name: [copied(row[name]) for row in rows] for name in rows[0]}

    @property
    def trained_rows(self) -> Tensor:
        """i64[at most B]: the rows with a token that is trained on."""
        return self._upload(np.flatnonzero(self.host_mask.any(axis=1)))

    def _carried(self, name: str) -> list[Any] | None:
        """List a field of all samples; None if any sample lacks it."""
        values = [getattr(sample, name) for sample in self.samples]
        return None if NoneType in map(type, values) else values

    def _upload(self, array: np.ndarray) -> Tensor:
        return upload([array], self.token_mask.device)[0]


ALIGNMENT = 16
"""Arrays begin at multiples of this number of bytes in a shared buffer; it fits the size of every type."""


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays to `device`: tensors of the arrays' shapes and types. The host does not wait for the copy.

    A copy from ordinary memory to a GPU would wait until the GPU has finished all earlier work. On a GPU the
    tensors are parts of one buffer, copied once through pinned memory. PyTorch's allocator does not reuse this
    memory before the copy has ended. On a CPU the tensors use the memory of the arrays.
    """
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    begins = np.cumsum([0, *sizes]).tolist()
    memory = buffer.numpy()
    for begin, array in zip(begins, arrays, strict=False):
        memory[begin : begin + array.nbytes].view(array.dtype)[:] = array.ravel()
    moved = buffer.to(device, non_blocking=True)
    tensors = []
    for begin, array in zip(begins, arrays, strict=False):
        # `data` has its own version: an in-place change of one tensor does not count as a change of another.
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        tensors.append(moved.data[begin : begin + array.nbytes].view(dtype).view(array.shape))
    return tensors


def collate(samples: Sequence[Sample], device: torch.device, mode: ForwardMode = FULL_LOGITS) -> PackedBatch:
    """Make the batch of some samples on `device`, with one copy from the host.

    Args:
        mode: the forward mode of the model that reads it.
    """
    columns = [(s.prompt, s.completion, s.token_mask, s.sampler_logprobs, s.advantage) for s in samples]
    prompts, completions, masks, logprobs, advantages = zip(*columns, strict=True)
    lengths = lengths_of(prompts, completions)
    shape = len(samples), max(1, int(lengths[1].max()))
    places = np.repeat(np.arange(shape[0]) * shape[1], lengths[1]) + _count(lengths[1])
    is_trained = np.concatenate(masks)
    mask = _pad(is_trained, places, shape, np.False_)
    if np.ndarray in map(type, advantages):
        of_tokens = np.concatenate(list(map(np.broadcast_to, advantages, lengths[1])))
        padded = _pad(of_tokens, places, shape, np.float32(0))
    else:
        padded = np.array(advantages, dtype=np.float32)
    begins, longest, of_model = _lay_out(prompts, completions, lengths, mode, is_trained)
    arrays = {
        "token_mask": mask,
        "token_places": places[is_trained],
        "places": places,
        "sampler_logprobs": _pad(np.concatenate(logprobs), places, shape, np.float32(math.nan)),
        "advantages": padded,
        **of_model,
    }
    tensors = dict(zip(arrays, upload(list(arrays.values()), device), strict=True))
    return PackedBatch(samples, mode, mask, lengths, begins, longest, **tensors)


def lengths_of(prompts: Iterable[Tokens], completions: Iterable[Tokens]) -> np.ndarray:
    """Count the tokens of each prompt, and of each completion: i64[2, B]."""
    return np.array([list(map(len, prompts)), list(map(len, completions))], dtype=np.int64)


def _count(lengths: np.ndarray) -> np.ndarray:
    """Count from 0 in each of consecutive spans of these lengths: i64[S] -> i64[sum]."""
    ends = lengths.cumsum()
    counted: np.ndarray = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    return counted


def _pad(values: np.ndarray, places: np.ndarray, shape: tuple[int, int], padding: np.generic) -> np.ndarray:
    """Put values of tokens at their places in [B, T], of the type of `padding`."""
    rows = np.full(shape, padding)
    rows.reshape(-1)[places] = values
    return rows


PAIRS_PER_TOKEN = 2
"""Times the hidden size: pairs of positions whose attention costs as much as one token in the rest of a layer.
By operations it would be 6, but attention uses a machine less efficiently than large products do."""


def rows_of(
    prompts: Sequence[Tokens],
    lengths: np.ndarray,
    numbers: Iterable[int],
    shared_width: int,
    most: int | None = None,
    longest: int | None = None,
) -> tuple[list[int], list[list[int]]]:
    """Put sequences into rows; sequences of one prompt share a single copy of it while that saves time.

    Args:
        lengths: i64[2, B], the lengths of all prompts and completions.
        numbers: numbers of the sequences to put into rows.
        shared_width: the hidden size of a model in which sequences can share their prompt; 0: none share.
        most: largest number of sequences in a row; default: as many as save time.
        longest: largest number of positions in a row that several sequences share.

    Returns:
        the positions of each row, longest first, and the numbers of its sequences.
    """
    groups = defaultdict(list)
    for number in numbers:
        groups[prompts[number] if shared_width else number].append(number)
    completions, alone = lengths[1].tolist(), lengths.sum(axis=0).tolist()
    rows: list[tuple[int, list[int]]] = []
    for group in groups.values():
        saved = (alone[group[0]] - completions[group[0]]) * shared_width * PAIRS_PER_TOKEN
        length, members = 0, list[int]()
        for number in sorted(group, key=alone.__getitem__, reverse=True):
            longer = length + completions[number]
            pays = longer**2 - length**2 - alone[number] ** 2 < saved
            fits = (most is None or len(members) < most) and (longest is None or longer <= longest)
            if members and pays and fits:
                length, members = longer, [*members, number]
                rows[-1] = length, members
            else:
                length, members = alone[number], [number]
                rows.append((length, members))
    rows.sort(key=itemgetter(0), reverse=True)
    return list(map(itemgetter(0), rows)), list(map(itemgetter(1), rows))


def _lay_out(
    prompts: Sequence[Tokens],
    completions: Sequence[Tokens],
    lengths: np.ndarray,
    mode: ForwardMode,
    is_trained: np.ndarray,
) -> tuple[np.ndarray, int, dict[str, np.ndarray]]:
    """Lay sequences out on the host, as a model reads them.

    Args:
        is_trained: bool[tokens of all completions]

    Returns:
        fields of `PackedBatch`: `begins`, `longest`, and by name the fields that the model reads.
    """
    begins, segments, widths = _place(prompts, lengths, mode)
    starts = np.cumsum([0, *widths], dtype=np.int32)
    columns, own = _count(lengths[1]), lengths[1]
    at_prompts = np.repeat(begins[0], lengths[0]) + _count(lengths[0])
    at_completions = np.repeat(begins[1], own) + columns
    targets = np.array(list(chain.from_iterable(completions)), dtype=np.int64)
    ids, of_segments = np.zeros((2, starts[-1]), dtype=np.int64)
    ids[at_prompts], ids[at_completions] = list(chain.from_iterable(prompts)), targets
    of_segments[at_completions] = np.repeat(segments, own)
    shape = (1, -1) if mode.packed else (-1, widths[0])
    arrays = {"input_ids": ids.reshape(shape)}
    if not mode.chunked:
        of_segments[at_prompts] = 1
        # Counted from the first real token, so that padding on the left shifts nothing.
        counted = np.arange(widths[0]) - (begins[0] - starts[:-1])[:, None]
        last = lengths.sum(axis=0)[:, None] - 1
        arrays["position_ids"] = np.minimum(np.maximum(counted, 0), last)
        return begins, int(widths[0]), arrays | {"segments": of_segments.reshape(shape)}
    # Padding continues the count: positions that restart would mark the begin of another sequence.
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], widths)
    positions[at_completions] = np.repeat(lengths[0], own) + columns
    arrays["position_ids"] = positions.reshape(shape)
    # The first token is predicted by the end of the prompt, wherever the rest lies.
    predictors = np.where(columns == 0, np.repeat(begins[0] + lengths[0], own), at_completions) - 1
    arrays |= {"sources": predictors[is_trained], "targets": targets[is_trained]}
    if segments.max() > 1:
        arrays["segments"] = of_segments.reshape(shape)
    elif mode.by_lengths:
        arrays["starts"] = starts
    return begins, int(widths.max()), arrays


def _place(
    prompts: Sequence[Tokens], lengths: np.ndarray, mode: ForwardMode
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Choose where sequences lie.

    Returns:
        `PackedBatch.begins`; the number of each completion in its row, from 1, i64[B]; and the positions from
        the begin of each row to that of the next, i64[R].
    """
    begins, segments, count = np.empty_like(lengths), np.ones(len(prompts), dtype=np.int64), len(prompts)
    if not mode.chunked:  # prompts are padded on the left, completions on the right
        left, right = lengths.max(axis=1)
        widths = np.full(count, left + max(1, right))
        begins[1] = np.arange(count) * widths + left
        begins[0] = begins[1] - lengths[0]
        return begins, segments, widths
    of_rows, members = rows_of(prompts, lengths, range(count), mode.shared_width)
    widths = np.array(of_rows) if mode.packed else np.full(len(of_rows), of_rows[0])
    sizes, order = np.array(list(map(len, members))), np.concatenate(members)
    before = lengths[1, order].cumsum() - lengths[1, order]
    before -= np.repeat(before[sizes.cumsum() - sizes], sizes)  # tokens of completions before it in its row
    begins[0, order] = np.repeat(widths.cumsum() - widths, sizes)
    begins[1, order] = begins[0, order] + lengths[0, order] + before
    segments[order] = _count(sizes) + 1
    return begins, segments, widths
