"""Components with state and steps in whole runs: killed and resumed, they go on bit by bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.killing import assert_same, finish, kill, start, wait_for_steps

COMPONENTS = '''
import torch

from grpox.contracts import LossOutput, Reduction


class QuantileLoss:
    """Caps the ratio at a running quantile of the ratios of earlier steps."""

    reduction = Reduction.TOKEN_MEAN
    statistics = {"ratio": "gather", "above": "mean", "length": "max"}

    def __init__(self):
        self.cap, self.steps, self.longest = torch.tensor(1.0), 0, 0.0

    def per_token(self, inputs):
        ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
        loss = -torch.minimum(ratio, self.cap) * inputs.advantages
        return LossOutput(loss, {"above": (ratio > self.cap).float()})

    def end_step(self, statistics):
        self.cap = 0.5 * self.cap + 0.5 * statistics["ratio"].quantile(0.9)
        self.steps += 1
        self.longest = max(self.longest, statistics["length"])

    def state_dict(self):
        return {"cap": self.cap, "steps": self.steps, "longest": self.longest}

    def load_state_dict(self, state):
        self.cap, self.steps, self.longest = state["cap"], state["steps"], state["longest"]


class RunningStd:
    """Divides by a running standard deviation of the rewards of all batches."""

    def __init__(self):
        self.std = 1.0

    def scale(self, rewards, weights, group_ids):
        totals = (rewards * weights).nansum(dim=1)
        self.std = 0.9 * self.std + 0.1 * float(totals.std())
        groups = torch.stack([totals[group_ids == group].mean() for group in group_ids])
        return (totals - groups) / (self.std + 1e-4)

    def state_dict(self):
        return {"std": self.std}

    def load_state_dict(self, state):
        self.std = state["std"]


class CapSchedule:
    """Caps the importance weights at a bound that falls from 4 to 2 over the run."""

    stateless = True

    def begin_step(self, context):
        self.cap = 4 - 2 * context.step / context.total_steps

    def correct(self, old, sampler, mask):
        weights = torch.exp(old - sampler).clamp(max=self.cap)
        print(f"\\ncap {self.cap}\\n", end="", flush=True)  # one write: ranks share the file
        return weights, torch.ones_like(mask)


class Shorter:
    """Rewards completions that are shorter than the running mean of their lengths, in a process of its own."""

    statistics = {"length": "mean"}

    def __init__(self):
        self.mean = 8.0

    def __call__(self, *, completion_ids, **columns):
        return [float(len(ids) < self.mean) for ids in completion_ids]

    def end_step(self, statistics):
        self.mean = 0.5 * self.mean + 0.5 * statistics["length"]

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]
'''
REWARDS = "rewards=[{name: exact, column: answer}, {path: components.py:Shorter, weight: 0.1}]"
STEPS = ("train.max_steps=6", "checkpoint.every=2", "checkpoint.keep=9", "evaluation=null", "tracking={}")
ARGUMENTS = (
    *("quickstart", "loss={path: components.py:QuantileLoss}", "advantage={path: components.py:RunningStd}"),
    *("correction={path: components.py:CapSchedule}", REWARDS, *STEPS),
)
ONE = (
    "train.per_device_train_batch_size=32",
    "train.gradient_accumulation_steps=1",
    "train.steps_per_generation=2",
)
"""Batches that one rank or two can share."""
TWO = ("train.per_device_train_batch_size=16", *ONE[1:])


def states_in(run: Path, step: int) -> Any:
    return torch.load(run / "checkpoints" / f"step-{step:08d}" / "components.pt", weights_only=True)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """The folder of runs/whole and runs/killed, which was killed after a checkpoint; their ranks and output."""
    folder = tmp_path_factory.mktemp("states")
    (folder / "components.py").write_text(COMPONENTS)
    ranks = request.param
    arguments = (*ARGUMENTS, *(ONE if ranks == 1 else TWO))
    process = start(folder, *arguments, "output_dir=runs/whole", ranks=ranks)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert "state_dict" not in stderr  # nothing is warned of
    process = start(folder, *arguments, "output_dir=runs/killed", ranks=ranks)
    assert wait_for_steps(process, folder / "runs" / "killed", 4)
    kill(process)
    return folder, ranks, stdout


def test_a_killed_run_with_states_goes_on_bit_by_bit(runs: tuple[Path, int, str], tmp_path: Path) -> None:
    folder, ranks, _ = runs
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    finish(tmp_path, "--resume", "runs/killed", ranks=ranks)
    assert_same(tmp_path / "runs" / "whole", tmp_path / "runs" / "killed")
    whole, resumed = states_in(folder / "runs" / "whole", 6), states_in(tmp_path / "runs" / "killed", 6)
    assert whole == resumed
    assert sorted(whole) == ["advantage", "loss", "rewards[1]"]
    assert whole["loss"]["state"]["steps"] == 6
    assert whole["loss"]["state"]["longest"] > 1
    assert whole["loss"]["state"]["cap"] != 1.0
    assert whole["advantage"]["state"]["std"] != 1.0
    assert whole["rewards[1]"]["state"]["mean"] != 8.0


def test_a_schedule_follows_begin_step(runs: tuple[Path, int, str]) -> None:
    caps = [float(line.split()[1]) for line in runs[2].splitlines() if line.startswith("cap ")]
    assert list(dict.fromkeys(caps)) == [4 - 2 * step / 6 for step in range(1, 7)]
