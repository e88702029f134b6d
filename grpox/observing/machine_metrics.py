"""Metrics of every machine of a run: a thread on each writes them to the run's folder, which trackers read.

So the rank that trackers live on needs no message from the others, and no step waits.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from grpox.observing.readings import Readings
from grpox.runtime.world import World

FOLDER = "system"
PREFIX = "system/"
"""Begins the names, as MLflow's pages expect it."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def machine_metrics(folder: Path, every: float, world: World) -> Iterator[None]:
    """Within it each machine of the run writes ``system/node_<i>.jsonl``; a collective, where `every` is not 0.

    The lines are those of ``metrics.jsonl``; `step` counts them. With several machines the names say which one
    it is: ``system/node_1/cpu_utilization_percentage``; machines are numbered by their first rank.

    Args:
        folder: the run's output_dir.
        every: seconds between two readings; 0: none.
    """
    if every == 0:
        yield
        return
    machines = world.gather([_machine()])
    numbers = list(dict.fromkeys(machines))
    if machines.index(machines[world.rank]) != world.rank:
        yield
        return
    number = numbers.index(machines[world.rank])
    prefix = PREFIX if len(numbers) == 1 else f"{PREFIX}node_{number}/"
    sampler = MachineSampler(folder / FOLDER / f"node_{number}.jsonl", prefix, every)
    sampler.start()
    try:
        yield
    finally:
        sampler.stop()


class MachineSampler:
    """A thread that appends readings to a file, the last when it is stopped.

    What a full disk refuses is left out. A process that goes on with the file of another counts on from there.
    """

    def __init__(self, path: Path, prefix: str, every: float) -> None:
        self._path, self._prefix, self._every = path.absolute(), prefix, every
        self._stopped = threading.Event()
        self._taken: int | None = None
        self._thread = threading.Thread(target=self._work, name="machine-metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """A last reading, so that a short run has one."""
        self._stopped.set()
        self._thread.join(self._every + 10)

    def _work(self) -> None:
        # Made here: psutil remembers for each thread when it was last asked.
        readings = Readings(self._path.parent)
        while not self._stopped.wait(self._every):
            self._append(readings)
        self._append(readings)

    def _append(self, readings: Readings) -> None:
        values = {f"{self._prefix}{name}": round(value, 1) for name, value in readings.take().items()}
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+b") as file:
                if self._taken is None:
                    # Only now: the record of an earlier run in this folder has been moved away.
                    file.seek(0)
                    self._taken = sum(1 for _ in file)
                line = {"step": self._taken, "time": time.time(), "metrics": values}
                file.write(json.dumps(line).encode() + b"\n")
            self._taken += 1


def _machine() -> str:
    """The same for all processes of a machine, in whatever container, and another on each machine."""
    with suppress(OSError):
        return _BOOT.read_text(encoding="ascii").strip()
    return socket.gethostname()
