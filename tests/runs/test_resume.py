"""A run that was killed goes on from its checkpoint as if nothing had happened: bit by bit the same."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import time
from importlib import util
from pathlib import Path

import pytest
from mlflow import MlflowClient
from support.killing import assert_same, finish, kill, start, wait_for_steps
from support.run_files import metrics_of, summary_of
from typer.testing import CliRunner

from grpox.cli.app import app
from grpox.runtime.run_lock import hold

NO_VLLM = util.find_spec("vllm") is None

RICH = (
    "train.per_device_train_batch_size=16 train.gradient_accumulation_steps=2 train.steps_per_generation=4 "
    "train.num_iterations=2 train.beta=0.04 train.sync_ref_model=true train.ref_sync_steps=2 "
    "evaluation.every=3 checkpoint.background=true"
)
"""Rollouts that outlive a step, a reference that moves, evaluations between steps, a thread that writes."""
DYNAMIC = (
    "train.per_device_train_batch_size=64 train.gradient_accumulation_steps=1 train.steps_per_generation=2 "
    "train.dynamic_sampling_rounds=2 train.entropy_coef=0.001 train.top_entropy_quantile=0.5 "
    "train.adaptive_entropy.target=0.14 train.adaptive_entropy.delta=0.0005 "
    "train.off_policy_mask_threshold=0.01 evaluation=null"
)
"""Prompts whose order depends on what was sampled, and steps of which not all tokens are."""


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, RICH.split()),
        (1, DYNAMIC.split()),
        (2, ["train.per_device_train_batch_size=16", "train.steps_per_generation=4", "evaluation=null"]),
        pytest.param(
            1,
            ["generator={name: vllm-colocate, kv_cache_gib: 0.1}", "evaluation=null"],
            marks=pytest.mark.skipif(NO_VLLM, reason="vLLM is not installed (make vllm)"),
        ),
    ],
    ids=["hf", "dynamic sampling", "two ranks", "vllm-colocate"],
)
def test_a_run_killed_at_a_random_moment_is_resumed_bit_by_bit(
    tmp_path: Path, ranks: int, settings: list[str]
) -> None:
    overrides = [*settings, "train.max_steps=8", "checkpoint.every=2", "tracking={}"]
    whole, killed = tmp_path / "runs" / "whole", tmp_path / "runs" / "killed"
    vllm = "vllm" in settings[0]
    finish(tmp_path, "quickstart", *overrides, "output_dir=runs/whole", ranks=ranks, vllm=vllm)
    seed = int(os.environ.get("GRPOX_TESTS_SEED", random.randrange(2**32)))
    print(f"killed at the moment of GRPOX_TESTS_SEED={seed}")
    chance = random.Random(seed)
    process = start(tmp_path, "quickstart", *overrides, "output_dir=runs/killed", ranks=ranks, vllm=vllm)
    assert wait_for_steps(process, killed, chance.randrange(4, 7))
    time.sleep(chance.uniform(0, 1) * _shortest_step(killed))  # of two or more to come
    kill(process)
    assert not (killed / "summary.json").exists()

    finish(tmp_path, "--resume", "runs/killed", ranks=ranks, vllm=vllm)
    assert (killed / "metrics.undone.jsonl").exists()  # it did go on
    assert_same(whole, killed)


def _shortest_step(run: Path) -> float:
    """Seconds."""
    return float(min(step["step_time"] for step in metrics_of(run)))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a run in runs/stopped that SIGTERM ended before its first checkpoint was due."""
    folder = tmp_path_factory.mktemp("stopped")
    process = start(folder, "quickstart", "train.max_steps=6", "evaluation=null", "output_dir=runs/stopped")
    assert wait_for_steps(process, folder / "runs" / "stopped", 2)
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate()[1]
    assert process.returncode == 143, stderr
    assert "with a checkpoint" in stderr
    return folder


def test_a_signal_leaves_a_checkpoint(stopped: Path) -> None:
    [checkpoint] = (stopped / "runs" / "stopped" / "checkpoints").iterdir()
    steps = (stopped / "runs" / "stopped" / "metrics.jsonl").read_text().count('"metrics"')
    assert checkpoint.name == f"step-{steps:08d}"
    assert 2 <= steps < 6


