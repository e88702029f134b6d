"""Parameters of the observer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class WandbConfig(BaseModel):
    """Keys of a run file under ``tracking.wandb``."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    project: str | None = Field(None, min_length=1, max_length=128)
    """Project of the run; default: WANDB_PROJECT, else ``grpox``."""
    entity: str | None = Field(None, min_length=1)
    """User or team that owns the project; default: WANDB_ENTITY, else the account's own default."""
    run_name: str | None = Field(None, min_length=1, max_length=128)
    """Name of the run; default: WANDB_NAME, else the name of the run's folder, ``mine`` of ``runs/mine``."""
    group: str | None = Field(None, min_length=1, max_length=128)
    """Group of the run; default: WANDB_RUN_GROUP."""
    tags: tuple[str, ...] = ()
    """Tags of the run; default: WANDB_TAGS."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """Default: WANDB_MODE, else ``online`` with credentials and ``offline`` without."""
    completions: int = Field(16, ge=0)
    """Rows of the table of completions, the first ones of a generation batch; 0: no table."""
    completions_every: int = Field(10, ge=1)
    """Generation batches from one table to the next."""
    timeout: int = Field(30, ge=1)
    """Seconds to wait for the server, at the start for its answer and at the end for the upload. Data that is
    not uploaded stays in the run's folder."""
