"""A run whose components of every kind have a state, which comes back on another number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from support.killing import finish

COMPONENTS = '''
import importlib.resources

import datasets
import torch
from grpox_advantages.scalers import Group, GroupConfig
from grpox_corrections.corrections import NoCorrection
from grpox_generators.hf import HfConfig, HfGenerator
from grpox_losses.losses import ClippedConfig, Dapo

from grpox import hookimpl


class Steps:
    """Counts the steps."""

    done = 0

    def begin_step(self, context):
        assert (self.done, context.total_steps) == (context.step - 1, 2), (type(self).__name__, context)

    def end_step(self, statistics):
        self.done += 1

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class Loss(Steps, Dapo):
    def __init__(self):
        Dapo.__init__(self, ClippedConfig())


class Advantage(Steps, Group):
    def __init__(self):
        Group.__init__(self, GroupConfig())


class Corrects(Steps, NoCorrection):
    pass


class Generator(Steps, HfGenerator):
    stateless = False

    def __init__(self):
        HfGenerator.__init__(self, HfConfig())


class Rewards(Steps):
    """In a process of its own."""

    statistics = {"length": "mean"}
    mean = 0.0

    def end_step(self, statistics):
        super().end_step(statistics)
        self.mean = statistics["length"]

    def state_dict(self):
        return {"done": self.done, "mean": self.mean}

    def load_state_dict(self, state):
        self.done, self.mean = state["done"], state["mean"]

    def __call__(self, *, completions, **columns):
        return [len(str(text)) / 10 for text in completions]


class Data(Steps):
    def load(self):
        folder = importlib.resources.files("grpox.runfile.recipes") / "quickstart"
        return datasets.Dataset.from_json(str(folder / "train.jsonl"))


class Optimizer(Steps):
    def build(self, parameters, learning_rate):
        return torch.optim.AdamW(parameters, lr=learning_rate)


class Scheduler(Steps):
    def build(self, optimizer, total_steps):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


class Tracks(Steps):
    @hookimpl
    def grpox_step_finished(self, step):
        pass
'''
SIZES = (
    *("train.per_device_train_batch_size=16", "train.gradient_accumulation_steps=1"),
    *("train.steps_per_generation=1", "train.max_steps=2", "checkpoint.every=1"),
)
ALL = (
    *("loss={path: parts.py:Loss}", "advantage={path: parts.py:Advantage}"),
    "correction={path: parts.py:Corrects}",
    *("generator={path: parts.py:Generator}", "rewards=[{path: parts.py:Rewards}]", "data.path=null"),
    *("data.source={path: parts.py:Data}", "train.optimizer={path: parts.py:Optimizer}"),
    *("train.scheduler={path: parts.py:Scheduler}", "tracking={tracks: {path: parts.py:Tracks}}"),
    *("evaluation.rewards=[{path: parts.py:Rewards, isolation: thread}]", "evaluation.accuracy=null"),
)
KEYS = (
    *("advantage", "correction", "data.source", "evaluation.rewards[0]", "generator", "loss", "rewards[0]"),
    *("tracking.tracks", "train.optimizer", "train.scheduler"),
)


def test_components_of_every_kind_keep_their_state(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(COMPONENTS)
    stderr = finish(tmp_path, "quickstart", *SIZES, *ALL, "output_dir=runs/a", ranks=2)
    assert "state_dict" not in stderr  # nothing is warned of
    run = tmp_path / "runs" / "a"
    saved = torch.load(run / "checkpoints" / "step-00000002" / "components.pt", weights_only=True)
    assert sorted(saved) == sorted(KEYS)
    assert {entry["state"]["done"] for entry in saved.values()} == {2}
    assert saved["rewards[0]"]["state"]["mean"] > 1
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    (run / "summary.json").unlink()
    # Each begin_step checks that its count goes on.
    finish(tmp_path, "--resume", "runs/a", "train.per_device_train_batch_size=32", ranks=1)
    saved = torch.load(run / "checkpoints" / "step-00000002" / "components.pt", weights_only=True)
    assert {entry["state"]["done"] for entry in saved.values()} == {2}
