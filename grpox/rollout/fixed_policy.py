"""Where a sampler takes its weights from: the engine in training, a loaded model where nothing trains."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Protocol

from grpox.policy.buffers import persistent_buffers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpox.contracts import WeightStream


class PolicyWeights(Protocol):
    """The weights that are to be sampled from, as they are now."""

    @property
    def steps(self) -> int:
        """Optimizer steps that they have taken: their version."""
        ...

    def weights(self) -> WeightStream:
        """All of them, whole; a collective."""
        ...


class FixedPolicy:
    """A whole model that nothing trains, on every rank."""

    steps = 0

    def __init__(self, model: PreTrainedModel) -> None:
        self.module = model

    def weights(self) -> WeightStream:
        """Every parameter under its name, tied ones once, and the persistent buffers."""
        for name, tensor in chain(self.module.named_parameters(), persistent_buffers(self.module)):
            yield name, tensor.detach()
