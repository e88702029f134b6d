"""Parameters of loss and correction; this module imports no torch, so that a run file is checked in no time."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Power = Annotated[float, Field(ge=0, le=10)]
Decay = Annotated[float, Field(ge=0.01, le=20)]
"""Within both bounds the largest factor, exp(lambda + k log(k/lambda) - k), is finite in float32."""


class VespoLossConfig(BaseModel):
    """Keys of a run file under ``loss``, besides ``name: vespo``."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    k_pos: Power = 2.0
    """Power of the weight where the advantage is not negative: a larger one drops stale sequences sooner."""
    lambda_pos: Decay = 3.0
    """Decay of the weight there: the factor is largest at k/lambda, and a larger lambda narrows it above."""
    k_neg: Power = 3.0
    """Power where the advantage is negative."""
    lambda_neg: Decay = 2.0
    """Decay where the advantage is negative. All four defaults are TRL's."""


class VespoCorrectionConfig(BaseModel):
    """The correction has no parameters."""

    model_config = ConfigDict(frozen=True)
