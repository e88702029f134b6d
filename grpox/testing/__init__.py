"""Tests for authors of components: suites that check them, and the real core over given tensors.

Each kind of component has a suite in a module of its own; `conformance` has their common base, `runner`
runs one without pytest. `core_step` takes an optimizer step over tensors that a test gives. `pytest_plugin` has
fixtures; every pytest in the environment loads it, and so the names of this package are imported when they are
first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpox.testing.advantages import AdvantageConformance
    from grpox.testing.conformance import Conformance, Violation
    from grpox.testing.core_step import step_gradient
    from grpox.testing.corrections import CorrectionConformance
    from grpox.testing.environments import EnvironmentConformance
    from grpox.testing.generators import GeneratorConformance
    from grpox.testing.losses import LossConformance
    from grpox.testing.observers import ObserverConformance
    from grpox.testing.rewards import RewardConformance
    from grpox.testing.runner import same_as
    from grpox.testing.training_parts import DatasetConformance, OptimizerConformance, SchedulerConformance

__all__ = [
    "AdvantageConformance",
    "Conformance",
    "CorrectionConformance",
    "DatasetConformance",
    "EnvironmentConformance",
    "GeneratorConformance",
    "LossConformance",
    "ObserverConformance",
    "OptimizerConformance",
    "RewardConformance",
    "SchedulerConformance",
    "Violation",
    "same_as",
    "step_gradient",
]

_LAZY = {
    "AdvantageConformance": "advantages",
    "Conformance": "conformance",
    "CorrectionConformance": "corrections",
    "DatasetConformance": "training_parts",
    "EnvironmentConformance": "environments",
    "GeneratorConformance": "generators",
    "LossConformance": "losses",
    "ObserverConformance": "observers",
    "OptimizerConformance": "training_parts",
    "RewardConformance": "rewards",
    "SchedulerConformance": "training_parts",
    "Violation": "conformance",
    "same_as": "runner",
    "step_gradient": "core_step",
}
"""Name -> the module that has it."""


def __getattr__(name: str) -> Any:
    """Import a name on its first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
