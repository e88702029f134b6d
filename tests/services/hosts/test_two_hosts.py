"""A run over two machines: it finds its network, tells a machine that is cut off, goes on, and asks servers.

What each machine is doing is recorded and tracked all the while.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import pytest
from support.mlflow_store import migrated_store
from support.patience import patient
from support.processes import Process
from support.run_files import SHORT
from support.services import wait_until
from two_hosts import Machines

PORT = "29500"
STEPS = 6
HAS_VLLM = util.find_spec("vllm") is not None
TOKEN = {"GRPOX_SERVER_TOKEN": "a-token-of-the-tests-0123456789"}
SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "10.77.0.[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip
CPU = "system/node_{}/cpu_utilization_percentage"
RUN = ["quickstart", "train.per_device_train_batch_size=16", *SHORT, "output_dir=run"]
REWARD = """
import time
from pathlib import Path

def score(completions, trainer_state, **columns):
    while trainer_state.global_step >= 3 and not Path("cut").exists():
        time.sleep(0.05)
    return [float(len(completion)) for completion in completions]
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Machines(3) as made:
        yield made


@pytest.fixture(scope="module")
def server(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The log of the server on machine 3, which starts while the first test runs; weights come by a folder."""
    if not HAS_VLLM:
        return None
    folder = tmp_path_factory.mktemp("server")
    (folder / "weights").mkdir()
    command = [sys.executable, "-m", "grpox", "serve", "quickstart", "--host", machines.address(3)]
    command += ["--kv-cache-gib", "0.1", "--weights-dir", "weights"]
    machines.start(3, command, folder / "server.log", **TOKEN)
    return folder / "server.log"


def by_torchrun(
    machines: Machines, folder: Path, *arguments: str, **environment: str
) -> list[subprocess.Popen[bytes]]:
    """A launch on machines 1 and 2, each of which prints into a file of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    launcher += [f"--master-addr={machines.address(1)}", f"--master-port={PORT}"]
    return [
        machines.start(
            rank + 1,
            [*launcher, f"--node-rank={rank}", "-m", "grpox", "train", *arguments],
            folder / f"{rank}.log",
            **environment,
        )
        for rank in (0, 1)
    ]


def steps_of(folder: Path) -> list[int]:
    """The steps that the run has recorded."""
    metrics = folder / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [line["step"] for line in map(json.loads, lines) if "metrics" in line]


def by_srun(machines: Machines, folder: Path, *arguments: str, **environment: str) -> list[Process]:
    """A launch on machines 1 and 2 with the variables that srun sets."""
    return [
        machines.fork(
            rank + 1, "grpox", "train", *arguments, folder=folder,
            SLURM_PROCID=str(rank), SLURM_NODEID=str(rank), SLURM_LOCALID="0", **SLURM, **environment,
        )
        for rank in (0, 1)
    ]  # fmt: skip


def readings_of(folder: Path, number: int) -> int:
    """Count the readings of a machine."""
    file = folder / "run" / "system" / f"node_{number}.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def cpu_of(folder: Path, number: int) -> list[float]:
    """Return the CPU use that a machine has recorded, reading by reading."""
    lines = map(json.loads, (folder / "run" / "system" / f"node_{number}.jsonl").read_text().splitlines())
    steps, values = zip(*((line["step"], line["metrics"][CPU.format(number)]) for line in lines), strict=True)
    assert list(steps) == list(range(len(steps)))
    return list(values)


def tracked_cpu_of(folder: Path, number: int) -> list[float]:
    """The same as MLflow has it."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    run_id = json.loads((folder / "run" / "mlflow.json").read_text())["run_id"]
    history = client.get_metric_history(run_id, CPU.format(number))
    return [metric.value for metric in sorted(history, key=lambda metric: metric.step)]


def test_a_machine_that_is_cut_off_ends_the_run_which_goes_on_later(
    machines: Machines, server: Path | None, tmp_path: Path
) -> None:
    migrated_store(tmp_path)
    (tmp_path / "mine.py").write_text(REWARD)
    run = [*RUN, f"train.max_steps={STEPS}", "checkpoint.every=2"]
    run += ["rewards=[{path: mine.py:score, isolation: thread}]", "watchdog.host_lost_after=6"]
    run += ["tracking={mlflow: {experiment: machines}}", "logging.system_metrics_every=1"]
    launch = by_torchrun(machines, tmp_path, *run)
    # The rewards hold it after its third step.
    wait_until(lambda: len(steps_of(tmp_path)) >= 3, "three steps are recorded", 180, launch[0])
    for n in (0, 1):
        wait_until(lambda n=n: readings_of(tmp_path, n) > 2, f"machine {n} was looked at", 60, launch[0])
    machines.cut(2)
    (tmp_path / "cut").touch()
    # Without host_lost_after it is half an hour, whatever this machine is busy with.
    assert [process.wait(min(patient(240), 900)) for process in launch] == [1, 1]
    for rank in (0, 1):
        log = (tmp_path / f"{rank}.log").read_text()
        assert f"error: {'[rank 1] ' if rank else ''}rank {rank} lost another rank in phase" in log
    assert "rank 0 lost another rank" in json.loads((tmp_path / "run" / "failure.json").read_text())["error"]
    assert max(steps_of(tmp_path)) < STEPS

    recorded_so_far = [len(cpu_of(tmp_path, number)) for number in (0, 1)]
    assert min(recorded_so_far) > 2

    machines.mend(2)
    resumed = by_srun(machines, tmp_path, "--resume", "run")
    assert [process.wait(240) for process in resumed] == [0, 0], [process.output() for process in resumed]
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    for number, before in enumerate(recorded_so_far):
        recorded, tracked = cpu_of(tmp_path, number), tracked_cpu_of(tmp_path, number)
        # A machine's last reading may come when the run's record is closed.
        assert before < len(tracked) <= len(recorded)
        assert tracked == recorded[: len(tracked)]


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed (make vllm)")
def test_two_machines_started_as_by_srun_train_with_a_server_on_a_third(
    machines: Machines, server: Path | None, tmp_path: Path
) -> None:
    assert server is not None
    url = f"http://{machines.address(3)}:8000"
    run = [*RUN, "train.max_steps=2", f"generator={{name: vllm-server, urls: ['{url}']}}"]
    launch = by_srun(machines, tmp_path, *run, **TOKEN)
    codes = [process.wait(400) for process in launch]
    assert codes == [0, 0], [*(process.output() for process in launch), server.read_text()]
    assert steps_of(tmp_path) == [1, 2]
    assert "serving " in server.read_text()
