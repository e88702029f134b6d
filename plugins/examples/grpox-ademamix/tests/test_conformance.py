"""The checks of `grpox plugins check`: the contracts of both kinds."""

from grpox.testing import OptimizerConformance, SchedulerConformance


class TestAdEMAMix(OptimizerConformance):
    component = "ademamix"


class TestCooldown(SchedulerConformance):
    component = "cooldown"