LATE = """\
import os, signal
from grpox import hookimpl

class Signal:
    @hookimpl
    def grpox_rollouts_scored(self, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_signal_during_the_last_step_leaves_a_complete_run(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    tracking = "tracking={mlflow: {}, late: {path: 'late.py:Signal'}}"
    settings = ("train.max_steps=2", "evaluation=null", "checkpoint.every=0", tracking, "output_dir=run")
    stderr = finish(tmp_path, "quickstart", *settings, code=143)
    assert stderr.splitlines()[-1].startswith("look at: ")
    run = tmp_path / "run"
    assert summary_of(run)["steps"] == 2
    assert (run / "model" / "config.json").exists()
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    [tracked] = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert tracked.info.status == "FINISHED"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--resume", "runs/stoped"], "runs/stopped"),
        (["--resume", "runs/stopped", "train.num_generations=8"], "train.num_generations"),
    ],
)
def test_what_cannot_be_resumed_is_told(stopped: Path, arguments: list[str], told: str) -> None:
    stderr = finish(stopped, *arguments, code=2)
    assert told in stderr
    assert "Traceback" not in stderr
    assert "to go on" not in stderr


def test_the_mlflow_run_is_taken_over_and_no_value_comes_twice(stopped: Path) -> None:
    finish(stopped, "--resume", "runs/stopped")
    client = MlflowClient(f"sqlite:///{stopped}/mlflow.db")
    [run] = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert run.info.status == "FINISHED"
    for name in ("reward", "loss", "grad_norm"):
        history = client.get_metric_history(run.info.run_id, name)
        lines = (stopped / "runs" / "stopped" / "metrics.jsonl").read_text().splitlines()
        recorded = [(told["step"], told["metrics"][name]) for told in map(json.loads, lines)]
        assert [(metric.step, metric.value) for metric in history] == recorded
        assert len(recorded) == 6


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a run in runs/a that has ended, with checkpoints after steps 3 and 4."""
    folder = tmp_path_factory.mktemp("finished")
    settings = ("train.max_steps=4", "checkpoint.every=3", "evaluation=null", "tracking={}")
    finish(folder, "quickstart", *settings, "output_dir=runs/a")
    names = ["step-00000003", "step-00000004"]
    assert sorted(path.name for path in (folder / "runs" / "a" / "checkpoints").iterdir()) == names
    assert not (folder / "runs" / "a" / "run.lock").exists()
    return folder


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    newest = tmp_path / "runs" / "a" / "checkpoints" / "step-00000004"
    [weights] = newest.glob("engine/*optim_states.pt")
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    (tmp_path / "runs" / "a" / "summary.json").unlink()
    stderr = finish(tmp_path, "--resume", "runs/a")
    assert "step-00000004 is damaged" in stderr
    assert weights.name in stderr
    assert (tmp_path / "runs" / "a" / "metrics.undone.jsonl").read_text().count('"metrics"') == 1


def test_a_finished_run_says_so(finished: Path) -> None:
    before = (finished / "runs" / "a" / "summary.json").read_text()
    finish(finished, "--resume", "runs/a")
    assert (finished / "runs" / "a" / "summary.json").read_text() == before
    assert not (finished / "runs" / "a" / "earlier").exists()


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Return every file below a folder with its size and time of change."""
    found = {path: path.stat() for path in sorted(folder.rglob("*"))}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in found.items() if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [(["quickstart", "output_dir=runs/a", "tracking={mlflow: {}}"], 2), (["--resume", "runs/a"], 1)],
    ids=["a second run", "one that resumes"],
)
def test_a_folder_in_which_a_run_goes_on_is_refused_and_read(
    finished: Path, arguments: list[str], ranks: int
) -> None:
    folder = finished / "runs" / "a"
    with hold(folder):
        before = files_in(finished)
        process = start(finished, *arguments, ranks=ranks)
        stderr = process.communicate()[1]
        assert process.returncode != 0
        assert f"is in use by process {os.getpid()} on {socket.gethostname()}" in stderr
        assert "Traceback" not in stderr
        assert "--resume" not in stderr
        assert files_in(finished) == before
        if ranks == 1:
            assert CliRunner().invoke(app, ["report", str(folder)]).exit_code == 0


def test_a_run_without_a_checkpoint_is_resumed_by_auto_alone(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "runs" / "a"
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    before = files_in(run)
    stderr = finish(tmp_path, "--resume", "runs/a", code=2)
    assert "--resume: holds no checkpoint to go on from" in stderr
    assert files_in(run) == before
    finish(tmp_path, str(run / "config.yaml"), "--resume", "auto", "checkpoint.every=0")
    assert (run / "metrics.jsonl").read_text().count('"metrics"') == 4
