"""The sections around the training: `checkpoint`, `hub`, `logging`, `watchdog` and `plugins`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpox.config.component import Section


class HubConfig(Section):
    repo: str
    """Repository on the hub that the trained model is pushed to, ``user/name``; the token comes from the
    environment (HF_TOKEN) or `hf auth login`."""
    private: bool = False
    """True makes a repository that is created private."""
    revision: str | None = None
    """Branch to push to; default: the repository's main branch."""


class CheckpointConfig(Section):
    every: int = Field(100, ge=0)
    """Optimizer steps between checkpoints; 0: none but the one that an interrupted run leaves."""
    last: bool | None = None
    """Save one after the last step too; default: where `every` is not 0."""
    keep: int = Field(2, ge=1)
    """Number of the newest that are kept."""
    best: str | None = None
    """Metric whose best checkpoint is kept besides: ``reward``, ``evaluation/accuracy``."""
    best_is: Literal["highest", "lowest", "max", "min"] = "highest"
    """Best value of that metric: max, the highest, or min, the lowest."""
    background: bool = False
    """Let a thread write while training goes on: costs memory for a copy of weights and optimizer states."""

    @property
    def saves_last(self) -> bool:
        """Tell if a checkpoint of the last step is saved."""
        return self.every > 0 if self.last is None else self.last


class LoggingConfig(Section):
    completions_every: int = Field(10, ge=0)
    """Optimizer steps between samples of completions shown in the terminal; 0: never."""
    save_completions_every: int = Field(1, ge=0)
    """Generation batches between completions written as parquet; 0: never."""
    system_metrics_every: float = Field(10.0, ge=0)
    """Seconds between readings of each machine's CPU, memory, disk, network and GPUs, written to system/; 0:
    none."""


class WatchdogConfig(Section):
    tell_after: float = Field(300.0, gt=0)
    """Seconds in one phase after which a rank says where it is and writes its threads' stacks to stalls/."""
    end_after: float = Field(1800.0, gt=0)
    """Seconds in one phase after which the run ends as failed; also what one rank waits for the others."""
    host_lost_after: float = Field(120.0, ge=1)
    """Seconds of silence after which a machine counts as lost, its network or power gone; answers of its kernel
    count, so that a slow rank is none."""


class PluginsConfig(Section):
    disable: list[str] = Field(default_factory=list)
    """Distributions whose plugins are not loaded."""
    required: list[str] = Field(default_factory=list)
    """Distributions that must be installed, for example ``grpox-foo>=1.2``."""
