"""The parameters of tracked runs: which differ from the defaults, and which between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpox_mlflow.runs.tracked import TrackedRun

OF_RUN = "run."
"""Begins what is no key of a run file: ranks and steps."""


def changed_params(params: Mapping[str, str], registry: Any = None) -> dict[str, str]:
    """Return the params, as text, that differ from an empty run file's; keys without a default among them.

    Args:
        params: dotted key -> value, as the plugin for MLflow writes them.
        registry: default: of what is installed now. Of a component that it lacks, every parameter counts as
            changed.
    """
    defaults = _defaults(params, registry)
    return {
        key: value
        for key, value in params.items()
        if not key.startswith(OF_RUN) and not (key in defaults and same(value, defaults[key]))
    }


def differing_params(runs: Sequence[TrackedRun]) -> dict[str, list[str | None]]:
    """Key -> the value of each run, of keys whose values are not all the same; None where a run has none."""
    keys = dict.fromkeys(key for run in runs for key in run.params)
    rows = {key: [run.params.get(key) for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if not all(same(values[0], value) for value in values)}


def same(one: str | None, other: str | None) -> bool:
    """Tell whether two values are equal, as numbers where they are: a run file may have 1 for 1.0."""
    if one == other or one is None or other is None:
        return one == other
    try:
        return float(one) == float(other)
    except ValueError:
        return False


def _defaults(params: Mapping[str, str], registry: Any) -> dict[str, str]:
    """Dotted key -> the default as text, of the schema and of the components that `params` names."""
    from grpox.toolkit import parameter_defaults
    from grpox_mlflow.naming import flattened

    found: dict[str, str] = {}
    for prefix, defaults in parameter_defaults(params, registry).items():
        found |= dict(flattened(dict(defaults), prefix))
    return found
