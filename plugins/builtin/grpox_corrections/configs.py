"""Parameters of the built-in corrections."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from grpox.config import Parameters


class NoCorrectionConfig(Parameters):
    """none has no parameters."""


class TokenTruncateConfig(Parameters):
    """The parameters of token-truncate."""

    cap: float = Field(2.0, ge=1)
    """Largest weight of a token, at least 1; 2.0 as in verl and ms-swift. TRL 1.16 has 3.0."""


class SequenceTruncateConfig(Parameters):
    """The parameters of sequence-truncate."""

    cap: float = Field(2.0, ge=1)
    """Largest weight of a completion, at least 1; 2.0 as in verl and ms-swift, which have one threshold for
    tokens and completions. TRL 1.16 has 3.0 for both."""


class _Band(Parameters):
    """Bounds around 1, the ratio where trainer and generator agree."""

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
    """The parameters of token-mask."""

    low: float = Field(0.5, ge=0, le=1)
    """Least ratio of a token that is kept, 0 to 1; 0.5 is IcePop's default (Ring-1T report,
    arXiv 2510.18855)."""
    high: float = Field(5.0, ge=1)
    """Largest ratio of a token that is kept, at least 1 and more than low; 5.0 is IcePop's default."""


class SequenceMaskConfig(_Band):
    """The parameters of sequence-mask."""

    low: float = Field(0.0, ge=0, le=1)
    """Least ratio of a completion that is kept, 0 to 1; 0 keeps all that the generator overrated, as TRL 1.16
    does."""
    high: float = Field(3.0, ge=1)
    """Largest ratio of a completion that is kept, at least 1 and more than low; 3.0 as in TRL 1.16."""


class GeometricMaskConfig(_Band):
    """The parameters of geometric-mask."""

    low: float = Field(0.999, ge=0, le=1)
    """Least geometric mean of a completion's ratios that is kept, 0 to 1; 0.999 as in verl's preset."""
    high: float = Field(1.001, ge=1)
    """Largest geometric mean that is kept, at least 1 and more than low; 1.001 as in verl's preset."""
