"""Component kind -> its conformance suite."""

from __future__ import annotations

from grpox.testing.advantages import AdvantageConformance
from grpox.testing.conformance import Conformance
from grpox.testing.corrections import CorrectionConformance
from grpox.testing.generators import GeneratorConformance
from grpox.testing.losses import LossConformance
from grpox.testing.observers import ObserverConformance
from grpox.testing.rewards import RewardConformance

SUITES: dict[str, type[Conformance]] = {
    suite.kind: suite
    for suite in (
        LossConformance,
        AdvantageConformance,
        CorrectionConformance,
        RewardConformance,
        GeneratorConformance,
        ObserverConformance,
    )
}
