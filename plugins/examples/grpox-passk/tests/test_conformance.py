"""The checks of `grpox plugins check`: the contract of its kind."""

from grpox.testing import AdvantageConformance


class TestPasskAdvantage(AdvantageConformance):
    component = "passk"
