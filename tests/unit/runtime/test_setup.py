"""The start of a process: variables that are put back, memory that is kept, and threads of gloo."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from grpox.runtime.setup import one_processor_each, preserve_env


def test_variables_are_afterwards_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPOX_TEST_SET", "one")
    monkeypatch.setenv("GRPOX_TEST_GONE", "here")
    monkeypatch.delenv("GRPOX_TEST_NEW", raising=False)

    def change() -> None:
        with preserve_env("GRPOX_TEST_SET", "GRPOX_TEST_GONE", "GRPOX_TEST_NEW"):
            os.environ |= {"GRPOX_TEST_SET": "two", "GRPOX_TEST_NEW": "new"}
            del os.environ["GRPOX_TEST_GONE"]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        change()
    assert (os.environ["GRPOX_TEST_SET"], os.environ["GRPOX_TEST_GONE"]) == ("one", "here")
    assert "GRPOX_TEST_NEW" not in os.environ


SCRIPT = """
import resource
from grpox.runtime.setup import keep_freed_memory
import numpy as np

keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(2**28, np.uint8).fill(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 2**28 // resource.getpagesize()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
@pytest.mark.parametrize(("variables", "is_kept"), [({}, True), ({"MALLOC_ARENA_MAX": "1"}, False)])
def test_the_pages_of_a_freed_array_are_not_taken_from_the_system_again(
    variables: dict[str, str], is_kept: bool
) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    # NumPy asks for huge pages, which would make the count depend on the machine.
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**own, "NUMPY_MADVISE_HUGEPAGE": "0", **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    faults = int(done.stdout)
    assert faults < PAGES / 100 if is_kept else faults >= PAGES


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
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    with one_processor_each():
        assert torch.get_num_threads() == inside
    assert torch.get_num_threads() == 2
