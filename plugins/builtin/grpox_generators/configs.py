"""Parameters of the built-in generators."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class HfConfig(BaseModel):
    """transformers' own generate."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    batch_size: int = Field(1024, ge=1)
    """Completions sampled together on one rank; fewer need less memory."""
