"""Evaluations of a real run: they change nothing, end it where they should, and `grpox eval` finds the same."""

from __future__ import annotations

import importlib.resources
import json
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file
from support.fixtures import GrpoxCommand
from support.frozen import frozen_in
from support.killing import assert_same, finish, kill_and_resume, recorded
from support.run_files import summary_of

NO_VLLM = util.find_spec("vllm") is None
COMMON = ("train.per_device_train_batch_size=64", "tracking={}")
SAMPLED = ("evaluation.num_generations=2", "evaluation.temperature=1", "evaluation.pass_at_k=[1, 2]")
STOPS = "evaluation.early_stop={metric: completions/max_length, min_delta: 10, patience: 3}"
"""No completion is ten tokens longer than four: the third evaluation after the first ends the run."""
STOPPING = (*COMMON, *SAMPLED, STOPS, "evaluation.every=1", "checkpoint.every=2", "checkpoint.best=reward")


@pytest.fixture(scope="module")
def stopped(folder: Path) -> Path:
    """The folder of a run that stopped early."""
    finish(folder, "quickstart", *STOPPING, "output_dir=runs/stopped")
    return folder / "runs" / "stopped"


def test_a_run_without_a_gain_ends_in_order(stopped: Path) -> None:
    summary = summary_of(stopped)
    assert (summary["steps"], summary["stopped_early"]["evaluations_without_gain"]) == (3, 3)
    assert summary["accuracy_after"] == recorded(stopped)[-1]["evaluation"]["accuracy"]
    assert (stopped / "model" / "model.safetensors").exists()
    shown = frozen_in((stopped / "report.html").read_text())["answers"]["run"][stopped.name]
    assert shown["stopped_early"].startswith("after step 3")
    # Every second step has a checkpoint, and with checkpoint.best the last one too.
    saved = [path.name for path in sorted((stopped / "checkpoints").iterdir())]
    assert saved == ["step-00000002", "step-00000003"]
    assert Path(summary["best_checkpoint"]["checkpoint"]).name in saved


def test_evaluations_leave_no_trace_in_training(folder: Path, stopped: Path) -> None:
    finish(folder, "quickstart", *COMMON, "train.max_steps=3", "evaluation=null", "output_dir=runs/plain")
    plain = folder / "runs" / "plain"
    assert recorded(plain) == [told for told in recorded(stopped) if "metrics" in told]
    for name in sorted(path.name for path in (plain / "completions").iterdir()):
        tables = [parquet.read_table(run / "completions" / name) for run in (plain, stopped)]
        assert tables[0].equals(tables[1]), name
    weights = [load_file(run / "model" / "model.safetensors") for run in (plain, stopped)]
    assert [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])] == []


def test_a_killed_run_stops_at_the_same_step(folder: Path, stopped: Path) -> None:
    killed = kill_and_resume(folder, "quickstart", *STOPPING, "checkpoint.every=1", steps=3)
    assert_same(stopped, killed)
    assert summary_of(killed)["stopped_early"] == summary_of(stopped)["stopped_early"]
    assert ": the run is complete, " in finish(folder, "--resume", "runs/killed")


def evaluated(
    grpox: GrpoxCommand, folder: Path, *arguments: str, ranks: int = 1, vllm: bool = False
) -> dict[str, float]:
    done = grpox("eval", *arguments, "--out", "figures.json", ranks=ranks, vllm=vllm)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    assert figures["ranks"] == ranks
    assert f"accuracy │ {figures['metrics']['accuracy']:.4g}" in " ".join(done.stdout.split())
    metrics: dict[str, float] = figures["metrics"]
    return metrics


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_by_itself_is_evaluated_as_before_training(
    grpox: GrpoxCommand, folder: Path, stopped: Path, ranks: int
) -> None:
    base = importlib.resources.files("grpox.runfile.recipes") / "quickstart" / "model"
    # Batches of other sizes on each number of ranks: chance is the prompts' own.
    size = f"evaluation.batch_size={100 * ranks}"
    completions = ("--completions", "completions.parquet")
    found = evaluated(grpox, folder, str(base), "quickstart", *SAMPLED, size, *completions, ranks=ranks)
    assert found == recorded(stopped)[0]["evaluation"]
    table = parquet.read_table(folder / "completions.parquet")
    assert table.column("group").to_pylist() == [row // 2 for row in range(1000)]
    assert sum(table.column("rewards/exact").to_pylist()) / 1000 == found["accuracy"]


@pytest.fixture(scope="module")
def of_run(grpox: GrpoxCommand, folder: Path, stopped: Path) -> dict[str, float]:
    """The metrics of the run's model."""
    return evaluated(grpox, folder, str(stopped), "quickstart")


def test_a_run_its_folder_and_its_last_checkpoint_are_alike(
    grpox: GrpoxCommand, folder: Path, stopped: Path, of_run: dict[str, float]
) -> None:
    """The run's own evaluation samples; here it decodes greedily, as the quickstart's."""
    last = str(stopped / "checkpoints" / "step-00000003")
    assert evaluated(grpox, folder, last, "quickstart") == of_run
    greedy = ("evaluation.num_generations=1", "evaluation.temperature=0", "evaluation.pass_at_k=[]")
    assert evaluated(grpox, folder, str(stopped), *greedy) == of_run


@pytest.mark.skipif(NO_VLLM, reason="vLLM is not installed (make vllm)")
def test_vllm_on_two_ranks_finds_what_transformers_finds(
    grpox: GrpoxCommand, folder: Path, stopped: Path, of_run: dict[str, float]
) -> None:
    settings = "generator={name: vllm-colocate, kv_cache_gib: 0.1}"
    found = evaluated(grpox, folder, str(stopped), "quickstart", settings, ranks=2, vllm=True)
    assert found["accuracy"] == pytest.approx(of_run["accuracy"], abs=0.02)


def test_sets_of_a_run_end_it_and_choose_the_checkpoint(grpox: GrpoxCommand, folder: Path) -> None:
    """A stream and a file: the metrics of one set end the run; `grpox eval` finds the same."""
    base = importlib.resources.files("grpox.runfile.recipes") / "quickstart"
    sets = (
        "evaluation.path=null",
        f"evaluation.sets.stream={{path: '{base / 'heldout.jsonl'}', streaming: true, rows: 60}}",
        f"evaluation.sets.part={{path: '{base / 'heldout.jsonl'}', split: 'train[60:100]'}}",
    )
    stop = "evaluation.early_stop={metric: stream/completions/max_length, min_delta: 10}"
    best = ("checkpoint.every=1", "checkpoint.best=evaluation/part/accuracy")
    finish(folder, "quickstart", *COMMON, *sets, stop, *best, "evaluation.every=1", "output_dir=runs/sets")
    run = folder / "runs" / "sets"
    summary, first = summary_of(run), recorded(run)[0]["evaluation"]
    assert summary["steps"] == 1
    assert summary["best_checkpoint"]["metric"] == "evaluation/part/accuracy"
    assert first["accuracy"] == pytest.approx(0.6 * first["stream/accuracy"] + 0.4 * first["part/accuracy"])
    assert evaluated(grpox, folder, str(base / "model"), "quickstart", *sets) == first
