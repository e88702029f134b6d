"""That it holds to the contract of its kind: the checks of `grpox plugins check`."""

from grpox.testing import LossConformance


class TestGmpoLoss(LossConformance):
    component = "gmpo"
