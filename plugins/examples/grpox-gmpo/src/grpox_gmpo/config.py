"""Parameters of the loss; this module imports no torch, so that a run file is checked in no time."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class GmpoLossConfig(BaseModel):
    """Keys of a run file under ``loss``, besides ``name: gmpo``."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    clip: float = Field(0.4, gt=0, le=20)
    """A token's ratio is clipped to exp(-clip) and exp(clip), so in log space; 0.4 is the paper's
    (arXiv 2507.20673). A mean over tokens moves less than a token does: that allows more than PPO's 0.2."""
