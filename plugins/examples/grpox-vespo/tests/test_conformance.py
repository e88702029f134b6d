"""The checks of `grpox plugins check`: the contract of its kind."""

from grpox.testing import CorrectionConformance, LossConformance


class TestVespoLoss(LossConformance):
    component = "vespo"


class TestVespoCorrection(CorrectionConformance):
    component = "vespo"
