"""That it holds to the contract of its kind: the checks of `grpox plugins check`."""

from grpox.testing import ObserverConformance


class TestTensorboardObserver(ObserverConformance):
    component = "tensorboard"
