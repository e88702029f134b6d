"""A process's place in its launch, and the variables it is read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpox.errors import ConfigError, Problem

ALONE = "unset it to run without a launcher"


@dataclass(frozen=True)
class Place:
    """One process among those that a launcher started."""

    launcher: str
    """For messages."""
    rank: int
    world_size: int
    local_rank: int
    """Its number among those of its machine."""
    local_world_size: int | None = None
    """How many its machine has; None: the launcher does not say."""
    address: str | None = None
    """Of the machine of rank 0, where the ranks meet; None: one process meets nobody."""
    port: int | None = None

    def variables(self) -> dict[str, str]:
        """The same in the variables that torchrun sets."""
        told = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in told.items() if value is not None}


def number(
    environment: Mapping[str, str],
    name: str,
    *,
    least: int,
    default: int | None = None,
    most: int | None = None,
) -> int:
    """The variable's value.

    Args:
        default: where it is not set; None: it is.

    Raises:
        ConfigError: it is no whole number from `least` to `most`.
    """
    given = environment.get(name, "" if default is None else str(default)).strip()
    if given.isdecimal() and least <= int(given) and (most is None or int(given) <= most):
        return int(given)
    bounds = f"from {least}" if most is None else f"from {least} to {most}"
    what = "the environment variable of a launcher is not a number that it can be"
    raise ConfigError(Problem(what, key=name, given=given, allowed=f"a whole number {bounds}; {ALONE}"))


def require(environment: Mapping[str, str], names: Sequence[str], launcher: str) -> None:
    """Refuse a launch that is told in part.

    Raises:
        ConfigError: some of `names` are not set.
    """
    given = [name for name in names if environment.get(name)]
    missing = [name for name in names if not environment.get(name)]
    if missing:
        what = f"{launcher} sets this variable beside {', '.join(given)}, and it is not set"
        allowed = f"all of {', '.join(names)}, or none to run without a launcher"
        raise ConfigError([Problem(what, key=name, allowed=allowed) for name in missing])


def port_of(environment: Mapping[str, str], default: int) -> int:
    """MASTER_PORT, where it is set."""
    return number(environment, "MASTER_PORT", default=default, least=1, most=65535)
