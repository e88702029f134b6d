"""Optional methods of components of every kind, as `grpox.contracts.Stateful` and `StepAware` describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from grpox.contracts import StatisticReduction
from grpox.errors import nearest

STATE = ("state_dict", "load_state_dict")
STEPS = ("begin_step", "end_step")
REDUCTIONS = get_args(StatisticReduction)


def has_method(component: object, name: str) -> bool:
    """Return True if a component has an optional method."""
    return callable(getattr(component, name, None))


def has_state(component: object) -> bool:
    """Return True if checkpoints save the state of a component."""
    return not is_stateless(component) and all(has_method(component, name) for name in STATE)


def is_stateless(component: object) -> bool:
    """Return True if a component declares that it has no state."""
    return getattr(component, "stateless", False) is True


def methods_of(component: object) -> frozenset[str]:
    """Return the optional methods that a component has."""
    return frozenset(name for name in (*STATE, *STEPS) if has_method(component, name))


def statistics_of(component: object) -> dict[str, StatisticReduction]:
    """Return the statistics that a component without a `methods_problem` asks for."""
    return dict(getattr(component, "statistics", {})) if has_method(component, "end_step") else {}


def methods_problem(target: object) -> str:
    """Return what is wrong with the optional methods of a component or its class; empty if nothing is."""
    one, other = (has_method(target, name) for name in STATE)
    if one != other and not is_stateless(target):
        present, missing = STATE if one else STATE[::-1]
        return f"has {present} and no {missing}: a checkpoint needs both (see grpox.contracts.Stateful)"
    statistics = getattr(target, "statistics", {})
    if not has_method(target, "end_step"):
        # Something else may have an attribute of that name: a dict of reductions alone is a declaration.
        is_declared = isinstance(statistics, Mapping) and bool(statistics)
        is_declared = is_declared and all(reduction in REDUCTIONS for reduction in statistics.values())
        return "has statistics and no method end_step, which is given them" if is_declared else ""
    if isinstance(statistics, property):  # its value is known only once the object is built
        return ""
    if not isinstance(statistics, Mapping) or not all(isinstance(name, str) for name in statistics):
        return f"has the statistics {statistics!r}; they are a dict such as {{'ratio': 'gather'}}"
    for name, reduction in statistics.items():
        if reduction not in REDUCTIONS:
            near = nearest(str(reduction), REDUCTIONS)
            hint = f"; did you mean '{near}'?" if near else ""
            return f"asks for '{name}' reduced by {reduction!r}, which is none of {', '.join(REDUCTIONS)}{hint}"
    return ""
