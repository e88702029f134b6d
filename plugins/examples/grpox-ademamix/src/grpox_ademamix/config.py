"""Parameters of both components; this module imports no torch, so that a run file is checked in no time."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AdEMAMixConfig(BaseModel):
    """Keys of a run file under ``train.optimizer``, besides ``name: ademamix``."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the fast mean of gradients."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the mean of squared gradients."""
    beta3: float = Field(0.999, ge=0, lt=1)
    """Decay of the slow mean of gradients. The paper has 0.9999, for runs of 100,000 steps and more."""
    alpha: float = Field(5.0, ge=0)
    """Weight of the slow mean; 5 in the paper, 0 gives AdamW."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the square root of the mean of squared gradients."""
    weight_decay: float = Field(0.0, ge=0)
    """Part of a weight that is taken off it, times the learning rate."""


class CooldownConfig(BaseModel):
    """Keys of a run file under ``train.scheduler``, besides ``name: cooldown``."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    warmup: int = Field(0, ge=0)
    """Steps until the learning rate of the run is reached."""
    share: float = Field(0.2, gt=0, le=1)
    """Share of all steps in which the learning rate falls; 0.2 in the paper."""
