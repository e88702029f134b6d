"""Describe this plugin to grpox in strings, so that listing it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from grpox import ComponentSpec, hookimpl


@hookimpl
def grpox_observers() -> Iterable[ComponentSpec]:
    """The one observer of this plugin."""
    yield ComponentSpec(
        name="tensorboard",
        target="grpox_tensorboard.observer:TensorBoard",
        config="grpox_tensorboard.config:TensorBoardConfig",
        summary="Every step's metrics, the config and samples of completions, for TensorBoard",
        requires=("tensorboard>=2.16",),
        source="https://www.tensorflow.org/tensorboard",
        api=1,
    )
