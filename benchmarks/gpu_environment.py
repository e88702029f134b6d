"""The environment of gpu.py: hardware, versions, and requirements of grpox that are not fulfilled."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from surroundings import processor

LIBRARIES = (
    "grpox",
    "torch",
    "triton",
    "transformers",
    "deepspeed",
    "datasets",
    "huggingface_hub",
    "pyarrow",
    "psutil",
    "accelerate",
    "peft",
    "trl",
    "vllm",
    "flash-attn",
    "liger-kernel",
    "nvidia-nccl-cu13",
)
DEVICES = """
import json, torch
def describe(index):
    its = torch.cuda.get_device_properties(index)
    return {"name": its.name, "gib": its.total_memory / 2**30, "capability": f"{its.major}.{its.minor}",
            "multiprocessors": its.multi_processor_count}
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({"gpus": [describe(index) for index in range(count)], "cuda": torch.version.cuda,
                  "cudnn": torch.backends.cudnn.version()}))
"""
"""Asked in a process of its own: the one that starts the parts must not hold a CUDA context."""


def environment_of(device: str) -> dict[str, Any]:
    """Describe the machine and the Python environment.

    Raises:
        SystemExit: torch cannot be imported.
    """
    return {
        "device": device,
        **_devices(),
        "driver": _driver(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "versions": {name: _version(name) for name in LIBRARIES},
        "missing": _missing(),
        "commit": _commit(),
    }


def _devices() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", DEVICES], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"torch does not work in this environment:\n{done.stderr[-2000:]}")
    devices: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return devices


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return (done.stdout.split() or [None])[0]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _missing() -> list[str]:
    """List the requirements of grpox that are absent here, or have another version than it asks for."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(text) for text in metadata.requires("grpox") or ()]
    except metadata.PackageNotFoundError:
        return ["grpox"]
    missing = []
    for requirement in needed:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"{requirement.name}{requirement.specifier} (here: {version or 'none'})")
    return missing


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
