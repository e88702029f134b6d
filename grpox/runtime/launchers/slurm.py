"""Processes that Slurm's srun started, one a task: where they meet follows from the job.

A batch script is no task of srun's, although it has a SLURM_PROCID: only the variables of a step tell that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from grpox.errors import ConfigError, Problem
from grpox.runtime.launchers.variables import Place, number, port_of, require

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
