"""Parameters of the built-in corrections."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from grpox.config import Parameters


class TokenTruncateConfig(Parameters):
    """Parameters of token-truncate."""

    level: ClassVar[Literal["token"]] = "token"
    cap: float = Field(2.0, ge=1)
    """Largest weight of a token, at least 1; 2.0 as in verl and ms-swift. TRL 1.16 has 3.0."""


class SequenceTruncateConfig(Parameters):
    """Parameters of sequence-truncate."""

    level: ClassVar[Literal["sequence"]] = "sequence"
    cap: float = Field(2.0, ge=1)
    """Largest weight of a completion, at least 1; 2.0 as in verl and ms-swift, which use one threshold for
    tokens and completions. TRL 1.16 uses 3.0 for both."""


class _Band(Parameters):
    """Bounds around 1, which is the ratio if trainer and generator agree."""

    low: float = Field(ge=0, le=1)
    high: float = Field(ge=1)

    @field_validator("high")
    @classmethod
    def _above_low(cls, high: float, info: ValidationInfo) -> float:
        low = info.data.get("low")
        if low is not None and high <= low:
            raise ValueError(f"must be more than low = {low:g}")
        return high


class TokenMaskConfig(_Band):
    """Parameters of token-mask."""

    level: ClassVar[Literal["token"]] = "token"
    low: float = Field(0.5, ge=0, le=1)
    """Smallest ratio of a token that is used, 0 to 1; 0.5 is IcePop's default (Ring-1T report,
    arXiv 2510.18855)."""
    high: float = Field(5.0, ge=1)
    """Largest ratio of a token that is used, at least 1 and more than low; 5.0 is IcePop's default."""


class SequenceMaskConfig(_Band):
    """Parameters of sequence-mask."""

    level: ClassVar[Literal["sequence"]] = "sequence"
    low: float = Field(0.0, ge=0, le=1)
    """Smallest ratio of a completion that is used, 0 to 1; 0, as in TRL 1.16, drops no completion for a small
    ratio."""
    high: float = Field(3.0, ge=1)
    """Largest ratio of a completion that is used, at least 1 and more than low; 3.0 as in TRL 1.16."""


class GeometricMaskConfig(_Band):
    """Parameters of geometric-mask."""

    level: ClassVar[Literal["token"]] = "token"
    low: float = Field(0.999, ge=0, le=1)
    """Smallest geometric mean of the ratios of a completion that is used, 0 to 1; 0.999 as in verl's preset."""
    high: float = Field(1.001, ge=1)
    """Largest geometric mean of the ratios of a completion that is used, at least 1 and more than low; 1.001 as
    in verl's preset."""
