"""Metrics of every machine of a run: a thread on each machine writes them to the run's folder for trackers.

The rank with the trackers needs no message from other ranks, and no step waits. The metric names are MLflow's.
MLflow's own thread is not used: it asks the server before each measurement, and ends if the server does not
answer.
"""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from grpox.runtime.world import World

_MEGABYTE = 1e6
"""Bytes in a megabyte, as in MLflow."""
_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,memory.used,memory.total,utilization.gpu,power.draw,power.limit",
    "--format=csv,noheader,nounits",
)
_SECONDS = 10.0
"""Time limit of nvidia-smi."""

FOLDER = "system"
PREFIX = "system/"
"""Prefix of the metric names, as MLflow's pages expect it."""


class Readings:
    """Reads the use of this machine. Network traffic counts from the creation of the object.

    Args:
        folder: a folder on the disk to read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._network_before = _network()
        self._nvml: Any = None
        with suppress(Exception):  # no library, no driver, or no GPU
            nvml: Any = import_module("pynvml")
            nvml.nvmlInit()
            self._gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            self._nvml = nvml
        # The first measurement covers no time and is 0.
        psutil.cpu_percent()

    def take(self) -> dict[str, float]:
        """Return name -> value; CPU use is since the last call, and values that cannot be read are left out."""
        values = {"cpu_utilization_percentage": psutil.cpu_percent()}
        # A driver or container may refuse any of them.
        with suppress(Exception):
            memory = psutil.virtual_memory()
            values["system_memory_usage_megabytes"] = memory.used / _MEGABYTE
            values["system_memory_usage_percentage"] = memory.used / memory.total * 100
        with suppress(Exception):
            folder = next(path for path in (self._folder, *self._folder.parents) if path.exists())
            disk = psutil.disk_usage(str(folder))
            values["disk_usage_percentage"] = disk.percent
            values["disk_usage_megabytes"] = disk.used / _MEGABYTE
            values["disk_available_megabytes"] = disk.free / _MEGABYTE
        with suppress(Exception):
            sent, received = _network()
            values["network_receive_megabytes"] = (received - self._network_before[1]) / _MEGABYTE
            values["network_transmit_megabytes"] = (sent - self._network_before[0]) / _MEGABYTE
        with suppress(Exception):
            values |= self._all_gpus()
        return values

    def _all_gpus(self) -> dict[str, float]:
        """Read NVIDIA GPUs through nvidia-ml-py if it is installed, else nvidia-smi."""
        gpus = _query_nvidia_smi() if self._nvml is None else dict(enumerate(map(self._gpu, self._gpus)))
        return {
            f"gpu_{index}_{name}": value
            for index, (used, total, busy, watts, limit) in gpus.items()
            for name, value in (
                ("memory_usage_percentage", used / total * 100 if total else math.nan),
                ("memory_usage_megabytes", used / _MEGABYTE),
                ("utilization_percentage", busy),
                ("power_usage_watts", watts),
                ("power_usage_percentage", watts / limit * 100 if limit else math.nan),
            )
            if math.isfinite(value)
        }

    def _gpu(self, device: Any) -> list[float]:
        def read(value: Callable[[Any], Any]) -> float:
            with suppress(Exception):
                return float(value(self._nvml))
            return math.nan

        return [
            read(lambda nvml: nvml.nvmlDeviceGetMemoryInfo(device).used),
            read(lambda nvml: nvml.nvmlDeviceGetMemoryInfo(device).total),
            read(lambda nvml: nvml.nvmlDeviceGetUtilizationRates(device).gpu),
            read(lambda nvml: nvml.nvmlDeviceGetPowerUsage(device) / 1000),
            read(lambda nvml: nvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1000),
        ]


def _query_nvidia_smi() -> dict[int, list[float]]:
    """Run nvidia-smi, which takes part of a second; unknown numbers are NaN."""
    if shutil.which(_QUERY[0]) is None:
        return {}
    done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_SECONDS, check=True)
    rows = ([_number(cell) for cell in line.split(",")] for line in done.stdout.splitlines())
    return {int(index): [used * 2**20, total * 2**20, *rest] for index, used, total, *rest in rows}


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan  # [N/A]


def _network() -> tuple[int, int]:
    """Return the bytes that the machine has sent and received."""
    try:
        counters = psutil.net_io_counters()
    except OSError:
        return 0, 0
    return (0, 0) if counters is None else (counters.bytes_sent, counters.bytes_recv)


@contextmanager
def machine_metrics(folder: Path, every: float, world: World) -> Iterator[None]:
    """Write ``system/node_<i>.jsonl`` on each machine during the block; a collective if `every` is not 0.

    Lines have the format of ``metrics.jsonl``; `step` counts them. With several machines names have a prefix:
    ``system/node_1/cpu_utilization_percentage``. Machines are numbered by their first rank.

    Args:
        folder: the run's output_dir.
        every: seconds between two measurements; 0: never measure.
    """
    machines = world.gather([_machine()]) if every else []
    if not machines or machines.index(machines[world.rank]) != world.rank:
        yield
        return
    numbers = list(dict.fromkeys(machines))
    node = f"node_{numbers.index(machines[world.rank])}"
    prefix = PREFIX if len(numbers) == 1 else f"{PREFIX}{node}/"
    over = threading.Event()
    arguments = (folder.absolute() / FOLDER / f"{node}.jsonl", prefix, every, over)
    thread = threading.Thread(target=_sample, args=arguments, name="machine-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(every + 10)


def _sample(path: Path, prefix: str, every: float, over: threading.Event) -> None:
    """Append measurements to a file until the run is over, and then a last one: even a short run has one.

    Measurements that do not fit on a full disk are dropped. `step` continues from the lines of an earlier
    process.
    """
    # Created in this thread: psutil remembers the last call of each thread.
    readings, lines, is_last = Readings(path.parent), None, False
    while not is_last:
        is_last = over.wait(every)
        values = {f"{prefix}{name}": round(value, 1) for name, value in readings.take().items()}
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                if lines is None:
                    # Created only after the record of an earlier run has been moved away.
                    file.seek(0)
                    lines = sum(1 for _ in file)
                line = {"step": lines, "time": time.time(), "metrics": values}
                file.write(json.dumps(line).encode() + b"\n")
            lines += 1


def _machine() -> str:
    """Return the id of this machine, the same in all of its processes and containers."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()
