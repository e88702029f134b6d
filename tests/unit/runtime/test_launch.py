"""Reading each launcher's variables, including incomplete and contradictory ones."""

from __future__ import annotations

import os

import pytest
from support.problems import problem_of

from grpox.runtime import launch
from grpox.runtime.launch import FIRST_PORT, PORTS, Place, meeting_of_job, place_of, slurm_place, standard

TORCHRUN = {
    "RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "gpu001", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "4711",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", "CROSS_RANK": "1",
    "CROSS_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "100", "SLURM_STEP_ID": "0", "SLURM_PROCID": "9", "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[003-004]", "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}  # fmt: skip
ALL = {*TORCHRUN, *DEEPSPEED, *MPIRUN, *SRUN, "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_NODELIST"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment without any launcher's variables, for tests that read it itself."""
    for name in ALL:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def place_in(environment: dict[str, str]) -> Place | None:
    return standard(environment) or place_of(environment)


ALWAYS = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_NODELIST")
"""Variables that srun has always set."""
STEPS_OWN = {"SLURM_JOB_NODELIST": "gpu[001-004]", "SLURM_STEP_NODELIST": "gpu[003-004]"}
SRUNS_PORT = FIRST_PORT + 6100


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (TORCHRUN, Place("torchrun or deepspeed", 11, 16, 3, 8, "gpu001", 29400)),
        (DEEPSPEED, Place("torchrun or deepspeed", 5, 8, 1, 4, "10.0.0.1", 29500)),
        (MPIRUN | {"MASTER_ADDR": "node7"}, Place("mpirun", 2, 4, 0, 2, "node7", 29500)),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, Place("mpirun", 2, 4, 0, 4, "127.0.0.1", 29500)),
        # srun starts mpirun's daemons, one on each machine: those variables are not the ranks'.
        (
            SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"} | MPIRUN,
            Place("mpirun", 2, 4, 0, 2, "gpu003", SRUNS_PORT),
        ),
        (SRUN, Place("srun", 9, 16, 1, 8, "gpu003", SRUNS_PORT)),
        (
            {name: SRUN[name] for name in ALWAYS} | {"SLURM_STEPID": "0"},
            Place("srun", 9, 16, 1, None, "gpu003", SRUNS_PORT),
        ),
        (
            SRUN | {"MASTER_ADDR": "gpu003-ib", "MASTER_PORT": "1234"},
            Place("srun", 9, 16, 1, 8, "gpu003-ib", 1234),
        ),
        (SRUN | STEPS_OWN, Place("srun", 9, 16, 1, 8, "gpu003", SRUNS_PORT)),
    ],
)
def test_each_launcher_says_where_a_rank_is_and_where_all_meet(
    environment: dict[str, str], place: Place
) -> None:
    assert place_in(environment) == place


def test_no_launcher() -> None:
    """Also not the script of a batch job, and a shell within an allocation."""
    assert [standard(given) for given in ({}, {"LOCAL_RANK": "0"}, {"WORLD_SIZE": "1"})] == [None] * 3
    assert slurm_place({"SLURM_NTASKS": "4"}) is None
    script = {name: value for name, value in SRUN.items() if "STEP" not in name}
    shell = SRUN | {"SLURM_STEP_NUM_TASKS": "1"}
    assert [place_of(given | {"SLURM_PROCID": "0"}) for given in (script, shell)] == [None, None]


def test_two_steps_of_a_job_and_two_jobs_have_ports_of_their_own() -> None:
    places = [SRUN | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job in ("7", "8") for step in "012"]
    ports = [meeting[1] for meeting in map(meeting_of_job, places) if meeting]
    assert len(set(ports)) == len(places)
    far = meeting_of_job(SRUN | {"SLURM_JOB_ID": "987654321"})
    assert far is not None
    assert FIRST_PORT <= far[1] < FIRST_PORT + PORTS


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu[003-007,011],login1", "gpu003"),
        ("gpu[7,3]", "gpu7"),
        ("login1,gpu[1-2]", "login1"),
        ("rack[2-3]node[01-16]", "rack2node01"),
        ("cn-a,cn-b", "cn-a"),
        ("10.0.0.[1-2]", "10.0.0.1"),
    ],
)
def test_the_first_of_slurms_machines(nodes: str, first: str) -> None:
    assert launch.first_host(nodes) == first


@pytest.mark.parametrize(
    ("told", "counts"), [("8(x3),4", [8, 8, 8, 4]), ("2", [2]), ("1,2", [1, 2]), ("many", []), ("", [])]
)
def test_tasks_on_each_machine(told: str, counts: list[int]) -> None:
    assert launch.tasks_of_nodes(told) == counts


