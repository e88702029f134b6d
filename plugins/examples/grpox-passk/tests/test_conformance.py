"""That it holds to the contract of its kind: the checks of `grpox plugins check`."""

from grpox.testing import AdvantageConformance


class TestPasskAdvantage(AdvantageConformance):
    component = "passk"
