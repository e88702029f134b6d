"""A run leaves its plugin lock, in its folder and in MLflow; ranks with other code are told at its start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from mlflow import MlflowClient
from support import processes
from support.ports import free_port

from grpox.runfile.lock.model import config_hash, read_lock
from grpox.runfile.yaml_lines import read_yaml

TWO_STEPS = ("train.max_steps=2", "train.warmup_steps=0", "evaluation=null")
TINY = """
from grpox import ComponentSpec, hookimpl
from grpox.contracts import LossInputs, LossOutput, Reduction

class Tiny:
    reduction = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(-(inputs.logprobs - inputs.old_logprobs).exp() * inputs.advantages)

@hookimpl
def grpox_losses():
    return [ComponentSpec("tiny", "grpox_tiny:Tiny")]
"""


@pytest.fixture(scope="module")
def output(grpox, folder):
    (folder / "mine.py").write_text("def even(completions, **kwargs):\n    return [0.5 for _ in completions]\n")
    rewards = "rewards=[exact, {path: 'mine.py:even', weight: 0}]"
    done = grpox("train", "quickstart", *TWO_STEPS, rewards, "output_dir=runs/first")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "runs" / "first"


def test_the_lock_in_the_runs_folder_names_what_ran(output, folder):
    lock = read_lock(output)
    assert lock.components["loss"].target == "grpox_losses.losses:Dapo"
    even = lock.components["rewards[1]"]
    assert (even.given, even.target) == ("path", f"{folder.resolve()}/mine.py:even")
    written = read_yaml((output / "config.yaml").read_text(), "config.yaml").data
    assert lock.config == config_hash(written)


def test_mlflow_has_the_lock_as_artifact_and_tags(output, folder, tmp_path):
    lock = read_lock(output)
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("grpox-quickstart")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.tags["grpox.lock"] == lock.digest[:12]
    assert run.data.tags["plugin.grpox"] == lock.distributions["grpox"].version
    stored = client.download_artifacts(run.info.run_id, "plugins.lock.json", str(tmp_path))
    assert Path(stored).read_bytes() == (output / "plugins.lock.json").read_bytes()


def install(site: Path, version: str) -> Path:
    """A folder with the distribution grpox-tiny, as pip would install it."""
    info = site / f"grpox_tiny-{version}.dist-info"
    info.mkdir(parents=True)
    (site / "grpox_tiny.py").write_text(TINY)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: grpox-tiny\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[grpox]\ntiny = grpox_tiny\n")
    (info / "RECORD").write_text(f"grpox_tiny.py,,\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
    return site


IN_SITE = """
import sys
sys.path.insert(1, {site!r})
from grpox.cli import script
sys.argv[0] = "grpox"
script()
"""
"""`python -m grpox`, with a folder in PYTHONPATH."""


def start_ranks(folder: Path, sites: list[Path], *arguments: str) -> list[tuple[int, str, str]]:
    """`grpox` with one rank for each of `sites`, as on machines of their own; exit code and output of each."""
    shared = {"WORLD_SIZE": str(len(sites)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank, site in enumerate(sites):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        script = folder / f"rank-{rank}-of-{site.parent.name}.py"
        script.write_text(IN_SITE.format(site=str(site)))
        ranks.append(processes.start(script, *arguments, cwd=folder, env=shared | place))
    outputs = [rank.communicate() for rank in ranks]
    return [(rank.wait(), *output) for rank, output in zip(ranks, outputs, strict=True)]


def test_a_rank_with_another_version_of_a_plugin_is_named_before_anything_starts(folder, tmp_path):
    sites = [install(tmp_path / "a", "1.0"), install(tmp_path / "b", "2.0")]
    arguments = ["train", "quickstart", *TWO_STEPS, "loss=tiny", "tracking={}", "output_dir=runs/mixed"]
    arguments += ["train.per_device_train_batch_size=32"]
    (code, _, told), (other_code, _, other_told) = start_ranks(folder, sites, *arguments)
    assert (code, other_code) == (2, 2), told + other_told
    host = socket.gethostname()
    expected = f"rank 1 ({host}): grpox-tiny version differs from rank 0 ({host})"
    assert expected in told
    lines = [line.split() for line in told.splitlines()]
    assert ["given", "2.0"] in lines
    assert ["allowed", "1.0"] in lines
    assert "Traceback" not in told + other_told
    assert not (folder / "runs" / "mixed").exists()
