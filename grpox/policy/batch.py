"""Samples to train on, ragged, and the tensors that a forward pass makes of a micro-batch of them.

They are padded, or laid out in rows: completions of one prompt can lie in one row behind a single copy of it,
each seeing the prompt and itself alone. That saves the repeated prompts and costs attention between
completions, computed only to be masked: a row grows while the first is worth more than the second.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from grpox.contracts import Rollout
from grpox.runtime.foreign_code import copied
from grpox.runtime.upload import upload


@dataclass(frozen=True, eq=False)
class TokenRecord:
    """A completion whose tokens the run's record gets, found by the first four fields."""

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
    """f32[T] under the policy that began this generation batch's updates; None while no update was made."""
    reference_logprobs: Tensor | None = None
    """f32[T] under the reference; None while not needed."""
    policy_keep: Tensor | None = None
    """bool[T]: tokens that the policy loss of the step at hand is made of; None between steps, and where all
    are."""
    reward: float = math.nan
    """Weighted sum of the rewards; NaN where every function abstained."""
    rewards: np.ndarray | None = None
    """f32[K], NaN where a function abstained; None unless the loss needs it, as are those below."""
    group_id: int | None = None
    """Equal for samples of one prompt in one generation batch of the run, and for no others."""
    sequence_id: int | None = None
    """Number of the sample in the run."""
    columns: Mapping[str, Any] | None = None
    """Column of the dataset -> its value in the row of the prompt."""
    observed: int = 0
    """Number of tokens that the model did not write."""
    token_record: TokenRecord | None = None
    """Set where the first pass over the sample is to be recorded; None otherwise, and once that is done."""

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

    @property
    def has_advantage(self) -> bool:
        """True where a token that is trained on has an advantage other than 0."""
        if isinstance(self.advantage, np.ndarray):
            return bool((self.token_mask & (self.advantage != 0)).any())
        return self.advantage != 0 and bool(self.token_mask.any())

    def __len__(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt) + len(self.completion)


TRUNCATED = ("length", "budget")
"""Finish reasons of completions that ended for want of room."""


def samples_of(
    rollouts: Sequence[Rollout], advantages: Sequence[float | np.ndarray], mask_truncated: bool = False
) -> list[Sample]:
    """Turn rollouts with their advantages into samples.

    Args:
        advantages: of each completion a number, or f32[T].
        mask_truncated: leave completions that ran into the longest length out of the token mask. They still
            count as sequences, and their rewards in their groups' statistics.
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
"""Part of the failure of a mode in which a sequence depends on the others of a micro-batch."""


@dataclass(frozen=True)
class ForwardMode:
    """Savings in a model's forward pass."""

    chunked: bool = False
    """True: the head returns chosen log-probabilities instead of all logits."""
    shared_width: int = 0
    """Hidden size if sequences can share their prompt in a row; 0: they cannot."""
    packed: bool = False
    """True: the sequences of a micro-batch are in one row without padding. Where positions begin anew a
    sequence begins; attention must know that, since there is no mask."""
    by_lengths: bool = False
    """True: attention accepts lengths of sequences, so transformers needs to make no mask, but for rows that
    sequences share."""
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


