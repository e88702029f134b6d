"""What the launcher (torchrun, deepspeed, mpirun, srun, or none) tells this process of itself."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
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


STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS")
NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
"""The machines, the step's before the job's: rank 0 is on the first."""
TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
FIRST_PORT, PORTS = 16384, 16384
"""Below those that Linux gives to outgoing connections (32768 to 60999)."""


def slurm_place(environment: Mapping[str, str]) -> Place | None:
    """None: srun did not start this process, or alone.

    Raises:
        ConfigError: Slurm's variables are set in part, or cannot be.
    """
    tasks = _first_of(environment, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    if tasks is None or not any(name in environment for name in STEP):
        return None
    size = number(environment, tasks, least=1)
    if size == 1:
        return None
    require(environment, ("SLURM_PROCID", tasks, "SLURM_LOCALID"), "srun")
    rank = number(environment, "SLURM_PROCID", least=0, most=size - 1)
    here = _tasks_here(environment, size)
    local_rank = number(environment, "SLURM_LOCALID", least=0, most=here - 1 if here else None)
    address, port = meeting_of_job(environment) or (None, None)
    address = environment.get("MASTER_ADDR") or address
    if address is None or (port is None and "MASTER_PORT" not in environment):
        what = "Slurm's variables do not tell where the ranks meet"
        allowed = "SLURM_JOB_ID and SLURM_JOB_NODELIST, as srun sets them; or MASTER_ADDR and MASTER_PORT"
        missing = "SLURM_JOB_NODELIST" if address is None else "SLURM_JOB_ID"
        raise ConfigError(Problem(what, key=missing, allowed=allowed))
    return Place("srun", rank, size, local_rank, here, address, port_of(environment, port or 0))


def meeting_of_job(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """The first machine, and a port that other jobs and other steps of this one do not take; None: no job."""
    nodes, job = _first_of(environment, NODES), environment.get("SLURM_JOB_ID", "")
    if nodes is None or not job.isdecimal():
        return None
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID") or ""
    own = int(step) if step.isdecimal() else 0
    # 61 steps of a job have ports of their own before one is that of the next job.
    return first_host(environment[nodes]), FIRST_PORT + (61 * int(job) + own) % PORTS


def first_host(nodes: str) -> str:
    """The first machine of Slurm's list: ``gpu[003-007,011],login1`` gives ``gpu003``."""
    depth = 0
    for end, character in enumerate(nodes):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            nodes = nodes[:end]
            break
    return re.sub(r"\[([^]]*)\]", lambda found: re.split("[,-]", found[1])[0], nodes).strip()


def tasks_of_nodes(told: str) -> list[int]:
    """Tasks on each machine from Slurm's short form: ``8(x3),4`` gives 8, 8, 8, 4; empty where it is none."""
    counts: list[int] = []
    for part in told.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _tasks_here(environment: Mapping[str, str], size: int) -> int | None:
    """Tasks of the step on this machine; None where Slurm does not say."""
    name, node = _first_of(environment, TASKS_PER_NODE), environment.get("SLURM_NODEID", "")
    counts = tasks_of_nodes(environment[name]) if name else []
    if sum(counts) != size or not node.isdecimal() or int(node) >= len(counts):
        return None
    return counts[int(node)]


def _first_of(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if environment.get(name)), None)


RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
MEETING = ("MASTER_ADDR", "MASTER_PORT")

