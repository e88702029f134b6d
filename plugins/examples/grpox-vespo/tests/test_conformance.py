"""That both hold to the contract of their kind: the checks of `grpox plugins check`."""

from grpox.testing import CorrectionConformance, LossConformance


class TestVespoLoss(LossConformance):
    component = "vespo"


class TestVespoCorrection(CorrectionConformance):
    component = "vespo"
