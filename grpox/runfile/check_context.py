"""The one argument of every check of a run file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from grpox.config import RunConfig
from grpox.errors import Problem
from grpox.plugins.component import BoundComponent
from grpox.plugins.discovery import PluginSet
from grpox.runfile.given import Given
from grpox.runfile.sampling_bias import changed_distribution


@dataclass
class CheckContext:
    """A run file that fits its schema, and what could be found out of it so far."""

    config: RunConfig
    """With absolute input paths."""
    components: Mapping[str, BoundComponent]
    """Components that could be bound, by key."""
    plugins: PluginSet
    """Installed plugins."""
    given: Given
    """Objects in place of what the config names."""
    trains: bool = True
    """True where training data is read and the output folder written."""
    num_prompts: int | None = None
    """Number of prompts in the training data, where a check has learnt it cheaply."""

    @property
    def generator(self) -> BoundComponent | None:
        return self.components.get("generator")

    @property
    def correction(self) -> BoundComponent | None:
        return self.components.get("correction")

    @property
    def changed_sampling(self) -> str:
        """Settings that sample from another distribution than the trainer's: ``sampling with top_p 0.9``."""
        changed = changed_distribution(self.config.sampling)
        return f"sampling with {', '.join(changed)}" if changed else ""


Check = Callable[[CheckContext], Iterable[Problem]]


def of_section(name: str, check: Callable[..., Iterable[Problem]]) -> Check:
    """Make a check of one that needs nothing but a section of the run file."""
    return lambda context: check(getattr(context.config, name))
