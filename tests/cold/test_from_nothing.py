"""From nothing to a trained loss of one's own with the command line alone: new, edit, install, check, train."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

LINE = "loss = -torch.min(ratio * inputs.advantages, clipped * inputs.advantages)"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter of its own, which sees what this one has installed."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv").glob("lib/*/site-packages"))
    (site / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    return python


def test_a_loss_is_made_checked_and_trained(python: Path, tmp_path: Path) -> None:
    def run(*arguments: str, status: int = 0) -> str:
        command = [str(python), "-m", *arguments]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | {"COLUMNS": "300", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    assert "grpox-mine" in run("grpox", "plugins", "new", "mine", "--kind", "loss")
    [module] = (tmp_path / "grpox-mine" / "src").glob("*/loss.py")
    run("pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", "grpox-mine")
    assert "failed" not in run("grpox", "plugins", "check", "mine").lower()

    source = module.read_text()
    assert LINE in source, source
    broken = LINE.replace("loss = -", "loss = -1 / inputs.token_mask.sum() * ")
    module.write_text(source.replace(LINE, broken))
    told = run("grpox", "plugins", "check", "mine", status=1)
    assert "FAILED" in told
    assert "return one number for each token" in told

    module.write_text(source.replace(LINE, "loss = -ratio / ratio.mean() * inputs.advantages"))
    told = run("grpox", "plugins", "check", "mine", status=1)  # it looks over the whole batch
    assert "by itself" in told

    module.write_text(source.replace(LINE, "loss = -clipped * inputs.advantages"))
    run("grpox", "plugins", "check", "mine")
    run("grpox", "train", "quickstart", "loss=mine", "train.max_steps=3", "evaluation=null")
    assert (tmp_path / "runs" / "quickstart" / "model" / "model.safetensors").exists()
