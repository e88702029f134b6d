"""Library errors that mean lack of memory, and the message for the user."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from grpox.errors import ConfigError, Problem, RunFailed
from grpox.policy.memory_plan.of_run import generator_settings
from grpox.runfile.load import load_run
from grpox.runtime.phases import PeakMemory, PhaseTimes

VLLM = (
    "Available memory on node 0 (21.18/23.54 GiB) on kv cache allocation is less than requested memory for kv"
)


def test_an_engine_without_room_for_its_cache_is_told_with_the_settings_of_its_share() -> None:
    cause = ValueError(f"{VLLM} (5000.0 GiB). Decrease --kv-cache-memory-bytes")
    times = PhaseTimes(generator=generator_settings(load_run("quickstart", ["generator=vllm-colocate"])))
    with pytest.raises(RunFailed) as failure, times.phase("start generator"):
        raise ConfigError(Problem(f"vLLM cannot start: {cause}", "generator.engine")) from cause
    told = str(failure.value)
    assert "out of memory on rank 0 in phase 'start generator'" in told
    assert "5000.0 GiB" in told
    assert "generator.kv_cache_gib" in told


def test_the_phase_that_ran_out_is_told_and_not_the_one_around_it() -> None:
    times = PhaseTimes()
    told = r"(?s)in phase 'update': 8\.0 TiB more were requested.*train\.per_device_train_batch_size"
    with pytest.raises(RunFailed, match=told), times.phase("report"), times.phase("update"):
        torch.empty(2**43, dtype=torch.uint8)
    assert times.failed == "update"
    with pytest.raises(ValueError, match="something else"), PhaseTimes().phase("update"):
        raise ValueError("something else")


def test_the_peak_of_a_gpu_is_that_of_the_step_with_what_torch_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, memory = SimpleNamespace(reserved=0), PeakMemory()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: ((80 - gpu.used) * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: gpu.reserved * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(gpu, "reserved", 0))
    gpu.used = 60  # an engine's pool beside the policy
    memory.look()
    gpu.used, gpu.reserved = 20, 50  # asleep; the update reserved 50, and has given most back
    assert memory.take() == 60 * 2**30
    # The step after it samples nothing.
    gpu.reserved = 30
    assert memory.take() == 30 * 2**30
    assert memory.take() == 20 * 2**30


def test_the_peak_on_a_cpu_is_that_of_the_process() -> None:
    now = psutil.Process().memory_info().rss  # the kernel counts it to within some pages
    assert 0.9 * now < PeakMemory().take() < psutil.virtual_memory().total
