"""Parameters of the built-in advantages."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

STRICT = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ScaledConfig(BaseModel):
    """The parameters of group and batch."""

    model_config = STRICT

    eps: float = Field(1e-4, ge=0)
    """Added to the standard deviation; 1e-4 as in TRL."""
    ddof: Literal[0, 1] = 1
    """The sum of squares is divided by n - ddof: 1 for the sample's standard deviation, as in TRL."""


class CentredConfig(BaseModel):
    """none has no parameters."""

    model_config = STRICT
