"""Machine metrics are written once per machine and never delay a run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.patience import patient

from grpox.observing.machine_metrics import Readings, machine_metrics

EXPECTED = {
    "cpu_utilization_percentage", "system_memory_usage_megabytes", "system_memory_usage_percentage",
    "disk_usage_percentage", "disk_usage_megabytes", "disk_available_megabytes",
    "network_receive_megabytes", "network_transmit_megabytes",
}  # fmt: skip


class Ranks:
    """The ranks of a run on machines of these names, as one of them sees them."""

    def __init__(self, rank: int, machines: Sequence[str]) -> None:
        self.rank, self._machines, self.asked = rank, list(machines), 0

    def gather(self, _own: Sequence[Any]) -> list[str]:
        self.asked += 1
        return self._machines


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_names_are_mlflows_and_a_short_run_has_one_reading(tmp_path: Path) -> None:
    with machine_metrics(tmp_path, 60, Ranks(0, ["a"])):  # type: ignore[arg-type]
        pass
    [line] = lines(tmp_path / "system" / "node_0.jsonl")
    assert line["step"] == 0
    assert {f"system/{name}" for name in EXPECTED} <= line["metrics"].keys()
    assert 0 <= line["metrics"]["system/system_memory_usage_percentage"] <= 100
    assert line["metrics"]["system/disk_available_megabytes"] > 0


@pytest.mark.parametrize(("rank", "node"), [(0, "node_0"), (1, None), (2, "node_1"), (3, None)])
def test_the_first_rank_of_each_machine_reads_it(tmp_path: Path, rank: int, node: str | None) -> None:
    with machine_metrics(tmp_path, 60, Ranks(rank, ["a", "a", "b", "b"])):  # type: ignore[arg-type]
        pass
    files = list(tmp_path.glob("system/*"))
    assert [path.name for path in files] == ([f"{node}.jsonl"] if node else [])
    assert all(f"system/{node}/cpu_utilization_percentage" in lines(path)[0]["metrics"] for path in files)


def test_a_process_that_goes_on_counts_on_and_none_is_asked_if_it_is_off(tmp_path: Path) -> None:
    path, ranks = tmp_path / "system" / "node_0.jsonl", Ranks(0, ["a"])
    for every, steps in ((0, []), (60, [0]), (60, [0, 1])):
        with machine_metrics(tmp_path, every, ranks):  # type: ignore[arg-type]
            pass
        assert [line["step"] for line in (lines(path) if path.exists() else [])] == steps
    assert ranks.asked == 2
    times = [line["time"] for line in lines(path)]
    assert times[0] <= times[1]


def test_what_cannot_be_read_or_written_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("no")

    readings = Readings(tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", refused)
    taken = readings.take()
    assert "system_memory_usage_percentage" not in taken
    assert "disk_usage_percentage" in taken
    (tmp_path / "system").write_text("in the way")
    with machine_metrics(tmp_path, 60, Ranks(0, ["a"])):  # type: ignore[arg-type]
        pass


def test_a_gpu_is_read_where_its_library_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """One GPU whose power cannot be read."""

        def nvmlInit(self) -> None: ...

        def nvmlDeviceGetCount(self) -> int:
            return 1

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            return index

        def nvmlDeviceGetMemoryInfo(self, _: int) -> Any:
            return type("Memory", (), {"used": 2e9, "total": 8e9})

        def nvmlDeviceGetUtilizationRates(self, _: int) -> Any:
            return type("Rates", (), {"gpu": 37})

    monkeypatch.setitem(sys.modules, "pynvml", Library())
    taken = Readings(tmp_path).take()
    gpu = {name: value for name, value in taken.items() if name.startswith("gpu_")}
    assert gpu == {
        "gpu_0_memory_usage_percentage": 25.0, "gpu_0_memory_usage_megabytes": 2000.0,
        "gpu_0_utilization_percentage": 37.0,
    }  # fmt: skip


def test_without_that_library_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho '0, 1000, 4000, 37, 80.5, [N/A]'\necho '1, 0, 4000, 0, 50, 200'\n")
    command.chmod(0o755)
    taken = Readings(tmp_path).take()
    assert {name: value for name, value in taken.items() if name.startswith("gpu_0")} == {
        "gpu_0_memory_usage_percentage": 25.0, "gpu_0_memory_usage_megabytes": 1048.576,
        "gpu_0_utilization_percentage": 37.0, "gpu_0_power_usage_watts": 80.5,
    }  # fmt: skip
    assert taken["gpu_1_power_usage_percentage"] == 25.0
    command.write_text("#!/bin/sh\nexit 9\n")
    assert "gpu_0_utilization_percentage" not in Readings(tmp_path).take()


def test_the_cpu_is_read_by_the_thread_that_was_asked_before(tmp_path: Path) -> None:
    """psutil answers the first question of each thread with 0."""
    path = tmp_path / "system" / "node_0.jsonl"
    end = time.monotonic() + patient(60)
    with machine_metrics(tmp_path, 0.2, Ranks(0, ["a"])):  # type: ignore[arg-type]
        while not (path.exists() and lines(path)) and time.monotonic() < end:
            sum(range(10_000))  # so that there is something to read
    assert lines(path)[0]["metrics"]["system/cpu_utilization_percentage"] > 0
