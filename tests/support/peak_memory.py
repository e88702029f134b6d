"""Measure the memory of tensors on the host at its peak, temporary ones within torch's operations included."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the most bytes that tensors which `function` creates take at a time."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        function()
    assert profile.kineto_results is not None
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes))
