"""The reference policy of a run that trains adapters: the policy itself with its adapters off.

What is frozen is the model that the run began with, so that no second one is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from grpox.policy.engine import Engine
from grpox.policy.lora.layers import without_adapters


class BaseAsReference:
    """Forward passes of the policy's engine without adapters, in place of an `engine.FrozenEngine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.mode = engine.mode

    @property
    def module(self) -> nn.Module:
        """The policy, adapters included."""
        module: nn.Module = self._engine.module
        return module

    @torch.no_grad()
    def __call__(self, **inputs: Any) -> Any:
        with without_adapters(self._engine.module):
            return self._engine(**inputs)
