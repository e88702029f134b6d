"""The documented launchers start one and the same run, and it listens on loopback alone."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import processes
from support.listening import beyond_loopback, listening
from support.ports import free_port

TRAIN = "grpox train quickstart train.max_steps=2 train.warmup_steps=0 evaluation=null tracking={}"
TORCHRUN = "torch.distributed.run --rdzv-backend=c10d --rdzv-conf=store_type=file --local-addr=127.0.0.1"
DEEPSPEED = "deepspeed.launcher.runner --num_accelerators=2"


@dataclass
class Ran:
    """A run that has ended."""

    stdout: str
    metrics: list[dict[str, float]]
    """The values of each step."""
    addresses: set[str]
    """The addresses on which any of its processes listened."""


def run(folder: Path, module: str, rows: int, **environment: str) -> Ran:
    """``python -m MODULE``, watched until it ends, with so many rows a rank."""
    words = [*module.split(), f"train.per_device_train_batch_size={rows}", "output_dir=run"]
    process = processes.start("-m", *words, cwd=folder, env=environment)
    found: set[str] = set()
    while process.poll() is None:
        found |= listening(process.pid)
        time.sleep(0.1)
    stdout, stderr = process.output()
    assert process.returncode == 0, stderr
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return Ran(stdout, [line["metrics"] for line in lines if "metrics" in line], found)


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Two ranks by the documented command."""
    command = f"{TORCHRUN} --nproc-per-node=2 -m {TRAIN}"
    variables = {"DS_ACCELERATOR": "cpu", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return run(tmp_path_factory.mktemp("torchrun"), command, 32, **variables)


@pytest.fixture(scope="module")
def by_deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Two ranks."""
    command = f"{DEEPSPEED} --master_port={free_port()} --module {TRAIN}"
    return run(tmp_path_factory.mktemp("deepspeed"), command, 32, DS_ACCELERATOR="cpu")


def test_both_launchers_start_the_same_run(by_torchrun: Ran, by_deepspeed: Ran) -> None:
    for ran in (by_torchrun, by_deepspeed):
        assert "2 steps on 2 ranks" in ran.stdout
        assert len(ran.metrics) == 2
    for one, other in zip(by_deepspeed.metrics, by_torchrun.metrics, strict=True):
        for name in ("loss", "reward", "grad_norm", "entropy", "learning_rate"):
            assert one[name] == pytest.approx(other[name], rel=1e-6)
    assert by_torchrun.metrics[0]["loss"] != by_torchrun.metrics[1]["loss"]


def test_runs_listen_on_loopback_alone(tmp_path: Path, by_torchrun: Ran, by_deepspeed: Ran) -> None:
    for found in (run(tmp_path, TRAIN, 32).addresses, by_torchrun.addresses, by_deepspeed.addresses):
        assert found  # gloo does listen
        assert beyond_loopback(found) == set()
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text().replace("\\\n", " ")
    documented = TORCHRUN.replace("torch.distributed.run", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun")
    assert documented in " ".join(page.split())
