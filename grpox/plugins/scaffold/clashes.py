"""Whether the names of a new plugin are taken by what is installed."""

from __future__ import annotations

from importlib import metadata, util

from grpox.errors import Problem
from grpox.plugins.discovery import PluginSet
from grpox.plugins.requirements import canonical_name
from grpox.plugins.scaffold.names import Names


def clashes(names: Names, plugins: PluginSet, force: bool = False) -> list[Problem]:
    """One problem for each name that is taken.

    Args:
        force: an installed distribution of the same name is the one to be made anew.
    """
    another = "another name"
    problems = [
        Problem(
            f"{offer.distribution} {offer.version} already offers a {names.kind} '{names.component}'",
            "NAME",
            given=names.component,
            allowed=f"{another}: runs would have to say {names.distribution}:{names.component}",
        )
        for offer in plugins.offers
        if (offer.kind, offer.spec.name) == (names.kind, names.component)
        and canonical_name(offer.distribution) != names.distribution
    ]
    version = _installed(names.distribution)
    if version and not force:
        what = f"a distribution of this name is installed, in version {version}"
        allowed = f"{another}, or --force to make it anew"
        problems.append(Problem(what, "NAME", given=names.distribution, allowed=allowed))
    elif not version and util.find_spec(names.module) is not None:
        what = "a module of this name is installed, which the plugin's own would hide"
        problems.append(Problem(what, "NAME", given=names.module, allowed=another))
    return problems


def _installed(distribution: str) -> str:
    """Its version; empty if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
