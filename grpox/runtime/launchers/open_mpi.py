"""Processes that Open MPI's mpirun started. Its variables tell no place to meet."""

from __future__ import annotations

from collections.abc import Mapping

from grpox.errors import ConfigError, Problem
from grpox.runtime.launchers.slurm import meeting_of_job
from grpox.runtime.launchers.variables import Place, number, port_of, require

PREFIX = "OMPI_COMM_WORLD_"
NAMES = tuple(f"{PREFIX}{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
PORT = 29500
"""PyTorch's own."""


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
    """Where the ranks meet by default.

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
