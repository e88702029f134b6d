"""Rules of resuming: the checkpoint that a run continues from, the checkpoints kept, the settings that must not
change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from grpox.checkpoint.export import checkpoint_model, export_checkpoint
from grpox.checkpoint.folders import checkpoints_in, folder_of, write_manifest
from grpox.checkpoint.progress import Progress
from grpox.checkpoint.resume import Checkpoint, check_changes, fingerprints
from grpox.checkpoint.saver import CheckpointSaver
from grpox.cli.train import run_to_resume
from grpox.config import CheckpointConfig
from grpox.errors import ConfigError
from grpox.runfile.given import MERGED
from grpox.runfile.load import ResolvedRun, load_run
from grpox.runfile.lock.of_run import lock_of
from grpox.runtime.world import World

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def run() -> ResolvedRun:
    return load_run("quickstart", ["evaluation=null"])


def progress_of(run: ResolvedRun, step: int = 3, **metrics: float) -> Progress:
    return Progress(
        step=step,
        world_size=1,
        num_tokens=0,
        seconds=0.0,
        evaluation_before={},
        metrics=metrics,
        metrics_bytes=0,
        config=run.config.model_dump(mode="json"),
        data=fingerprints(run.config),
        lock=lock_of(run),
    )


def save(output_dir: Path, progress: Progress) -> Path:
    """A checkpoint without an engine."""
    folder = folder_of(output_dir, progress.step)
    folder.mkdir(parents=True)
    progress.write(folder)
    write_manifest(folder)
    return folder


def test_progress_is_read_back_as_it_was(run: ResolvedRun, tmp_path: Path) -> None:
    progress = progress_of(run, 3, reward=0.5, odd=float("inf"))
    progress.write(tmp_path)
    assert Progress.read(tmp_path) == progress


def test_a_secret_that_an_older_version_has_kept_is_no_change(run: ResolvedRun, tmp_path: Path) -> None:
    model = run.config.model.model_copy(update={"init": {"hubToken": "hush"}})
    config = run.config.model_copy(update={"model": model})
    progress = progress_of(run).model_copy(update={"config": config.model_dump(mode="json")})
    check_changes(Checkpoint(tmp_path, progress), config, lock_of(run), {}, ALONE)


def test_a_merged_adapter_is_needed_to_go_on_and_no_file_has_it(tmp_path: Path) -> None:
    adapted = load_run("quickstart", ["evaluation=null", "model.lora={}"])
    progress = progress_of(adapted)
    lock = lock_of(adapted)
    own = progress.model_copy(update={"data": {**progress.data, MERGED: "one"}})
    same, other = {**progress.data, MERGED: "one"}, {**progress.data, MERGED: "two"}
    check_changes(Checkpoint(tmp_path, own), adapted.config, lock, same, ALONE)
    for before, now in ((own, other), (own, progress.data), (progress, same)):
        with pytest.raises(ConfigError) as caught:
            check_changes(Checkpoint(tmp_path, before), adapted.config, lock, now, ALONE)
        assert caught.value.problems[1].key == MERGED
    folder = save(tmp_path, own)
    with pytest.raises(ConfigError, match="no file has the merged weights"):
        export_checkpoint(folder, tmp_path / "out")
    with pytest.raises(ConfigError, match="no file has the merged weights"):
        checkpoint_model(folder, adapted.config.model)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"keep": 2}, [5, 4]),
        ({"keep": 1, "best": "reward"}, [5, 2]),
        ({"keep": 1, "best": "reward", "best_is": "lowest"}, [5, 1]),
        ({"keep": 1, "best": "reward", "best_is": "min"}, [5, 1]),
        ({"keep": 1, "best": "reward", "best_is": "max"}, [5, 2]),
        ({"keep": 1, "best": "unknown"}, [5]),
        ({"keep": 9}, [5, 4, 3, 2, 1]),
    ],
)
def test_the_newest_and_the_best_are_kept(
    run: ResolvedRun, tmp_path: Path, settings: dict[str, Any], kept: list[int]
) -> None:
    for step, reward in enumerate((0.1, 0.9, float("nan"), 0.5, 0.4), start=1):
        save(tmp_path, progress_of(run, step, reward=reward))
    saver: Any = object.__new__(CheckpointSaver)
    saver.config = CheckpointConfig(**settings)
    saver.context = type("Context", (), {"output_dir": tmp_path})
    save(tmp_path, progress_of(run, 9, reward=7.0))  # damaged, and so gone back behind
    saver._prune(5)
    assert folder_of(tmp_path, 9).exists()
    shutil.rmtree(folder_of(tmp_path, 9))
    assert [folder.name for folder in checkpoints_in(tmp_path)] == [f"step-{step:08d}" for step in kept]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a run in runs/mine."""
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("run_file", "overrides", "resume", "expected"),
    [
        (None, [], "runs/mine", ("runs/mine/config.yaml", ["output_dir=runs/mine"])),
        ("a.b=1", ["c=2"], "runs/mine", ("runs/mine/config.yaml", ["a.b=1", "c=2", "output_dir=runs/mine"])),
        ("run.yaml", ["c=2"], "runs/mine", ("run.yaml", ["c=2", "output_dir=runs/mine"])),
        ("run.yaml", ["c=2"], "auto", ("run.yaml", ["c=2"])),
    ],
)
def test_what_resume_goes_on_with(run_file: Any, overrides: Any, resume: str, expected: Any) -> None:
    assert run_to_resume(run_file, overrides, resume) == expected


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("run_file", "resume", "told"),
    [(None, "auto", "run file"), (None, "runs/mien", "runs/mine"), (None, "runs", "holds no run")],
)
def test_what_resume_cannot_go_on_with_is_told(run_file: Any, resume: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_to_resume(run_file, [], resume)
    assert told in "\n".join(map(str, caught.value.problems))
