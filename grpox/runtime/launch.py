"""What the launcher (torchrun, deepspeed, mpirun, srun, or none) tells this process of itself."""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress

from grpox.errors import ConfigError
from grpox.runtime.launchers import Place, place_of, standard
from grpox.runtime.launchers.variables import number


def rank() -> int:
    """This process's number among all, from 0; raises ConfigError if the launcher's is no number."""
    return _told("RANK", "rank", 0)


def world_size() -> int:
    """Number of processes; raises ConfigError if the launcher's is no positive number."""
    return _told("WORLD_SIZE", "world_size", 1)


def local_rank() -> int:
    """This process's number on its machine, from 0; raises ConfigError if the launcher's is no number."""
    return _told("LOCAL_RANK", "local_rank", 0)


def _told(variable: str, field: str, least: int) -> int:
    """Read torchrun's variable, else the field of another launcher's place; `least` without a launcher."""
    if variable in os.environ:
        return number(os.environ, variable, least=least)
    return int(getattr(place_of(os.environ), field, least))


def rank_told() -> int:
    """The same as `rank`, for messages: 0 where the launcher tells something that is no rank."""
    with suppress(ConfigError):
        return rank()
    return 0


def on_one_machine() -> bool:
    """Whether the launcher says so, the ranks meet on loopback, or there is but one process."""
    here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    return here == str(world_size()) or _on_loopback(os.environ.get("MASTER_ADDR", ""))


def _on_loopback(host: str) -> bool:
    """Whether it says so itself; a name may stand for loopback on its own machine alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def settle() -> Place:
    """This process's place, which from now on the variables of torchrun tell too, whatever launcher it was.

    DeepSpeed, transformers, vLLM and the processes that this one starts read those and no others.

    Raises:
        ConfigError: a launcher's variables are set in part, or contradict one another.
    """
    place = standard(os.environ) or place_of(os.environ)
    if place is None:
        return Place("no launcher", 0, 1, number(os.environ, "LOCAL_RANK", default=0, least=0))
    os.environ.update(place.variables())
    return place
