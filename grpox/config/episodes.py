"""The keys `environment`, `tools` and `episodes` of a run file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from grpox.config.component import ComponentRef, Section


class WhenConfig(Section):
    model_config = ConfigDict(serialize_by_alias=True)  # a run's folder has the config as a run file has it

    column: str
    """Column of the data that tells the rows of an environment."""
    equals: Any = Field(alias="is")
    """Value of the column in these rows."""


class EnvironmentRef(ComponentRef):
    """An environment, and the rows of the data that it is for."""

    when: WhenConfig | None = None
    """Rows of the data that the environment is for; default: all. Needed where there are several."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Factor of the environment's own reward, the reward function ``environment``."""


Environments = Annotated[
    Annotated[EnvironmentRef, Tag("one")]
    | Annotated[list[EnvironmentRef], Field(min_length=1), Tag("several")],
    # One of the two, so that a mistake in a list is reported at its place.
    Discriminator(lambda value: "several" if isinstance(value, list) else "one"),
]
"""The key `environment` of a run file."""


class EpisodesConfig(Section):
    max_turns: int = Field(8, ge=1)
    """Most turns of the model in an episode."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Longest turn of the model in tokens; default: what `sampling.max_completion_length` leaves."""
    max_observation_tokens: int | None = Field(None, ge=1)
    """Longest answer of the environment in tokens, of which the rest is cut off; default: no limit."""
    allow_special_tokens: bool = False
    """Let the text of a special token in what environments and tools answer be that token."""
    max_calls: int = Field(8, ge=1)
    """Most calls of tools in one turn; each further call gets an error text."""
    tool_timeout: float = Field(10.0, gt=0, allow_inf_nan=False)
    """Time limit in seconds of one call of a tool, and of one call of another method of the environment."""
    memory: float = Field(4.0, gt=0, allow_inf_nan=False)
    """Memory limit in GiB of the process of each environment."""
    concurrency: int = Field(64, ge=1)
    """Largest number of environments at work at the same time on each rank."""
    isolation: Literal["process", "none"] = "process"
    """Place of the environments: a process for each episode, or the trainer, where only async tools have a time
    limit."""