PREFIX = "OMPI_COMM_WORLD_"
NAMES = tuple(f"{PREFIX}{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
PORT = 29500
"""PyTorch's own."""


def place_of(environment: Mapping[str, str]) -> Place | None:
    """What mpirun or srun tells; None: neither started this process."""
    return open_mpi_place(environment) or slurm_place(environment)


def standard(environment: Mapping[str, str]) -> Place | None:
    """What RANK and its like tell; None: they are not set, and one process is no launch.

    Raises:
        ConfigError: they are set in part, cannot be, or contradict what srun or mpirun says.
    """
    if "RANK" not in environment and environment.get("WORLD_SIZE", "1") == "1":
        return None
    launcher = "torchrun or deepspeed"
    require(environment, RANKS[:2] if environment.get("WORLD_SIZE") == "1" else RANKS, launcher)
    size = number(environment, "WORLD_SIZE", least=1)
    rank = number(environment, "RANK", least=0, most=size - 1)
    here = _on_this_machine(environment, size)
    local_rank = number(environment, "LOCAL_RANK", default=0, least=0, most=None if here is None else here - 1)
    if size > 1:
        require(environment, (*RANKS, *MEETING), launcher)
    _refuse_contradiction(environment, rank, size)
    port = port_of(environment, 0) if size > 1 else None
    address = environment["MASTER_ADDR"] if size > 1 else None
    return Place(launcher, rank, size, local_rank, here, address, port)


def _on_this_machine(environment: Mapping[str, str], size: int) -> int | None:
    """Ranks of this machine, by torchrun or by the deepspeed launcher; None where neither says."""
    # The engine sets LOCAL_SIZE too, for DeepSpeed; CROSS_SIZE is set by its launcher alone.
    name = "LOCAL_WORLD_SIZE" if "CROSS_SIZE" not in environment else "LOCAL_SIZE"
    return number(environment, name, least=1, most=size) if name in environment else None


def _refuse_contradiction(environment: Mapping[str, str], rank: int, size: int) -> None:
    """Refuse what comes of RANK or WORLD_SIZE being set once, in a batch script, for all tasks of srun.

    A launcher of one's own may start several processes in each task, and WORLD_SIZE 1 asks for a run of each.
    """
    if "TORCHELASTIC_RUN_ID" in environment or size == 1:
        return
    place = place_of(environment)
    if place is None or place.world_size == 1:
        return
    told = {"WORLD_SIZE": (size, place.world_size)} if size < place.world_size else {}
    if size == place.world_size and rank != place.rank:
        told = {"RANK": (rank, place.rank)}
    if told:
        raise ConfigError(
            [
                Problem(
                    f"the environment variable contradicts {place.launcher}",
                    key=name,
                    given=str(given),
                    allowed=f"{theirs}; unset RANK, WORLD_SIZE and LOCAL_RANK to run by {place.launcher} alone",
                )
                for name, (given, theirs) in told.items()
            ]
        )


def open_mpi_place(environment: Mapping[str, str]) -> Place | None:
    """None: mpirun did not start this process.

    Raises:
        ConfigError: its variables are set in part, or cannot be; or the ranks are on several machines and
            nothing says where they meet.
    """
    if not any(name in environment for name in NAMES):
        return None
    require(environment, NAMES, "mpirun")
    size = number(environment, NAMES[1], least=1)
    rank = number(environment, NAMES[0], least=0, most=size - 1)
    here = number(environment, NAMES[3], least=1, most=size)
    local_rank = number(environment, NAMES[2], least=0, most=here - 1)
    if size == 1:
        return Place("mpirun", rank, size, local_rank, here)
    address, port = _meeting(environment, alone=here == size)
    return Place("mpirun", rank, size, local_rank, here, address, port_of(environment, port))


def _meeting(environment: Mapping[str, str], alone: bool) -> tuple[str, int]:
    """Return the address and port at which the ranks meet by default.

    Args:
        alone: all ranks are on one machine.
    """
    job = meeting_of_job(environment)
    port = job[1] if job else PORT
    if address := environment.get("MASTER_ADDR"):
        return address, port
    if alone:
        return "127.0.0.1", port
    if job:
        return job
    what = "mpirun does not tell ranks on several machines where they meet"
    allowed = "the address of rank 0's machine: mpirun -x MASTER_ADDR=HOST"
    raise ConfigError(Problem(what, key="MASTER_ADDR", allowed=allowed))


def rank() -> int:
    """This process's number among all, from 0; raises ConfigError if the launcher's is no number."""
    return _number_of("RANK", "rank", 0)


def world_size() -> int:
    """Number of processes; raises ConfigError if the launcher's is no positive number."""
    return _number_of("WORLD_SIZE", "world_size", 1)


def local_rank() -> int:
    """This process's number on its machine, from 0; raises ConfigError if the launcher's is no number."""
    return _number_of("LOCAL_RANK", "local_rank", 0)


def _number_of(variable: str, field: str, least: int) -> int:
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
