"""For those who check the mathematics: the real core over given tensors."""

from grpox.testing.step_gradient import step_gradient

__all__ = ["step_gradient"]
