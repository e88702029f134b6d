"""Pip requirements against what is installed: is ``vllm>=0.30`` met here, and if not, what to install."""

from __future__ import annotations

import re
from importlib import metadata


def canonical_name(distribution: str) -> str:
    """The name by which PEP 503 compares distributions: ``Grpox_Foo`` and ``grpox-foo`` are one."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def unmet(requirement: str) -> str:
    """Why `requirement` is not satisfied, in one line with the remedy; empty when it is.

    Extras are not followed: ``vllm[audio]>=0.30`` asks for vllm itself. A requirement whose environment
    marker does not hold here is satisfied.
    """
    # Imported late: most components require nothing, and listing them must stay fast.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = Requirement(requirement)
    except InvalidRequirement as error:
        return f"needs {requirement!r}, which is not a pip requirement: {' '.join(str(error).split())}"
    if wanted.marker is not None and not wanted.marker.evaluate():
        return ""
    remedy = f"(pip install '{requirement}')"
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"needs {requirement}: not installed {remedy}"
    if not wanted.specifier.contains(version, prereleases=True):
        return f"needs {requirement}: {version} is installed {remedy}"
    return ""
