"""Arrays of the host arrive on a device as they were; on a GPU as parts of one buffer, with one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from grpox.policy.batch import ALIGNMENT, upload

GPU = torch.device("cuda", 1)
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
