"""Describe this plugin to grpox in strings, so that listing it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from grpox import ComponentSpec, hookimpl


@hookimpl
def grpox_losses() -> Iterable[ComponentSpec]:
    """The one loss of this plugin."""
    yield ComponentSpec(
        name="gmpo",
        target="grpox_gmpo.loss:GmpoLoss",
        config="grpox_gmpo.config:GmpoLossConfig",
        summary="Geometric mean of a sequence's clipped token ratios: robust to single odd tokens",
        formula="-w_i A, w_i = exp(mean_t c), c = min(log r, clip) if A > 0 else max(log r, -clip), "
        "r = pi/pi_old; (1/N_seq) sum_i (1/n_i) sum_t",
        source="Geometric-Mean Policy Optimization, arXiv 2507.20673",
        api=1,
    )
