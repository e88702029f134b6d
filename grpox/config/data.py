"""The section `data`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from grpox.config.component import ComponentRef
from grpox.config.section import Section


class DataConfig(Section):
    path: str | None = None
    """A .jsonl, .json, .csv or .parquet file, or the id of a dataset on the hub."""
    subset: str | None = None
    """Configuration of a hub dataset that has several."""
    split: str = "train"
    """Split of a hub dataset, as `datasets` writes it: ``train``, ``train[:1000]``."""
    streaming: bool = False
    """Read rows as they are needed, without an index of all of them: for data larger than the disk."""
    source: ComponentRef | None = None
    """A dataset plugin, in place of `path`."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of role/content messages."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Tokens a prompt may have; default: what the model's positions leave beside a completion."""
    long_prompts: Literal["refuse", "cut"] = "refuse"
    """Treatment of a longer prompt: the run is refused, naming the row, or its left end is cut off."""

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.path is None) == (self.source is None):
            raise ValueError("give exactly one of 'path' and 'source'")
        return self
