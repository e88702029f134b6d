"""Offers the built-in advantages: group, batch and none."""

from __future__ import annotations

from grpox import ComponentSpec, hookimpl


@hookimpl
def grpox_advantages() -> tuple[ComponentSpec, ...]:
    """Offer three scalers: all subtract the group's mean, but they divide by different values."""
    return (
        ComponentSpec(
            name="group",
            target="grpox_advantages.scalers:Group",
            config="grpox_advantages.configs:GroupConfig",
            summary="Reward minus the group's mean, divided by the group's standard deviation",
            formula="(r - mean_g) / (std_g + eps)",
            source="DeepSeekMath, arXiv 2402.03300, section 4.1.2",
        ),
        ComponentSpec(
            name="batch",
            target="grpox_advantages.scalers:Batch",
            config="grpox_advantages.configs:ScaledConfig",
            summary="Reward minus the group's mean, divided by the batch's standard deviation",
            formula="(r - mean_g) / (std_batch + eps)",
            source="Tricks or Traps? Part I, arXiv 2508.08221",
        ),
        ComponentSpec(
            name="none",
            target="grpox_advantages.scalers:Centred",
            config="grpox_advantages.configs:CentredConfig",
            summary="Reward minus the group's mean, not divided",
            formula="r - mean_g",
            source="Understanding R1-Zero-Like Training (Dr. GRPO), arXiv 2503.20783",
        ),
    )
