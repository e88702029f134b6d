"""Fixtures for the tests of a plugin, there wherever grpox and pytest are installed.

It is loaded by every pytest in the environment, and so imports nothing heavy before a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from grpox.contracts import LossInputs


@pytest.fixture
def grpox_component() -> Callable[..., Any]:
    """Build a component as a run does: ``grpox_component("loss", "mine", clip=0.2)``."""
    from grpox.plugins.registry import bind, installed

    def build(kind: str, name: str, **params: Any) -> Any:
        return installed().build(bind(kind, {"name": name, **params}))

    return build


@pytest.fixture
def grpox_loss_inputs() -> LossInputs:
    """Two sequences of three and two tokens in float64, with advantages of both signs."""
    from grpox.testing.loss_examples import example

    return example(2, 3)


@pytest.fixture
def grpox_step_gradient() -> Callable[..., Any]:
    """`grpox.testing.step_gradient`: the loss and gradient of an optimizer step over given tensors."""
    from grpox.testing import step_gradient

    return step_gradient
