"""What the launcher (torchrun, deepspeed, or none) tells this process of itself, by environment variables."""

from __future__ import annotations

import os

from grpox.errors import ConfigError, Problem


def rank() -> int:
    """This process's number among all, from 0; raises ConfigError if RANK is no number."""
    return _number("RANK", default=0, least=0)


def world_size() -> int:
    """Number of processes; raises ConfigError if WORLD_SIZE is no positive number."""
    return _number("WORLD_SIZE", default=1, least=1)


def local_rank() -> int:
    """This process's number on its machine, from 0; raises ConfigError if LOCAL_RANK is no number."""
    return _number("LOCAL_RANK", default=0, least=0)


def on_one_machine() -> bool:
    """Whether torchrun or the deepspeed launcher says so, or there is but one process."""
    here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    return here == str(world_size())


def _number(name: str, default: int, least: int) -> int:
    given = os.environ.get(name, str(default))
    if not given.isdecimal() or int(given) < least:
        raise ConfigError(
            Problem(
                "the environment variable of a launcher is not a number that it can be",
                key=name,
                given=given,
                allowed=f"a whole number from {least}; unset it to run without a launcher",
            )
        )
    return int(given)
