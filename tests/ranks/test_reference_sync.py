"""The reference follows the policy under real ZeRO-3, shards and whole parameters alike."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpox.config import ModelConfig
from grpox.models import load_model

SCRIPT = Path(__file__).with_name("reference_sync_step.py")


@pytest.mark.parametrize(("ranks", "threshold"), [(1, 0), (2, 0), (2, 1_000_000)])
def test_the_reference_becomes_the_mixture_every_ref_sync_steps(tmp_path, ranks, threshold):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *launcher, str(SCRIPT), str(tmp_path / "out"), str(threshold)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = [torch.load(tmp_path / f"out.{rank}") for rank in range(ranks)]
    for result in results:
        before, after_one, after_two = result["reference"]
        for name, policy in result["policy"].items():
            assert torch.equal(after_one[name], before[name])
            torch.testing.assert_close(after_two[name], 0.25 * policy + 0.75 * before[name])
            assert torch.equal(after_two[name], results[0]["reference"][2][name])
    assert_forward_uses(results[0]["reference"][2], results[0]["logits"])


def assert_forward_uses(weights, logits):
    """The reference's next forward sees the mixture: that of a plain model with these weights."""
    import importlib.resources

    folder = importlib.resources.files("grpox.recipes") / "quickstart" / "model"
    model = load_model(ModelConfig(path=str(folder)))
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[3, 4, 5, 6]])).logits
    torch.testing.assert_close(logits, expected)
