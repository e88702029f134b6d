"""Sequences in rows: where tokens land, what each position sees, and how arrays come to a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from grpox.contracts import Rollout
from grpox.policy.batch import (
    ALIGNMENT,
    FULL_LOGITS,
    ForwardMode,
    PackedBatch,
    Sample,
    collate,
    lengths_of,
    rows_of,
    samples_of,
    upload,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
WIDTH = 1000
"""Width of a model in which sharing pays for all sequences of this file."""
SHARED = ForwardMode(chunked=True, shared_width=WIDTH)


def two_of_one_prompt(mode: ForwardMode) -> PackedBatch:
    sequences = [((7, 8), (1, 2)), ((7, 8), (3,)), ((9,), (4, 5))]
    return collate([sample(*each) for each in sequences], CPU, mode)


def sample(prompt: tuple[int, ...], completion: tuple[int, ...]) -> Sample:
    length = len(completion)
    return Sample(prompt, completion, np.ones(length, np.bool_), np.zeros(length, np.float32), 0.0)


def rows(samples: list[Sample], *limits: int | None) -> tuple[list[int], list[list[int]]]:
    prompts, completions = ([getattr(each, name) for each in samples] for name in ("prompt", "completion"))
    lengths = lengths_of(prompts, completions)
    return rows_of(prompts, lengths, range(len(samples)), *limits)  # type: ignore[arg-type]


def test_prompts_are_padded_left_and_completions_right() -> None:
    rollouts = [
        Rollout(0, 0, (5,), (6, 7, 8), "length", 0, sampler_logprobs=(-1.0, -2.0, -3.0)),
        Rollout(0, 1, (5, 4), (9,), "stop", 0),
    ]
    batch = collate(samples_of(rollouts, [0.5, -0.5]), CPU)
    assert batch.input_ids.tolist() == [[0, 5, 6, 7, 8], [5, 4, 9, 0, 0]]
    assert batch.model_inputs()["attention_mask"].tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.token_mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.position_ids.tolist() == [[0, 0, 1, 2, 3], [0, 1, 2, 2, 2]]
    assert batch.sampler_logprobs[0].tolist() == [-1, -2, -3]
    assert batch.sampler_logprobs[1].isnan().all()
    assert batch.advantages.tolist() == [0.5, -0.5]


def test_a_pad_token_inside_a_completion_is_still_a_token() -> None:
    """If EOS serves as padding, only lengths can distinguish the two, not ids."""
    batch = collate(samples_of([Rollout(0, 0, (5,), (6, 0), "stop", 0)], [1.0]), CPU)
    assert batch.token_mask.tolist() == [[True, True]]
    assert batch.model_inputs()["attention_mask"].tolist() == [[1, 1, 1]]


def test_completions_of_one_prompt_lie_behind_one_copy_of_it_and_see_it_and_themselves() -> None:
    batch = two_of_one_prompt(SHARED)
    assert batch.input_ids.tolist() == [[7, 8, 1, 2, 3], [9, 4, 5, 0, 0]]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 3, 2]
    assert batch.position_ids[1, :3].tolist() == [0, 1, 2]
    assert batch.targets.tolist() == [1, 2, 3, 4, 5]
    # Row 0: 1 and 3 are both predicted by the prompt's end at 1, 2 by 1 at 2. Row 1 begins at 5.
    assert batch.sources.tolist() == [1, 2, 1, 5, 6]
    sees = batch.model_inputs()["attention_mask"]
    assert sees[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert sees[1, 0, :3, :3].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert sees.any(dim=-1).all()  # attention over nothing would be NaN


@pytest.mark.parametrize(
    ("packed", "ids", "positions", "sources"),
    [
        (False, [[7, 8, 1, 2], [7, 8, 3, 0], [9, 4, 5, 0]], [[0, 1, 2, 3]] * 3, [1, 2, 5, 8, 9]),
        (True, [[7, 8, 1, 2, 7, 8, 3, 9, 4, 5]], [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]], [1, 2, 5, 7, 8]),
    ],
)
def test_without_sharing_sequences_have_rows_or_lie_one_behind_the_other_and_need_no_mask(
    packed: bool, ids: list[list[int]], positions: list[list[int]], sources: list[int]
) -> None:
    batch = two_of_one_prompt(ForwardMode(chunked=True, packed=packed))
    assert batch.attention_mask is None
    assert (batch.input_ids.tolist(), batch.position_ids.tolist()) == (ids, positions)
    assert (batch.targets.tolist(), batch.sources.tolist()) == ([1, 2, 3, 4, 5], sources)


def test_tokens_that_the_model_did_not_write_are_attended_but_not_wanted() -> None:
    of_tool = Rollout(0, 0, (7, 8), (1, 2, 3), "stop", 0, model_mask=(True, False, True))
    samples = samples_of([of_tool, Rollout(1, 0, (9,), (), "stop", 0)], [0.0, 0.0])
    batch = collate(samples, CPU, SHARED)
    assert batch.targets.tolist() == [1, 3]
    assert batch.sources.tolist() == [1, 3]
    padded = collate(samples, CPU)
    assert padded.token_mask.tolist() == [[True, False, True], [False] * 3]
    assert padded.model_inputs()["attention_mask"].tolist() == [[1] * 5, [0, 1, 0, 0, 0]]


def test_values_of_single_tokens_become_rows_and_rows_are_cut() -> None:
    for mode in (FULL_LOGITS, SHARED):
        batch = two_of_one_prompt(mode)
        rows = batch.as_rows(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
        assert rows.tolist() == [[1, 2], [3, 0], [4, 5]]
        assert [each.tolist() for each in batch.cut(rows)] == [[1, 2], [3], [4, 5]]
        assert torch.equal(batch.as_rows(torch.cat(batch.cut(rows)), batch.places), rows)


def test_positions_of_tokens_in_each_mode() -> None:
    """Row 0 of the shared mode is 7 8 1 2 3, row 1 is 9 4 5; padded, rows begin at 4 and 8."""
    expected = {
        FULL_LOGITS: [0, 1, 2, 3, 4, 5, 6, 9, 10, 11],
        ForwardMode(chunked=True): [0, 1, 2, 3, 4, 5, 6, 8, 9, 10],
        SHARED: [0, 1, 2, 3, 0, 1, 4, 5, 6, 7],
        ForwardMode(chunked=True, packed=True): list(range(10)),
    }
    for mode, positions in expected.items():
        assert two_of_one_prompt(mode).attended_positions.tolist() == positions


def test_rows_are_the_longest_first_and_end_where_sharing_does_not_pay_or_at_a_limit() -> None:
    assert rows([sample((n,), (2,) * length) for n, length in enumerate((3, 9, 1, 5))], WIDTH)[0] == [
        10,
        6,
        4,
        2,
    ]
    # 4 tokens of the prompt saved, against 300 * 300 and more pairs of positions, in a hidden size of 64.
    assert rows([sample((1,) * 4, (2,) * 300)] * 2, 64)[1] == [[0], [1]]
    assert rows([sample((1,) * 40, (2,) * 5)] * 2, 64)[1] == [[0, 1]]
    sequences = [sample((1,) * 10, (2,) * 2)] * 4
    assert rows(sequences, WIDTH, 3)[1] == [[0, 1, 2], [3]]
    assert rows(sequences, WIDTH, None, 14)[0] == [14, 14]


ARRAYS = [
    np.array([[True, False, True]]),
    np.arange(5),
    np.zeros((0,), dtype=np.int64),
    np.array([[0.5, np.nan], [-1.5, 2.0]], dtype=np.float32),
    np.arange(12).reshape(3, 4)[:, ::2],
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Let memory of the host be the GPU's, and note how the buffer is made and copied."""
    noted: list[tuple[object, ...]] = []
    empty = torch.empty

    class Buffer(torch.Tensor):
        def to(self, *where: object, **how: object) -> torch.Tensor:  # type: ignore[override]
            noted.append((*where, how))
            return self.as_subclass(torch.Tensor).clone()

    def make(size: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        noted.append(("pinned", pin_memory))
        return empty(size, dtype=dtype).as_subclass(Buffer)

    monkeypatch.setattr(torch, "empty", make)
    return noted


def test_on_a_gpu_all_arrays_share_one_copy_from_pinned_memory(calls: list[tuple[object, ...]]) -> None:
    moved = upload(ARRAYS, GPU)
    assert calls == [("pinned", True), (GPU, {"non_blocking": True})]
    for tensor, array in zip(moved, ARRAYS, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        assert tensor.shape == array.shape
    assert len({tensor.untyped_storage().data_ptr() for tensor in moved}) == 1
    assert moved[3].data_ptr() % ALIGNMENT == moved[0].data_ptr() % ALIGNMENT


@pytest.mark.usefixtures("calls")
def test_a_change_of_one_part_in_place_is_no_change_of_another() -> None:
    one, other = upload([np.ones(2), np.ones(3)], GPU)
    before = other._version
    one.add_(1)
    assert other._version == before
    assert other.tolist() == [1, 1, 1]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_are_on_the_device_and_on_a_cpu_nothing_is_copied(device: str) -> None:
    moved = upload(ARRAYS, torch.device(device))
    assert {tensor.device.type for tensor in moved} == {device}
    assert [tensor.shape for tensor in moved] == [array.shape for array in ARRAYS]
    if device == "cpu":
        (tensor,) = upload([array := np.arange(3)], torch.device(device))
        array[0] = 7
        assert tensor.tolist() == [7, 1, 2]
