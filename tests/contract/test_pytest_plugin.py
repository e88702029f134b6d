"""The fixtures that a plugin's own tests find, and that they cost others nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.processes import run

OWN = """
import torch
from grpox.testing import LossConformance


class TestDapo(LossConformance):
    component = {"name": "dapo", "clip_high": 0.28}


class TestBroken(LossConformance):
    component = {"path": "BROKEN:MixesRows"}


def test_fixtures(grpox_component, grpox_loss_inputs, grpox_step_gradient):
    loss = grpox_component("loss", "grpo", clip_low=0.1)
    assert loss.per_token(grpox_loss_inputs).loss.shape == (2, 3)
    mask = torch.ones(1, 1, dtype=torch.bool)
    batch = {"logprobs": -mask.double(), "advantages": mask[0].double(), "token_mask": mask}
    _, [gradient] = grpox_step_gradient("grpo", [batch], max_completion_length=4)
    assert gradient.item() == -1
"""


def pytest_in(folder: Path, cold: bool = False) -> subprocess.CompletedProcess[str]:
    return run("-m", "pytest", "-q", "-p", "no:cacheprovider", folder, cwd=folder, cold=cold)


def test_a_suite_is_two_lines_and_says_what_is_wrong(tmp_path: Path) -> None:
    broken = Path(__file__).with_name("broken_losses.py")
    (tmp_path / "test_own.py").write_text(OWN.replace("BROKEN", str(broken)))
    done = pytest_in(tmp_path)
    assert done.returncode == 1, done.stdout
    assert "test_own.py::TestBroken::test_rows_are_independent" in done.stdout
    assert "return one number for each token" in done.stdout
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert failures
    assert all("TestBroken" in line for line in failures)


def test_pytest_without_its_fixtures_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text(
        "import sys\ndef test_light():\n"
        "    assert 'grpox.testing.pytest_plugin' in sys.modules\n    assert 'torch' not in sys.modules\n"
    )
    done = pytest_in(tmp_path, cold=True)
    assert done.returncode == 0, done.stdout
