"""A run file's ``plugins.required``: distributions whose plugins must be installed and loaded."""

from __future__ import annotations

from collections.abc import Iterable

from grpox.errors import Problem, join
from grpox.plugins.discovery import PluginSet
from grpox.plugins.requirements import canonical_name, unmet


def missing_plugins(
    plugins: PluginSet, required: Iterable[str], key: str = "plugins.required"
) -> list[Problem]:
    """One problem for each requirement, such as ``grpox-foo>=1.2``, that is not met by a loaded plugin."""
    from packaging.requirements import Requirement

    problems = []
    for position, requirement in enumerate(required):
        place = join(key, position)
        reason = unmet(requirement)
        if reason:
            problems.append(Problem(reason, place, given=requirement))
            continue
        name = canonical_name(Requirement(requirement).name)
        records = [record for record in plugins.records if canonical_name(record.distribution) == name]
        if not records:
            problems.append(Problem("installed, but holds no grpox plugin", place, given=requirement))
        problems += [
            Problem(f"{record} is {record.status}: {record.reason}", place, given=requirement)
            for record in records
            if record.status != "ok"
        ]
    return problems
