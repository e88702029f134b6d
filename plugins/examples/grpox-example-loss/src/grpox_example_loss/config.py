"""Parameters of the loss; this module imports no torch, so that a run file is checked in no time."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LuspoConfig(BaseModel):
    """Keys of a run file under ``loss``, besides ``name: example-luspo``."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    clip_low: float = Field(0.2, gt=0, le=1)
    """The sequence's ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The sequence's ratio is clipped above at 1 + clip_high."""
