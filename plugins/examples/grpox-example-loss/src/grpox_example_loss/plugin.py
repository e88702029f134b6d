"""Describe this plugin to grpox in strings, so that listing it imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from grpox import ComponentSpec, hookimpl


@hookimpl
def grpox_losses() -> Iterable[ComponentSpec]:
    """The one loss of this plugin."""
    yield ComponentSpec(
        name="example-luspo",  # grpox itself has a luspo
        target="grpox_example_loss.loss:Luspo",
        config="grpox_example_loss.config:LuspoConfig",
        summary="Clipped sequence ratio, summed over tokens: long sequences weigh as much per token",
        formula="-min(w_i A, clip(w_i, 1-clip_low, 1+clip_high) A), w_i = exp(mean_t log pi/pi_old); "
        "(1/N_seq) sum_i sum_t",
        source="Length-Unbiased Sequence Policy Optimization",
        api=1,
    )
