"""Offers the built-in corrections: none, and truncation or masks of tokens and completions."""

from __future__ import annotations

from grpox import ComponentSpec, hookimpl
from grpox.contracts import Capability

YAO = "Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
LIU = "Liu, Li et al. 2025, When Speed Kills Stability"


@hookimpl
def grpox_corrections() -> tuple[ComponentSpec, ...]:
    """Offer corrections for the difference between the generator's mu and the trainer's pi_old."""
    return (
        ComponentSpec(
            name="none",
            target="grpox_corrections.corrections:NoCorrection",
            summary="Assumes that generator and trainer have the same distribution",
            formula="R = 1",
        ),
        ComponentSpec(
            name="token-truncate",
            target="grpox_corrections.corrections:TokenTruncate",
            config="grpox_corrections.configs:TokenTruncateConfig",
            summary="Truncated importance sampling (TIS): each token weighted, up to a cap",
            needs=(Capability.LOGPROBS,),
            provides=("token-weights",),
            formula="R = min(exp(d), cap), d = log pi_old - log mu",
            source=YAO,
        ),
        ComponentSpec(
            name="token-mask",
            target="grpox_corrections.corrections:TokenMask",
            config="grpox_corrections.configs:TokenMaskConfig",
            summary="IcePop: each token weighted, or dropped if its ratio is out of bounds",
            needs=(Capability.LOGPROBS,),
            formula="R = exp(d) if low <= exp(d) <= high else 0, d = log pi_old - log mu",
            source="IcePop: Ling team, Every Step Evolves (Ring-1T), arXiv 2510.18855",
        ),
        ComponentSpec(
            name="sequence-truncate",
            target="grpox_corrections.corrections:SequenceTruncate",
            config="grpox_corrections.configs:SequenceTruncateConfig",
            summary="Truncated importance sampling of whole completions, up to a cap",
            needs=(Capability.LOGPROBS,),
            formula="R = min(exp(sum_t d), cap), d = log pi_old - log mu",
            source=LIU,
        ),
        ComponentSpec(
            name="sequence-mask",
            target="grpox_corrections.corrections:SequenceMask",
            config="grpox_corrections.configs:SequenceMaskConfig",
            summary="Masked importance sampling (MIS): whole completions weighted, or dropped if out of bounds",
            needs=(Capability.LOGPROBS,),
            formula="R = exp(sum_t d) if low <= exp(sum_t d) <= high else 0, d = log pi_old - log mu",
            source=LIU,
        ),
        ComponentSpec(
            name="geometric-mask",
            target="grpox_corrections.corrections:GeometricMask",
            config="grpox_corrections.configs:GeometricMaskConfig",
            summary="Geo-RS: completions dropped by the geometric mean of their ratios, tokens weighted",
            needs=(Capability.LOGPROBS,),
            formula="R = exp(d) if low <= exp((1/n) sum_t d) <= high else 0, d = log pi_old - log mu",
            source="Geo-RS of verl's rollout correction, which rejects only",
        ),
    )
