"""Parameters of the built-in corrections."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

STRICT = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class NoCorrectionConfig(BaseModel):
    """none has no parameters."""

    model_config = STRICT


class TokenTruncateConfig(BaseModel):
    """The parameters of token-truncate."""

    model_config = STRICT

    cap: float = Field(2.0, ge=1)
    """Largest weight of a token; 2.0 as in verl and TRL."""
