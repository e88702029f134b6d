"""Offers the built-in advantages, of whole completions and of turns."""

from __future__ import annotations

from grpox import ComponentSpec, hookimpl
from grpox.contracts import Capability

ADVANTAGES = (
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
        summary="Reward minus the group's mean, not divided",
        formula="r - mean_g",
        source="Understanding R1-Zero-Like Training (Dr. GRPO), arXiv 2503.20783",
    ),
    ComponentSpec(
        name="rloo",
        target="grpox_advantages.baselines:Rloo",
        summary="Less the mean of the other rewards of the group, not divided",
        formula="r_i - mean_{j != i} r_j",
        source="Back to Basics (RLOO), arXiv 2402.14740",
    ),
    ComponentSpec(
        name="reinforce_plus_plus",
        target="grpox_advantages.baselines:ReinforcePlusPlus",
        config="grpox_advantages.configs:ScaledConfig",
        summary="Centred by the group's mean, divided by the batch's standard deviation of the differences",
        formula="(r - mean_g) / (std_batch(r - mean_g) + eps)",
        source="REINFORCE++ (with group baseline), arXiv 2501.03262",
    ),
    ComponentSpec(
        name="maxrl",
        target="grpox_advantages.baselines:MaxRl",
        summary="Centred by the group's mean and divided by that mean; rewards must not be negative",
        formula="(r - mean_g) / mean_g",
        source="Maximum Likelihood Reinforcement Learning, arXiv 2602.02710",
    ),
    ComponentSpec(
        name="opo",
        target="grpox_advantages.baselines:Opo",
        summary="Less the group's mean reward weighted by length, not divided",
        formula="r - sum_j n_j r_j / sum_j n_j",
        source="On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585",
    ),
    ComponentSpec(
        name="quantile",
        target="grpox_advantages.baselines:Quantile",
        config="grpox_advantages.configs:QuantileConfig",
        summary="Less a quantile of the group's rewards, divided by the group's standard deviation",
        formula="(r - Q_q) / (std_g + eps), Q_q = min{x: share of the group's r <= x is at least q}",
        source="Quantile Advantage Estimation, arXiv 2509.22611",
    ),
    ComponentSpec(
        name="gigpo",
        target="grpox_advantages.turns:Gigpo",
        config="grpox_advantages.configs:GigpoConfig",
        needs=(Capability.STATE_KEYS,),
        summary="GiGPO: the episode within its group, plus each turn among the turns of the same state",
        formula="(R - mean_g) / F_g + omega (R_k - mean_s) / F_s, R_k = sum_{j >= k} gamma^(j-k) r_j",
        source="Group-in-Group Policy Optimization, arXiv 2505.10978, eq. 3 and 5 to 8",
    ),
    ComponentSpec(
        name="return-to-go",
        target="grpox_advantages.turns:ReturnToGo",
        config="grpox_advantages.configs:ReturnToGoConfig",
        summary="Each turn's discounted return, compared with the returns of the group's episodes",
        formula="(R_k - mean_g(R_1)) / (std_g(R_1) + eps), R_k = sum_{j >= k} gamma^(j-k) r_j",
        source="Returns of turns: Kevin, arXiv 2507.11948; the baseline is the episodes'",
    ),
)


@hookimpl
def grpox_advantages() -> tuple[ComponentSpec, ...]:
    """Offer ten scalers: all subtract a baseline of the group, with different baselines and divisors."""
    return ADVANTAGES
