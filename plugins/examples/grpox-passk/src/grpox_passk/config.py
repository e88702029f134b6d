"""Parameters of the advantage; this module imports no torch, so that a run file is checked in no time."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class PasskAdvantageConfig(BaseModel):
    """Keys of a run file under ``advantage``, besides ``name: passk``."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    k: int | None = Field(None, ge=1)
    """Completions of a set, one of which has to be right; less than train.num_generations, as a group has only
    one set of its own size. 1 is GRPO. Default: a quarter of the group."""
    threshold: float = 0.5
    """A completion is right when its weighted reward is at least this."""
