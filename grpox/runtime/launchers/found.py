"""Which launcher started this process, by the variables that are there.

RANK and its like, which torchrun and the deepspeed launcher set, come first: either may itself have been
started by srun or mpirun, once for each machine. mpirun comes before srun, by which it starts its own helpers.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpox.errors import ConfigError, Problem
from grpox.runtime.launchers.slurm import meeting_of_job, slurm_place
from grpox.runtime.launchers.variables import Place, number, port_of, require

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
