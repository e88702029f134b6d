"""Parameters of the observer."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TensorBoardConfig(BaseModel):
    """Keys of a run file under ``tracking.tensorboard``."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    folder: str = Field("tensorboard", pattern=r"^\w[\w.-]*$")
    """Name of a folder within the run's."""
    flush_seconds: int = Field(30, ge=1)
    """At most so long until a step is on disk."""
    completions: int = Field(4, ge=0)
    """Completions shown of a generation batch; 0: none."""
    completions_every: int = Field(10, ge=1)
    """Generation batches between those of which completions are shown."""
