"""Every socket on which a run listens is on loopback: no other machine reaches it."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
import time
from importlib import util
from pathlib import Path

import psutil
import pytest
from support import processes
from support.vllm_serving import Served

MODEL = Path(__file__).parents[2] / "grpox" / "recipes" / "quickstart" / "model"
TRAIN = "grpox train quickstart train.max_steps=2 train.per_device_train_batch_size=32 evaluation=null"
TORCHRUN = "torch.distributed.run --rdzv-backend=c10d --rdzv-conf=store_type=file --local-addr=127.0.0.1"
DEEPSPEED = "deepspeed.launcher.runner --num_accelerators=2"


def listening(pid: int) -> set[str]:
    """The addresses on which a process and all below it listen now, by TCP or UDP."""
    found = set()
    try:
        everyone = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return set()
    for process in everyone:
        try:
            sockets = process.net_connections("inet")
        except psutil.Error:  # it has ended
            continue
        for each in sockets:
            if each.laddr and (each.status == psutil.CONN_LISTEN or (each.status == "NONE" and not each.raddr)):
                found.add(each.laddr.ip)
    return found


def addresses_of_run(folder: Path, module: str, **environment: str) -> set[str]:
    """The addresses on which any process of `python -m <module>` listened until it ended."""
    words = [*module.split(), "tracking={}", "output_dir=run"]
    process = processes.start("-m", *words, cwd=folder, env={"DS_ACCELERATOR": "cpu", **environment}, cold=True)
    found: set[str] = set()
    while process.poll() is None:
        found |= listening(process.pid)
        time.sleep(0.02)
    assert process.returncode == 0, process.output()[1]
    return found


def beyond_loopback(addresses: set[str]) -> set[str]:
    return {address for address in addresses if not ipaddress.ip_address(address).is_loopback}


def test_a_socket_on_all_interfaces_is_found() -> None:
    command = "import socket, time; s = socket.create_server(('', 0)); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = listening(process.pid)
        process.kill()
    assert beyond_loopback(found) == {"0.0.0.0"}


def test_a_run_of_one_rank_listens_on_loopback_alone(tmp_path: Path) -> None:
    found = addresses_of_run(tmp_path, TRAIN)
    assert found  # gloo does listen
    assert beyond_loopback(found) == set()


def test_two_ranks_by_the_documented_torchrun_command_listen_on_loopback_alone(tmp_path: Path) -> None:
    command = f"{TORCHRUN} --nproc-per-node=2 -m {TRAIN}"
    found = addresses_of_run(tmp_path, command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert found
    assert beyond_loopback(found) == set()
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text().replace("\\\n", " ")
    documented = TORCHRUN.replace("torch.distributed.run", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun")
    assert documented in " ".join(page.split())


def test_two_ranks_by_the_deepspeed_launcher_listen_on_loopback_alone(tmp_path: Path) -> None:
    found = addresses_of_run(tmp_path, f"{DEEPSPEED} --module {TRAIN}")
    assert found
    assert beyond_loopback(found) == set()


@pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed (make vllm)")
def test_a_vllm_server_listens_on_loopback_alone() -> None:
    server = Served(str(MODEL), "--kv-cache-gib", "0.1")
    try:
        server.wait_until_ready()
        found = listening(server.pid)
    finally:
        server.stop()
    assert "127.0.0.1" in found
    assert beyond_loopback(found) == set()
