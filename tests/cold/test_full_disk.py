"""A run on a disk that is full for a while, and again at its end: what can be kept is kept, and all is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


Ending = tuple[int, str, Path]
"""The exit code of a run, what it told, and its folder."""


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
        name: (int((folder / f"{name}.code").read_text()), (folder / f"{name}.txt").read_text(), folder / name)
        for name in ("full", "resumed")
    }


def metrics_of(folder: Path) -> dict[int, dict[str, float]]:
    """Read the metrics of each step, whose lines are all whole."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {told["step"]: told["metrics"] for told in lines if "metrics" in told}


def test_a_full_disk_is_told_once_and_what_fits_is_kept(runs: dict[str, Ending]) -> None:
    code, stderr, folder = runs["full"]
    assert "Traceback" not in stderr
    for told in ("grpox_step_finished", "completions are not saved", "after step 4 could not be saved"):
        [line] = [line for line in stderr.splitlines() if told in line]
        assert "No space left on device" in line
    assert "free)" in stderr
    metrics = metrics_of(folder)
    assert [*metrics][:7] == [1, 2, 3, 4, 5, 6, 7]
    # Three files of completions, and at least one line of metrics.
    assert metrics[6]["observers/failures"] >= 4
    files = sorted((folder / "completions").iterdir())
    assert [path.name for path in files] == [f"step_{step:06d}.parquet" for step in (1, 2, 6, 7)]
    assert all(parquet.read_table(path).num_rows == 32 for path in files)
    # The model does not fit, and ends the run with a checkpoint to go on from.
    assert code == 1
    for told in ("the model is not saved", "about 2.0 MiB needed", "step-00000006: grpox train --resume"):
        assert told in stderr
    assert not (folder / "model").exists()


def test_the_run_goes_on_from_there_to_its_end(runs: dict[str, Ending]) -> None:
    code, stderr, folder = runs["resumed"]
    assert code == 0, stderr
    assert [*metrics_of(folder)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (folder / "model" / "model.safetensors").stat().st_size > 2_000_000
    assert json.loads((folder / "summary.json").read_text())["steps"] == 8
    assert not list(folder.rglob("*unfinished*"))
