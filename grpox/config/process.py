"""The sections `watchdog` and `plugins`."""

from __future__ import annotations

from pydantic import Field

from grpox.config.section import Section


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
