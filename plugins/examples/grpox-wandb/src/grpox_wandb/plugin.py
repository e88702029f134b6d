"""Describe this plugin to grpox in strings, so that listing it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from grpox import ComponentSpec, hookimpl


@hookimpl
def grpox_observers() -> Iterable[ComponentSpec]:
    """The one observer of this plugin."""
    yield ComponentSpec(
        name="wandb",
        target="grpox_wandb.observer:Wandb",
        config="grpox_wandb.config:WandbConfig",
        summary="Metrics, evaluations, config, summary and samples of completions in Weights & Biases",
        requires=("wandb>=0.31",),
        source="https://docs.wandb.ai",
        api=1,
    )
