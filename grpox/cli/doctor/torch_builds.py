"""torchvision and its like built for another torch: transformers then fails to import, far from the cause."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from packaging.version import Version

from grpox.cli.doctor.distributions import version_of
from grpox.cli.doctor.finding import Finding

NEIGHBOURS = ("torchvision", "torchaudio", "torchcodec")
"""Libraries compiled against one build of torch, which transformers imports where they are installed."""

SECONDS = 60.0
PROBE = """
try:
    from transformers import PreTrainedModel
except Exception as error:
    while error.__cause__ is not None:
        error = error.__cause__
    raise SystemExit(f"{type(error).__name__}: {error}")
"""


def misbuilt() -> Iterator[Finding]:
    """The neighbours of torch whose build label (``+cpu``, ``+cu130``, none) is not torch's.

    Labels only raise a suspicion. Where there is one, a process imports transformers, and what that says is
    told: an error when it fails.
    """
    torch = version_of("torch")
    suspects = {name: version for name in NEIGHBOURS if (version := version_of(name))}
    suspects = {name: version for name, version in suspects.items() if _label(version) != _label(torch)}
    if not torch or not suspects:
        return
    failure = _import_failure()
    told = f"not built for torch {torch}" + (f"; transformers fails: {failure}" if failure else "")
    for name, version in suspects.items():
        remedy = f"pip uninstall {' '.join(suspects)}"
        yield Finding("fit", name, "error" if failure else "warning", f"{version} is {told}", remedy)


def _label(version: str) -> str:
    return Version(version).local or "" if version else ""


def _import_failure() -> str:
    """Why transformers' models cannot be imported, in one line; empty when they can."""
    command = [sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {SECONDS:.0f} s"
    lines = done.stderr.split("\n")
    return "" if done.returncode == 0 else next((line for line in reversed(lines) if line.strip()), "it died")
