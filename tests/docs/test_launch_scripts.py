"""The scripts in examples/: what they have Slurm and torchrun start, seen by stand-ins for these commands."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.patience import patient

from grpox.runfile.load import load_run

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = [*EXAMPLES.glob("slurm/*.sbatch"), *EXAMPLES.glob("torchrun/*.sh")]
STAND_IN = """#!/usr/bin/env bash
printf '%s\\n' "$(basename "$0")" "$@" END >> "$CALLS/$$"
[[ " $* " != *" serve "* ]] || exec sleep 60
# The script ends the servers when the training has ended: not before each has told that it was started.
for _ in {1..3000}; do (($(ls "$CALLS" | wc -l) < ${EXPECT:-1})) || break; sleep 0.1; done
[[ " $* " != *" broken.yaml "* ]] || exit 7
"""
SCONTROL = """#!/usr/bin/env bash
[[ "$1 $2" == "show hostnames" ]] && printf '%s\\n' $3
"""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


def run(
    script: str, folder: Path, *arguments: str, calls: int = 1, **environment: str
) -> tuple[int, list[list[str]]]:
    """The script's exit code, and the `calls` commands that it started with their arguments, training last."""
    for name, text in {"srun": STAND_IN, "torchrun": STAND_IN, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    told = folder / "calls"
    told.mkdir()
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(told), "EXPECT": str(calls)}
    slurm = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        ["bash", str(EXAMPLES / script), *arguments],
        env=slurm | own | environment,
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert "unbound" not in done.stderr
    found = [file.read_text().splitlines()[:-1] for file in told.iterdir()]
    return done.returncode, sorted(found, key=lambda call: "train" in call)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_without_a_run_file_a_script_says_how_it_is_used(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(["bash", str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"{script.name} RUN.yaml" in done.stderr
    assert "set -euo pipefail" in script.read_text()


def test_servers_on_the_last_nodes_and_ranks_on_the_others(tmp_path: Path) -> None:
    nodes = {"SLURM_JOB_NODELIST": "a1 a2 a3 a4 a5", "SLURM_NTASKS_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "8"}
    script, more = "slurm/train_with_servers.sbatch", {"SERVER_NODES": "2", "PORT": "9000"}
    code, calls = run(script, tmp_path, "run.yaml", "train.max_steps=2", calls=3, **nodes, **more)
    assert (code, len(calls)) == (0, 3)
    *servers, train = calls
    for server, host in zip(sorted(servers, key=str), ("a4", "a5"), strict=True):
        assert {f"--nodelist={host}", "--ntasks=1"} <= set(server)
        serve = ["grpox", "serve", "run.yaml", "--host", host, "--port", "9000", "-tp", "8"]
        assert server[server.index("grpox") :] == serve
    assert {"--nodes=3", "--ntasks=24", "--nodelist=a1,a2,a3", "--kill-on-bad-exit=1"} <= set(train)
    urls = "[http://a4:9000,http://a5:9000]"
    generator = f"generator={{name: vllm-server, urls: {urls}, start_timeout: 1500}}"
    command = ["grpox", "train", "run.yaml", "--resume", "auto", generator, "train.max_steps=2"]
    assert train[train.index("grpox") :] == command


@pytest.mark.parametrize(("file", "nodes", "expected"), [("run.yaml", "a1", 2), ("broken.yaml", "a1 a2", 7)])
def test_a_job_without_a_node_to_train_on_and_one_whose_training_fails(
    tmp_path: Path, file: str, nodes: str, expected: int
) -> None:
    code, calls = run("slurm/train_with_servers.sbatch", tmp_path, file, SLURM_JOB_NODELIST=nodes)
    assert (code, bool(calls)) == (expected, expected == 7)


@pytest.mark.parametrize(
    ("script", "variables", "options"),
    [
        ("slurm/train.sbatch", {}, {"srun"}),
        (
            "slurm/torchrun.sbatch",
            {"SLURM_JOB_NODELIST": "a1 a2", "SLURM_JOB_ID": "100"},
            {"torchrun", "-m", "--nnodes=2", "--rdzv-endpoint=a1:16484", "--rdzv-id=100"},
        ),
        (
            "torchrun/node.sh",
            {"NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"},
            {"torchrun", "-m", "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500"},
        ),
    ],
)
def test_one_process_for_each_gpu(
    tmp_path: Path, script: str, variables: dict[str, str], options: set[str]
) -> None:
    code, [call] = run(script, tmp_path, "run.yaml", "train.max_steps=2", **variables)
    assert code == 0
    assert options <= set(call)
    assert call[-6:] == ["grpox", "train", "run.yaml", "--resume", "auto", "train.max_steps=2"]


def test_the_run_file_of_32b_fits_its_two_nodes() -> None:
    plan = load_run(EXAMPLES / "slurm" / "qwen2.5-32b.yaml", world_size=16).plan
    assert (plan.train_batch_size, plan.prompts_per_generation) == (512, 64)
