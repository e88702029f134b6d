"""For those who write components: suites that check them, and the real core over given tensors."""

from grpox.testing.advantages import AdvantageConformance
from grpox.testing.conformance import Conformance, Violation
from grpox.testing.corrections import CorrectionConformance
from grpox.testing.generators import GeneratorConformance
from grpox.testing.losses import LossConformance
from grpox.testing.observers import ObserverConformance
from grpox.testing.rewards import RewardConformance
from grpox.testing.step_gradient import step_gradient

__all__ = [
    "AdvantageConformance",
    "Conformance",
    "CorrectionConformance",
    "GeneratorConformance",
    "LossConformance",
    "ObserverConformance",
    "RewardConformance",
    "Violation",
    "step_gradient",
]
