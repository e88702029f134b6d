"""The checks of `grpox plugins check`: the contract of its kind."""

from grpox.testing import ObserverConformance


class TestWandbObserver(ObserverConformance):
    component = "wandb"