@dataclass(frozen=True)
class RolloutBatch:
    """One micro-batch of B samples on one rank, completions padded on the right to the longest, T."""

    samples: Sequence[Sample]
    host_mask: np.ndarray  # bool[B, T], as token_mask, for what is decided without asking the device
    token_mask: Tensor  # bool[B, T]: tokens that are trained on
    token_places: Tensor  # i64[N]: where these tokens lie, of B * T
    places: Tensor  # i64[sum of the completions' lengths]: where each token of the completions lies, of B * T
    sampler_logprobs: Tensor  # f32[B, T], NaN where the generator reported none
    advantages: Tensor  # f32[B], or f32[B, T] where tokens have different ones
    _layouts: dict[ForwardMode, Layout] = field(default_factory=dict, init=False)
    _padded: list[Tensor] = field(default_factory=list, init=False)  # input ids and attention mask, or empty

    def layout(self, mode: ForwardMode) -> Layout:
        """Lay the batch out in rows, on its device, once for all passes in `mode` over it."""
        if mode not in self._layouts:
            arrays, finish = _plan(self.samples, self.host_mask, mode)
            self._layouts[mode] = finish(upload(arrays, self.token_mask.device), self.token_places)
        return self._layouts[mode]

    def pad(self, rows: Sequence[Tensor]) -> Tensor:
        """Pad one tensor [T_i] a sample to [B, T], with zeros on the right."""
        flat = torch.cat(list(rows))
        whole = flat.new_zeros(self.token_mask.numel())
        return whole.index_copy_(0, self.places, flat).view_as(self.token_mask)

    def cut(self, values: Tensor) -> list[Tensor]:
        """Cut [B, T] into one tensor [T_i] a sample."""
        lengths = [len(sample.completion) for sample in self.samples]
        return list(torch.split(values.flatten().index_select(0, self.places), lengths))

    def pad_known(self, rows: Sequence[Tensor | None], others: Tensor | None = None) -> Tensor | None:
        """Pad as `pad` does, with the rows of `others`, [B, T], for samples whose own is None.

        Returns:
            None where all are None.

        Raises:
            ValueError: some are None, and there is nothing in their place.
        """
        known = [row for row in rows if row is not None]
        if not known:
            return None
        if len(known) == len(rows):
            return self.pad(known)
        if others is None:
            raise ValueError(f"known for {len(known)} of {len(rows)} samples of a micro-batch")
        cut = self.cut(others)
        return self.pad([own if row is None else row for row, own in zip(rows, cut, strict=True)])

    def rows(self, named: Mapping[str, Tensor]) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Cut named values [B, T] into those of each sample, [T_i] by name, with its token mask, bool[T_i]."""
        columns = {name: self.cut(values) for name, values in named.items()}
        return [
            ({name: values[row] for name, values in columns.items()}, mask)
            for row, mask in enumerate(self.cut(self.token_mask))
        ]

    @property
    def rewards(self) -> Tensor | None:
        """f32[B, K], NaN where a function abstained; None where the samples carry none."""
        rows = _carried(self.samples, "rewards")
        return None if rows is None else self._upload(np.stack(rows).astype(np.float32, copy=False))

    def ids(self, name: Literal["group_id", "sequence_id"]) -> Tensor | None:
        """i64[B]: this number of each sample; None where the samples carry none."""
        numbers = _carried(self.samples, name)
        return None if numbers is None else self._upload(np.array(numbers, dtype=np.int64))

    @property
    def trained_rows(self) -> Tensor:
        """i64[at most B]: the rows with a token that is trained on."""
        return self._upload(np.flatnonzero(self.host_mask.any(axis=1)))

    def _upload(self, array: np.ndarray) -> Tensor:
        return upload([array], self.token_mask.device)[0]

    @property
    def columns(self) -> dict[str, list[Any]] | None:
        """Column of the dataset -> B values, which are copies; None where the samples carry none."""
        rows = _carried(self.samples, "columns")
        return None if rows is None else {name: [copied(row[name]) for row in rows] for name in rows[0]}

    @property
    def attention_mask(self) -> Tensor:
        """i64[B, P + T], 1 where there is a token; prompts are padded on the left to the longest, P."""
        return self._ids_and_mask()[1]

    @property
    def input_ids(self) -> Tensor:
        """i64[B, P + T], 0 where there is padding."""
        return self._ids_and_mask()[0]

    def _ids_and_mask(self) -> list[Tensor]:
        if not self._padded:
            self._padded.extend(upload(_pad_prompts(self.samples), self.token_mask.device))
        return self._padded

    @property
    def completion_ids(self) -> Tensor:
        """i64[B, T]"""
        return self.input_ids[:, -self.token_mask.shape[1] :]

    @property
    def position_ids(self) -> Tensor:
        """i64[B, P + T], counted from the first real token, so that left padding shifts nothing."""
        return (self.attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def _carried(samples: Sequence[Sample], field: str) -> list[Any] | None:
    """List a field of all samples; None where any lacks it."""
    values = [getattr(sample, field) for sample in samples]
    return None if any(value is None for value in values) else values


def collate(samples: Sequence[Sample], device: torch.device, mode: ForwardMode | None = None) -> RolloutBatch:
    """Pad the samples of one micro-batch into tensors on `device`; T is at least 1.

    Args:
        mode: send also what a pass in this mode reads of the host, which then needs no copy of its own.
    """
    lengths = [len(sample.completion) for sample in samples]
    width = max(1, *lengths)
    mask = np.zeros((len(samples), width), dtype=np.bool_)
    logprobs = np.full(mask.shape, np.nan, dtype=np.float32)
    for row, sample in enumerate(samples):
        mask[row, : lengths[row]] = sample.token_mask
        logprobs[row, : lengths[row]] = sample.sampler_logprobs
    rows = np.repeat(np.arange(len(lengths)) * width, lengths)
    columns = np.concatenate([np.arange(length) for length in lengths])
    arrays = [mask, np.flatnonzero(mask), rows + columns, logprobs, _advantages(samples, width)]
    if mode is None:
        return RolloutBatch(samples, mask, *upload(arrays, device))
    if not mode.chunked:
        *tensors, ids, attended = upload([*arrays, *_pad_prompts(samples)], device)
        batch = RolloutBatch(samples, mask, *tensors)
        batch._padded.extend((ids, attended))
        return batch
    planned, finish = _plan(samples, mask, mode)
    tensors = upload([*arrays, *planned], device)
    batch = RolloutBatch(samples, mask, *tensors[: len(arrays)])
    batch._layouts[mode] = finish(tensors[len(arrays) :], batch.token_places)
    return batch


def _pad_prompts(samples: Sequence[Sample]) -> list[np.ndarray]:
    """Return input ids and attention mask, i64[B, P + T] each."""
    begin, attended = _columns(samples)
    ids = np.zeros(attended.shape, dtype=np.int64)
    for row, sample in enumerate(samples):
        first = begin - len(sample.prompt)
        ids[row, first : first + len(sample)] = sample.prompt + sample.completion
    return [ids, attended.astype(np.int64)]


def _columns(samples: Sequence[Sample]) -> tuple[int, np.ndarray]:
    """P, the column in which completions begin, and bool[B, P + T]: where there is a token."""
    prompts = np.array([len(sample.prompt) for sample in samples])[:, None]
    completions = np.array([len(sample.completion) for sample in samples])[:, None]
    column = np.arange(-int(prompts.max()), max(1, int(completions.max())))
    return int(prompts.max()), (column >= -prompts) & (column < completions)


def _advantages(samples: Sequence[Sample], width: int) -> np.ndarray:
    """f32[B], or f32[B, T]."""
    if not any(isinstance(sample.advantage, np.ndarray) for sample in samples):
        return np.array([sample.advantage for sample in samples], dtype=np.float32)
    padded = np.zeros((len(samples), width), np.float32)
    for row, sample in enumerate(samples):
        padded[row, : len(sample.completion)] = sample.advantage
    return padded


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

    Padding needs no mask, as no position sees what comes after it. Where sequences share a row, a mask says
    which positions each sees; else their lengths do, if attention accepts lengths.
    """

    input_ids: Tensor  # i64[R, L]
    position_ids: Tensor  # i64[R, L], counted from the row's prompt in each of its sequences
    segments: Tensor | None  # i64[R, L], 0: prompt or padding, 1 ..: completions; None: no row has several
    places: Tensor  # i64[N]: of each token in the mask, where it lies in it, of B * T
    sources: Tensor  # i64[N]: the position that predicts it, of R * L
    targets: Tensor  # i64[N]: the tokens themselves
    starts: Tensor | None  # i32[S + 1], where each of S sequences begins in the R * L positions, and R * L
    longest: int  # positions of the longest row or sequence

    @property
    def sees(self) -> Tensor | None:
        """bool[R, 1, L, L]: query sees key: what came before, in its own segment or in the prompt.

        Computed anew at each call, as it is large. None: every position sees all before it in its row, or,
        where sequences are packed, since its sequence began.
        """
        if self.segments is None:
            return None
        length, device = self.segments.shape[1], self.segments.device
        if device.type == "cpu":  # NumPy's: torch's comparison would wake every thread for it
            before = upload([np.tri(length, dtype=bool)], device)[0]
        else:
            order = torch.arange(length, device=device)
            before = order.unsqueeze(1) >= order
        query, key = self.segments.unsqueeze(2), self.segments.unsqueeze(1)
        return (before & ((key == query) | (key == 0))).unsqueeze(1)

    def attention_arguments(self) -> dict[str, Any]:
        """Return the arguments of a model's forward that say what each position sees.

        transformers passes a mask of four dimensions on as it is. The mask beside lengths is a placeholder,
        which attention by lengths never reads: without it transformers would look for the sequences in the
        positions, which are on the device.
        """
        if self.starts is None:
            return {"attention_mask": self.sees}
        return {
            "attention_mask": torch.empty(1, 1, 1, 1, dtype=torch.bool, device=self.starts.device),
            "cu_seq_lens_q": self.starts,
            "cu_seq_lens_k": self.starts,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


def rows_of(
    sequences: Sequence[Sample],
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


def _plan(
    sequences: Sequence[Sample], mask: np.ndarray, mode: ForwardMode
) -> tuple[list[np.ndarray], Callable[[Sequence[Tensor], Tensor], Layout]]:
    """Lay sequences out in rows on the host, with the token mask bool[B, T].

    Returns:
        arrays; and a function that makes the layout of them on a device, and of the mask's places.
    """
    rows = rows_of(sequences, mode.shared_width)
    longest = rows[0].length
    size = sum(row.length for row in rows) if mode.packed else len(rows) * longest
    counting = np.arange(size)
    ids = np.zeros(size, dtype=np.int64)  # padding may be any token: what is computed for it is used nowhere
    positions = np.empty(size, dtype=np.int64)
    segments = np.zeros(size, dtype=np.int64)
    predictors, targets = np.zeros((2, *mask.shape), dtype=np.int64)
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
            targets[member, : len(completion)] = completion
        if not mode.packed:
            # Padding counts on: positions that begin anew would say that another sequence begins.
            positions[end : begin + longest] = counting[row.length : row.length + begin + longest - end]
        begin += row.length if mode.packed else longest
    taught = np.flatnonzero(mask)
    shares = any(len(row.members) > 1 for row in rows)
    widths = [row.length if mode.packed else longest for row in rows]
    arrays = [each.reshape(-1, size if mode.packed else longest) for each in (ids, positions, segments)]
    arrays += [predictors.ravel()[taught], targets.ravel()[taught], np.cumsum([0, *widths], dtype=np.int32)]

    def finish(tensors: Sequence[Tensor], places: Tensor) -> Layout:
        input_ids, position_ids, segments, sources, targets, starts = tensors
        return Layout(
            input_ids=input_ids,
            position_ids=position_ids,
            segments=segments if shares else None,
            places=places,
            sources=sources,
            targets=targets,
            starts=starts if mode.by_lengths and not shares else None,
            longest=longest,
        )

    return arrays, finish


def attended_positions(batch: RolloutBatch, mode: ForwardMode) -> Tensor:
    """Return where each token of each sequence lies in what the model reads in `mode`: i64[all tokens].

    Tokens of a prompt that sequences share come once for each of them.
    """
    if not mode.chunked:
        return batch._upload(np.flatnonzero(_columns(batch.samples)[1]))
    rows = rows_of(batch.samples, mode.shared_width)
    longest, begin = rows[0].length, 0
    positions = []
    for row in rows:
        end = begin + len(batch.samples[row.members[0]].prompt)
        prompt = np.arange(begin, end)
        for member in row.members:
            start, end = end, end + len(batch.samples[member].completion)
            positions += [prompt, np.arange(start, end)]
        begin += row.length if mode.packed else longest
    return batch._upload(np.concatenate(positions))
