"""Threads of gloo compute with one processor where threads that wait are in nobody's way."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from grpox.runtime.setup import one_processor_each

PLACE = ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "OMP_WAIT_POLICY")


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    # vLLM's CPU build puts a function that does nothing in its place.
    monkeypatch.setattr(torch, "set_num_threads", torch._C.set_num_threads)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("variables", "inside"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "8"}, 1),
        ({"LOCAL_WORLD_SIZE": "3"}, 2),
        ({"WORLD_SIZE": "3"}, 2),
        ({"GOMP_SPINCOUNT": None}, 2),
        ({"GOMP_SPINCOUNT": None, "OMP_WAIT_POLICY": "passive"}, 1),
    ],
)
def test_the_number_of_threads_within_the_block(
    variables: dict[str, str | None], inside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    with one_processor_each():
        assert torch.get_num_threads() == inside
    assert torch.get_num_threads() == 2
