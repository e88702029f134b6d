"""A run on a disk that is full for a while, and again at its end: what can be kept is kept, and all is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyarrow import parquet
from support.patience import patient

REWARD = """
import os

FILLER = os.path.join(os.environ["DISK"], "filler")


def fill(completions, trainer_state, **columns):
    step = trainer_state.global_step + 1
    if "FILLS" in os.environ and step in (3, 8):
        with open(FILLER, "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError:
                pass
    if step == 6 and os.path.exists(FILLER):
        os.unlink(FILLER)
    return [float(len(completion)) for completion in completions]
"""
"""Fills the disk in step 3, makes room in step 6, and fills it again in step 8, the last."""

SCRIPT = """
mount -t tmpfs -o size=40m tmpfs "$DISK" || exit 99
FILLS=1 "$@" 2> full.txt
echo $? > full.code
cp -r "$DISK/run" full
rm "$DISK/filler"
"$PYTHON" -m grpox train --resume "$DISK/run" 2> resumed.txt
echo $? > resumed.code
cp -r "$DISK/run" resumed
"""


def _namespace() -> list[str]:
    """Return the command that gives another command its own mounts; skip if this machine has none."""
    for command in (["unshare", "--map-root-user", "--mount"], ["unshare", "--mount"]):
        probe = [*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        try:
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                return command
        except FileNotFoundError:
            break
    pytest.skip("a file system of a few MB cannot be mounted here")


@dataclass
class Ending:
    """The end of a run."""

    code: int
    stderr: str
    folder: Path

    @property
    def steps(self) -> list[int]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [told["step"] for told in map(json.loads, lines) if "metrics" in told]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ending]:
    """A run whose disk was full, and the same resumed when there was room again."""
    namespace, folder = _namespace(), tmp_path_factory.mktemp("full")
    disk = folder / "disk"
    disk.mkdir()
    (folder / "rewards.py").write_text(REWARD)
    overrides = "train.max_steps=8 train.per_device_train_batch_size=32 checkpoint.every=2 evaluation=null"
    overrides += f" tracking={{}} logging.completions_every=0 output_dir={disk}/run"
    train = [sys.executable, "-m", "grpox", "train", "quickstart", *overrides.split()]
    done = subprocess.run(
        [*namespace, "sh", "-c", SCRIPT, "sh", *train, "rewards=[{path: rewards.py:fill}]"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "DISK": str(disk), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=patient(240),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        name: Ending(
            int((folder / f"{name}.code").read_text()), (folder / f"{name}.txt").read_text(), folder / name
        )
        for name in ("full", "resumed")
    }


def test_what_does_not_fit_is_told_once_with_its_place_and_the_room_there(runs: dict[str, Ending]) -> None:
    stderr = runs["full"].stderr
    assert "Traceback" not in stderr
    for told in (
        "grpox_step_finished",
        "completions are not saved",
        "after step 4 could not be saved",
    ):
        [line] = [line for line in stderr.splitlines() if told in line]
        assert "No space left on device" in line
    assert "free)" in stderr


def test_every_value_is_in_metrics_once_there_is_room_again(runs: dict[str, Ending]) -> None:
    assert runs["full"].steps[:7] == [1, 2, 3, 4, 5, 6, 7]  # each line whole: all of them were read
    assert runs["resumed"].steps == [1, 2, 3, 4, 5, 6, 7, 8]


def test_completions_are_whole_files_and_those_that_did_not_fit_are_counted(runs: dict[str, Ending]) -> None:
    files = sorted((runs["full"].folder / "completions").iterdir())
    assert [path.name for path in files] == [f"step_{step:06d}.parquet" for step in (1, 2, 6, 7)]
    assert all(parquet.read_table(path).num_rows == 32 for path in files)
    lines = (runs["full"].folder / "metrics.jsonl").read_text().splitlines()
    # Three files of completions, and at least one line of metrics.
    assert json.loads(lines[5])["metrics"]["observers/failures"] >= 4


def test_a_model_that_does_not_fit_ends_the_run_with_a_checkpoint_to_go_on_from(
    runs: dict[str, Ending],
) -> None:
    run = runs["full"]
    assert run.code == 1
    assert "error: the model is not saved" in run.stderr
    assert "about 2.0 MiB needed" in run.stderr
    assert "checkpoints/step-00000006: grpox train --resume" in run.stderr
    assert not (run.folder / "model").exists()


def test_the_run_goes_on_from_there_to_its_end(runs: dict[str, Ending]) -> None:
    run = runs["resumed"]
    assert run.code == 0, run.stderr
    assert (run.folder / "model" / "model.safetensors").stat().st_size > 2_000_000
    assert json.loads((run.folder / "summary.json").read_text())["steps"] == 8
    assert not list(run.folder.rglob("*unfinished*"))
