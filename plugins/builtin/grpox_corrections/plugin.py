"""Offers the built-in corrections: none and token-truncate."""

from __future__ import annotations

from grpox import ComponentSpec, hookimpl


@hookimpl
def grpox_corrections() -> tuple[ComponentSpec, ...]:
    """Weights for what separates the generator's distribution mu from the trainer's pi_old."""
    return (
        ComponentSpec(
            name="none",
            target="grpox_corrections.none:NoCorrection",
            config="grpox_corrections.configs:NoCorrectionConfig",
            summary="Trusts the generator to sample from the trainer's own distribution",
            formula="R = 1",
        ),
        ComponentSpec(
            name="token-truncate",
            target="grpox_corrections.token_truncate:TokenTruncate",
            config="grpox_corrections.configs:TokenTruncateConfig",
            summary="Truncated importance sampling (TIS): each token weighted, up to a cap",
            needs=("logprobs",),
            formula="R = min(exp(log pi_old - log mu), cap)",
            source="Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
        ),
    )
