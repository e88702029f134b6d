"""The buffers of a model that its checkpoint holds: as much a part of it as its parameters, though not trained.

A forward may change them. ZeRO-3 leaves them whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of the state dict, under their names there; one that has several names once."""
    told: set[int] = set()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        parent, _, own = name.rpartition(".")
        if own not in model.get_submodule(parent)._non_persistent_buffers_set and id(buffer) not in told:
            told.add(id(buffer))
            yield name, buffer
