"""Freed memory is kept for the next tensors, unless the environment says otherwise."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys

import pytest

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
