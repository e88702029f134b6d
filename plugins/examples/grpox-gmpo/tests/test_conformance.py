"""The checks of `grpox plugins check`: the contract of its kind."""

from grpox.testing import LossConformance


class TestGmpoLoss(LossConformance):
    component = "gmpo"
