"""Rank, size and address of this process, from its launcher: torchrun, deepspeed, mpirun, srun, or none.

Variables such as RANK, set by torchrun and the deepspeed launcher, come first, because srun or mpirun may have
started these launchers once per machine. mpirun comes before srun, because mpirun may start its helpers by
srun. A batch script is not a task of srun, although it has a SLURM_PROCID: only the variables of a step show a
task.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

from grpox.errors import ConfigError, Problem

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
OPEN_MPI_PORT = 29500
"""PyTorch's default port."""
STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS")
NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
"""Variables with the list of machines, the step's before the job's; rank 0 is on the first machine."""
TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
FIRST_PORT, PORTS = 16384, 16384
"""First port; the ports are below those that Linux gives to outgoing connections (32768 to 60999)."""


@dataclass(frozen=True)
class Place:
    """Place of one process among the processes of a launcher."""

    launcher: str
    """Name of the launcher, for messages."""
    rank: int
    world_size: int
    local_rank: int
    """Number of the process on its machine."""
    local_world_size: int | None = None
    """Number of processes on its machine; None: the launcher does not say."""
    address: str | None = None
    """Address of rank 0's machine, for the rendezvous; None for a single process."""
    port: int | None = None

    def variables(self) -> dict[str, str]:
        """The place in torchrun's variables."""
        values = (self.rank, self.world_size, self.local_rank, self.local_world_size, self.address, self.port)
        names = (*RANKS, "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        return {name: str(value) for name, value in zip(names, values, strict=True) if value is not None}


def rank() -> int:
    """Return the rank of this process; raises ConfigError if the launcher's value is not a number."""
    return _number_of("RANK", "rank", 0)


def world_size() -> int:
    """Return the number of processes; raises ConfigError if the launcher's value is not a positive number."""
    return _number_of("WORLD_SIZE", "world_size", 1)


def local_rank() -> int:
    """Return the rank on this machine, from 0; raises ConfigError if the launcher's value is not a number."""
    return _number_of("LOCAL_RANK", "local_rank", 0)


def _number_of(variable: str, field: str, least: int) -> int:
    """Read torchrun's variable, else the field from another launcher; `least` without a launcher."""
    if variable in os.environ:
        return number(os.environ, variable, least)
    return int(getattr(place_of(os.environ), field, least))


def rank_or_zero() -> int:
    """Return the rank for messages; 0 if the launcher's value is not a number."""
    with suppress(ConfigError):
        return rank()
    return 0


def on_one_machine() -> bool:
    """Return True if all ranks are on this machine: by the launcher, by a loopback address, or as one
    process."""
    here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    if here == str(world_size()):
        return True
    host = os.environ.get("MASTER_ADDR", "")
    with suppress(ValueError):  # a name: but for this one it may stand for loopback on its own machine alone
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def resolve_launch() -> Place:
    """Return this process's place, and set torchrun's variables to it for any launcher.

    DeepSpeed, transformers, vLLM and child processes read only torchrun's variables.

    Raises:
        ConfigError: a launcher's variables are incomplete or contradictory.
    """
    place = standard(os.environ) or place_of(os.environ)
    if place is None:
        return Place("no launcher", 0, 1, number(os.environ, "LOCAL_RANK", default=0))
    os.environ.update(place.variables())
    return place


def place_of(environment: Mapping[str, str]) -> Place | None:
    """Read the place from mpirun's or srun's variables; None if neither started this process."""
    return open_mpi_place(environment) or slurm_place(environment)


def standard(environment: Mapping[str, str]) -> Place | None:
    """Read the place from RANK and the other variables of torchrun; None if they are not set."""
    if "RANK" not in environment and environment.get("WORLD_SIZE", "1") == "1":
        return None
    launcher = "torchrun or deepspeed"
    require(environment, RANKS[:2] if environment.get("WORLD_SIZE") == "1" else RANKS, launcher)
    # The engine sets LOCAL_SIZE too, for DeepSpeed; CROSS_SIZE is set by its launcher alone.
    local_size = "LOCAL_WORLD_SIZE" if "CROSS_SIZE" not in environment else "LOCAL_SIZE"
    place = _numbers(environment, launcher, (*RANKS, local_size))
    if place.world_size == 1:
        return place
    require(environment, (*RANKS, "MASTER_ADDR", "MASTER_PORT"), launcher)
    _refuse_contradiction(environment, place)
    return replace(place, address=environment["MASTER_ADDR"], port=_port(environment, 0))


def _refuse_contradiction(environment: Mapping[str, str], place: Place) -> None:
    """Refuse RANK or WORLD_SIZE that a batch script set once for all tasks of srun.

    A user's launcher may start several processes in each task; WORLD_SIZE 1 means a separate run in each.
    """
    theirs = None if "TORCHELASTIC_RUN_ID" in environment else place_of(environment)
    if theirs is None or theirs.world_size == 1:
        return
    if place.world_size < theirs.world_size:
        name, given, allowed = "WORLD_SIZE", place.world_size, theirs.world_size
    elif place.world_size == theirs.world_size and place.rank != theirs.rank:
        name, given, allowed = "RANK", place.rank, theirs.rank
    else:
        return
    what = f"the environment variable contradicts {theirs.launcher}"
    cure = f"{allowed}; unset RANK, WORLD_SIZE and LOCAL_RANK to use only {theirs.launcher}"
    raise ConfigError(what, key=name, given=str(given), allowed=cure)


def open_mpi_place(environment: Mapping[str, str]) -> Place | None:
    """Read the place from mpirun's variables; None if mpirun did not start this process."""
    if not any(name in environment for name in OPEN_MPI):
        return None
    require(environment, OPEN_MPI, "mpirun")
    place = _numbers(environment, "mpirun", OPEN_MPI)
    if place.world_size == 1:
        return place
    alone = place.local_world_size == place.world_size
    of_job, port = meeting_of_job(environment) or (None, OPEN_MPI_PORT)
    address = environment.get("MASTER_ADDR") or ("127.0.0.1" if alone else of_job)
    if address is None:
        what = "is missing: mpirun does not give ranks on several machines the address of rank 0"
        allowed = "the address of rank 0's machine: mpirun -x MASTER_ADDR=HOST"
        raise ConfigError(what, key="MASTER_ADDR", allowed=allowed)
    return replace(place, address=address, port=_port(environment, port))


def slurm_place(environment: Mapping[str, str]) -> Place | None:
    """Read the place from Slurm's variables; None if srun did not start this process, or only one task."""
    tasks = _first_of(environment, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    if tasks is None or not any(name in environment for name in STEP):
        return None
    size = number(environment, tasks, 1)
    if size == 1:
        return None
    names = ("SLURM_PROCID", tasks, "SLURM_LOCALID")
    require(environment, names, "srun")
    place = _numbers(environment, "srun", (*names, ""), _tasks_here(environment, size))
    of_job, port = meeting_of_job(environment) or (None, None)
    address = environment.get("MASTER_ADDR") or of_job
    if address is None or (port is None and "MASTER_PORT" not in environment):
        what = "Slurm's variables do not give the address of rank 0"
        allowed = "SLURM_JOB_ID and SLURM_JOB_NODELIST, as srun sets them; or MASTER_ADDR and MASTER_PORT"
        missing = "SLURM_JOB_NODELIST" if address is None else "SLURM_JOB_ID"
        raise ConfigError(what, key=missing, allowed=allowed)
    return replace(place, address=address, port=_port(environment, port or 0))


def _numbers(
    environment: Mapping[str, str], launcher: str, names: Sequence[str], here: int | None = None
) -> Place:
    """Read a place, without an address, from the variables of rank, size, local rank and local size."""
    size = number(environment, names[1], 1)
    here = number(environment, names[3], 1, most=size) if names[3] in environment else here
    local_rank = number(environment, names[2], default=0, most=here - 1 if here else None)
    return Place(launcher, number(environment, names[0], most=size - 1), size, local_rank, here)


def meeting_of_job(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the first machine, and a port that no other job or step of this job uses; None without a job."""
    nodes, job = _first_of(environment, NODES), environment.get("SLURM_JOB_ID", "")
    if nodes is None or not job.isdecimal():
        return None
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID") or ""
    own = int(step) if step.isdecimal() else 0
    # 61 steps of a job have their own ports before a port coincides with the next job's.
    return first_host(environment[nodes]), FIRST_PORT + (61 * int(job) + own) % PORTS


def first_host(nodes: str) -> str:
    """Return the first machine of Slurm's list: ``gpu[003-007,011],login1`` gives ``gpu003``."""
    first = re.match(r"(?:[^[,]|\[[^]]*\]?)*", nodes)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0] if first else "").strip()


def tasks_of_nodes(text: str) -> list[int]:
    """Parse the tasks on each machine from Slurm's short form: ``8(x3),4`` gives 8, 8, 8, 4; empty if
    invalid."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()) for part in text.split(",")]
    counts = [[int(part[1])] * int(part[2] or 1) for part in parts if part]
    return list(chain(*counts)) if all(parts) else []


def _tasks_here(environment: Mapping[str, str], size: int) -> int | None:
    """Return the number of the step's tasks on this machine; None if Slurm does not say."""
    name, node = _first_of(environment, TASKS_PER_NODE), environment.get("SLURM_NODEID", "")
    counts = tasks_of_nodes(environment[name]) if name else []
    if sum(counts) != size or not node.isdecimal() or int(node) >= len(counts):
        return None
    return counts[int(node)]


def _first_of(environment: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((name for name in names if environment.get(name)), None)


def number(
    environment: Mapping[str, str],
    name: str,
    least: int = 0,
    *,
    default: int | None = None,
    most: int | None = None,
) -> int:
    """Return the value of an environment variable; without a default it must be set."""
    given = environment.get(name, "" if default is None else str(default)).strip()
    if given.isdecimal() and least <= int(given) and (most is None or int(given) <= most):
        return int(given)
    bounds = f"from {least}" if most is None else f"from {least} to {most}"
    what = "the environment variable of a launcher has an impossible value"
    allowed = f"a whole number {bounds}; unset it to run without a launcher"
    raise ConfigError(what, key=name, given=given, allowed=allowed)


def _port(environment: Mapping[str, str], default: int) -> int:
    return number(environment, "MASTER_PORT", 1, default=default, most=65535)


def require(environment: Mapping[str, str], names: Sequence[str], launcher: str) -> None:
    """Refuse a launch with only some of its variables set."""
    given = [name for name in names if environment.get(name)]
    missing = [name for name in names if not environment.get(name)]
    if missing:
        what = f"is not set, but {launcher} sets this variable together with {', '.join(given)}"
        allowed = f"all of {', '.join(names)}, or none to run without a launcher"
        raise ConfigError([Problem(what, key=name, allowed=allowed) for name in missing])