@pytest.mark.parametrize(
    ("environment", "missing", "key"),
    [
        *(
            (TORCHRUN, name, name)
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        ),
        *((MPIRUN | {"MASTER_ADDR": "a"}, name, name) for name in sorted(MPIRUN)),
        (SRUN, "SLURM_PROCID", "SLURM_PROCID"),
        (SRUN, "SLURM_LOCALID", "SLURM_LOCALID"),
        (SRUN, "SLURM_JOB_ID", "SLURM_JOB_NODELIST"),
        (SRUN, "SLURM_JOB_NODELIST", "SLURM_JOB_NODELIST"),
    ],
)
def test_an_incomplete_launch_is_refused(environment: dict[str, str], missing: str, key: str) -> None:
    problem = problem_of(place_in, {name: value for name, value in environment.items() if name != missing})
    assert problem.key == key
    assert environment is not TORCHRUN or "is not set" in problem.what


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("RANK", "16", "from 0 to 15"),
        ("RANK", "-1", "from 0 to 15"),
        ("WORLD_SIZE", "0", "from 1"),
        ("WORLD_SIZE", "many", "from 1"),
        ("LOCAL_RANK", "8", "from 0 to 7"),
        ("LOCAL_WORLD_SIZE", "17", "from 1 to 16"),
        ("MASTER_PORT", "70000", "from 1 to 65535"),
    ],
)
def test_numbers_that_cannot_be(name: str, value: str, allowed: str) -> None:
    problem = problem_of(place_in, TORCHRUN | {name: value})
    assert (problem.key, problem.given) == (name, value)
    assert allowed in problem.allowed


def test_mpirun_over_machines_without_a_place_to_meet() -> None:
    problem = problem_of(place_in, MPIRUN)
    assert (problem.key, "mpirun -x MASTER_ADDR" in problem.allowed) == ("MASTER_ADDR", True)


def test_ranks_set_once_for_all_tasks_contradict_srun() -> None:
    """Effect of `export RANK=$SLURM_PROCID` in a batch script: every task is rank 0."""
    own = {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    problem = problem_of(place_in, SRUN | own)
    assert (problem.key, problem.given) == ("RANK", "0")
    assert problem.allowed.startswith("9; unset RANK")
    problem = problem_of(place_in, SRUN | own | {"WORLD_SIZE": "2"})
    assert (problem.key, problem.given) == ("WORLD_SIZE", "2")


TASK = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("environment", "rank", "ranks"),
    [
        (TASK | TORCHRUN | {"RANK": "0"}, 0, 16),  # torchrun deals ranks as its agents arrive
        (TASK | {n: v for n, v in TORCHRUN.items() if n != "TORCHELASTIC_RUN_ID"}, 11, 16),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 0, 1),  # a run for each task
    ],
)
def test_what_srun_started_may_start_ranks_of_its_own(
    environment: dict[str, str], rank: int, ranks: int
) -> None:
    place = standard(environment)
    assert place is not None
    assert (place.rank, place.world_size) == (rank, ranks)


def test_sruns_place_is_set_in_torchruns_variables(launched: pytest.MonkeyPatch) -> None:
    for name, value in SRUN.items():
        launched.setenv(name, value)
    # Registered with monkeypatch, so that they are gone again afterwards.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        launched.setenv(name, "")
        launched.delenv(name)
    assert (launch.rank(), launch.world_size(), launch.local_rank()) == (9, 16, 1)
    launch.resolve_launch()
    told = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    assert told == {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("gpu003", str(FIRST_PORT + 6100))
    assert launch.resolve_launch().rank == 9  # a second run of this process reads them


def test_the_engines_own_variable_is_no_launcher(launched: pytest.MonkeyPatch) -> None:
    """DeepSpeed is told LOCAL_SIZE 1 where nobody else says: a second rank of the machine is none the less."""
    for name, value in DEEPSPEED.items():
        if not name.startswith("CROSS"):
            launched.setenv(name, value)
    launched.setenv("LOCAL_SIZE", "1")
    assert launch.resolve_launch().local_rank == 1


def test_ranks_on_one_machine_and_a_rank_that_is_none_in_messages(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("WORLD_SIZE", "2")
    assert not launch.on_one_machine()
    launched.setenv("MASTER_ADDR", "127.0.0.1")
    assert launch.on_one_machine()
    launched.setenv("MASTER_ADDR", "gpu001")
    assert not launch.on_one_machine()
    launched.setenv("LOCAL_WORLD_SIZE", "2")
    assert launch.on_one_machine()
    for rank, in_messages in (("first", 0), ("3", 3)):
        launched.setenv("RANK", rank)
        assert launch.rank_or_zero() == in_messages
