"""Adaptive weight of the entropy bonus: a coefficient that follows the entropy of the policy.

After a step whose tokens have the mean entropy H, the coefficient c becomes ``min(c + delta, max)`` if
``H <= target``, else ``max(c - delta, min)``. The bonus of the next step has the weight c if ``H <= target``,
else 0, so it acts only where the entropy is too low. Source: Skywork-OR1, arXiv 2505.22312, adaptive entropy
control. As in TRL, H is the entropy of the step before: the weight must be known before the forward pass.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from grpox.config import AdaptiveEntropyConfig


class EntropyControlState(BaseModel):
    """State of the adaptive entropy coefficient, saved in checkpoints."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    coefficient: float
    """The coefficient c."""
    entropy: float | None = None
    """Mean entropy of the last step that was taken, in nats per token; None before the first."""


class EntropyControl:
    """Moves the coefficient after each step; every rank sees the same entropies, so all have the same weight.

    Args:
        coefficient: at the start of the run.
    """

    def __init__(self, config: AdaptiveEntropyConfig, coefficient: float) -> None:
        self.config = config
        self.state = EntropyControlState(coefficient=coefficient)

    @property
    def weight(self) -> float:
        """Weight of the bonus in the next step; 0 while the entropy is above the target or unknown."""
        return self.state.coefficient if self._is_low(self.state.entropy) else 0.0

    def see(self, entropy: float) -> None:
        """Move the coefficient after a step.

        Args:
            entropy: mean over the step's tokens on all ranks, before the update; nats.
        """
        config, coefficient = self.config, self.state.coefficient
        if self._is_low(entropy):
            coefficient = min(coefficient + config.delta, config.max)
        else:
            coefficient = max(coefficient - config.delta, config.min)
        self.state = EntropyControlState(coefficient=coefficient, entropy=entropy)

    def _is_low(self, entropy: float | None) -> bool:
        return entropy is not None and entropy <= self.config.target
