"""Hardware and versions that a benchmark ran on, for its JSON object."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any


def surroundings(libraries: Sequence[str]) -> dict[str, Any]:
    """Python, the versions of `libraries`, processor, cores and the number of threads set."""
    return {
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in libraries},
        "machine": {
            "cpu": processor(),
            "cores": os.cpu_count(),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        },
    }


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
