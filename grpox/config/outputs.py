"""The sections around the training: `checkpoint`, `hub`, `logging`, `record`, `watchdog` and `plugins`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpox.config.component import Section


class HubConfig(Section):
    repo: str
    """Hub repository for the trained model, ``user/name``; the token comes from the environment (HF_TOKEN) or
    from `hf auth login`."""
    private: bool = False
    """True: if the repository does not exist, create it as private."""
    revision: str | None = None
    """Branch to push to; default: the repository's main branch."""


class CheckpointConfig(Section):
    every: int = Field(100, ge=0)
    """Optimizer steps between checkpoints; 0: save only when the run is interrupted."""
    last: bool | None = None
    """Also save a checkpoint after the last step; default: only if `every` is above 0."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints that stay on disk; older ones are deleted."""
    best: str | None = None
    """Metric of steps or evaluations, such as ``reward`` or ``evaluation/accuracy``: the saved checkpoint with
    its best value also stays on disk. A checkpoint without the metric, or with NaN, does not count."""
    best_is: Literal["highest", "lowest", "max", "min"] = "highest"
    """Best value of `best`: the highest (or ``max``) or the lowest (or ``min``)."""
    background: bool = False
    """Write in a thread while training continues; needs memory for a copy of weights and optimizer states."""

    @property
    def saves_last(self) -> bool:
        """Return True if a checkpoint of the last step is saved."""
        return self.every > 0 if self.last is None else self.last


class LoggingConfig(Section):
    completions_every: int = Field(10, ge=0)
    """Optimizer steps between printing sample completions in the terminal; 0: never."""
    save_completions_every: int = Field(1, ge=0)
    """Generation batches between writing completions as parquet; 0: never."""
    system_metrics_every: float = Field(10.0, ge=0)
    """Seconds between measurements of each machine's CPU, memory, disk, network and GPUs, written to system/;
    0: never."""


class RecordConfig(Section):
    tokens: int = Field(8, ge=0)
    """Completions of each optimizer step whose tokens are written to tokens/; 0: none."""


class WatchdogConfig(Section):
    tell_after: float = Field(300.0, gt=0)
    """Seconds in one phase after which a rank warns, naming the phase, and writes its threads' stacks to
    stalls/."""
    end_after: float = Field(1800.0, gt=0)
    """Seconds in one phase after which the run fails; also the longest wait of a rank for the others."""
    host_lost_after: float = Field(120.0, ge=1)
    """Seconds of silence after which a machine counts as lost, for example without network or power. Replies of
    its kernel count as signs of life, so a slow rank does not count as lost."""


class PluginsConfig(Section):
    disable: list[str] = Field(default_factory=list)
    """Distributions whose plugins are not loaded."""
    required: list[str] = Field(default_factory=list)
    """Distributions that must be installed, for example ``grpox-foo>=1.2``."""
