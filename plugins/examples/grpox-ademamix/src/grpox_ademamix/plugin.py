"""Describe this plugin to grpox in strings, so that listing it imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from grpox import ComponentSpec, hookimpl


@hookimpl
def grpox_optimizers() -> Iterable[ComponentSpec]:
    """The one optimizer of this plugin."""
    yield ComponentSpec(
        name="ademamix",
        target="grpox_ademamix.optimizer:AdEMAMix",
        config="grpox_ademamix.config:AdEMAMixConfig",
        summary="Adam with a second, slow mean of the gradients",
        formula="w -= lr ((m1^ + alpha m2) / (sqrt(v^) + eps) + decay w)",
        source="The AdEMAMix Optimizer, arXiv 2409.03137, algorithm 1",
        api=1,
    )


@hookimpl
def grpox_schedulers() -> Iterable[ComponentSpec]:
    """The one schedule of this plugin."""
    yield ComponentSpec(
        name="cooldown",
        target="grpox_ademamix.scheduler:Cooldown",
        config="grpox_ademamix.config:CooldownConfig",
        summary="Constant learning rate that falls to 0 in the last part of the run",
        formula="1, then 1 - sqrt(x), x from 0 to 1 over the cooldown",
        source="Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations, arXiv 2405.18392",
        api=1,
    )
