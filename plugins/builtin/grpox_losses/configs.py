"""Parameters of the built-in losses."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from grpox.config import Parameters


class _Clip(Parameters):
    """Distances at which the ratio is clipped."""

    clip_low: float = Field(0.2, gt=0, le=1)
    """Lower clip distance: the ratio is clipped at 1 - clip_low. 0.2 as in PPO (arXiv 1707.06347); GSPO uses
    3e-4 at sequence level (arXiv 2507.18071, section 5.1)."""
    clip_high: float | None = Field(None, gt=0)
    """Upper clip distance: the ratio is clipped at 1 + clip_high; default: clip_low. DAPO uses 0.28 (arXiv
    2503.14476), GSPO 4e-4 at sequence level."""
    delta: float | None = None
    """Upper bound of the ratio for negative advantages, for which clip_high does not apply; more than
    1 + clip_high. Default: no bound, as in GRPO; two-sided GRPO sets one (INTELLECT-2, arXiv 2505.07291)."""

    @field_validator("delta")
    @classmethod
    def _above_the_clip(cls, delta: float | None, info: ValidationInfo) -> float | None:
        clip_high = info.data.get("clip_high")
        upper = info.data.get("clip_low") if clip_high is None else clip_high
        if delta is not None and upper is not None and delta <= 1 + upper:
            raise ValueError(f"must be more than 1 + clip_high = {1 + upper:g}")
        return delta


class ClippedConfig(_Clip):
    """Parameters of the clipped surrogate: grpo, dr_grpo, dapo and bnpo."""

    level: Literal["token", "sequence"] = "token"
    """Level of the ratio: one ratio per token (GRPO, arXiv 2402.03300), or one per sequence, the geometric mean
    of its tokens' ratios (GSPO)."""


class LuspoConfig(_Clip):
    """Parameters of luspo, whose ratios are those of sequences."""

    level: ClassVar[Literal["sequence"]] = "sequence"


class CispoConfig(Parameters):
    """Parameters of cispo."""

    level: ClassVar[Literal["token"]] = "token"
    cap: float = Field(5.0, ge=1)
    """Largest ratio used as a weight; there is no lower bound. TRL recommends 5.0, and ScaleRL finds a range
    around it equally good (arXiv 2510.13786)."""


class SapoConfig(Parameters):
    """Parameters of sapo."""

    level: ClassVar[Literal["token"]] = "token"
    tau_pos: float = Field(1.0, gt=0)
    """Sharpness of the gate for positive advantages; 1.0 in the SAPO paper (arXiv 2511.20347)."""
    tau_neg: float = Field(1.05, gt=0)
    """Sharpness of the gate for negative advantages; 1.05 in the SAPO paper, sharper than tau_pos because
    gradients of negative advantages spread over the whole vocabulary."""


class GspoTokenConfig(Parameters):
    """The parameters of gspo-token."""

    level: ClassVar[Literal["sequence"]] = "sequence"
    clip_low: float = Field(3e-4, gt=0, le=1)
    """The sequence's ratio is clipped below at 1 - clip_low; 3e-4 in the GSPO paper (arXiv 2507.18071,
    section 5.1)."""
    clip_high: float = Field(4e-4, gt=0)
    """The sequence's ratio is clipped above at 1 + clip_high; 4e-4 in the GSPO paper."""


class DppoConfig(Parameters):
    """The parameters of dppo."""

    level: ClassVar[Literal["token"]] = "token"
    divergence: Literal["tv", "kl"] = "tv"
    """Distance between a token's probability before and now: tv, their difference, or kl, the KL of the two
    Bernoulli distributions with these probabilities (arXiv 2602.04879)."""
    delta: float | None = Field(None, gt=0)
    """Largest distance at which a token that moves outwards is trained on. Default: 0.2 for tv, 0.05 for kl, as
    in the scaling experiments (appendix E); with LoRA, and in the analysis of stability, the paper has 0.15 for
    tv, which is also TRL's default."""
    cap: float = Field(20.0, ge=1)
    """Largest ratio used as a weight; 20 as in TRL and verl. The paper has 5 in its scaling experiments and no
    cap in its analysis of stability, where a cap of 3 did harm (section 5.4)."""

    @property
    def bound(self) -> float:
        """`delta`, or its default for this divergence."""
        return self.delta if self.delta is not None else {"tv": 0.2, "kl": 0.05}[self.divergence]

    @field_validator("delta")
    @classmethod
    def _below_one(cls, delta: float | None, info: ValidationInfo) -> float | None:
        if delta is not None and info.data.get("divergence") == "tv" and delta >= 1:
            raise ValueError("must be below 1, the largest difference of two probabilities")
        return delta


class ToprConfig(Parameters):
    """topr has no parameters."""

    level: ClassVar[Literal["sequence"]] = "sequence"
