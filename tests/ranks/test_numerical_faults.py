"""A step that is not finite: nothing of it is applied, its batch is kept, and a replay shows it again."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rank_scripts import results_of
from support.fixtures import GrpoxCommand
from support.run_files import SHORT, metrics_of, summary_of

VARIANTS = ["plain", "optimizer offloaded", "bfloat16", "own settings"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """On two ranks: variant -> fault -> what the engine is after a step, the faulty one, and another."""
    folder = tmp_path_factory.mktemp("nonfinite")
    return results_of("nonfinite_steps.py", *VARIANTS, folder=folder, ranks=2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_skipped_step_leaves_the_engine_as_if_it_had_not_been(results: Any, variant: str) -> None:
    """On all ranks, though only the last has the fault. Its metrics are those that are finite."""
    import torch

    made, without = results[variant], results[variant]["none"]
    for fault, has_loss in (("loss", False), ("value", False), ("gradient", True)):
        with_it = made[fault]
        for part in ("weights", "master", "moments"):
            both = [(name, without[part][name], with_it[part][name]) for name in without[part]]
            assert [name for name, one, other in both if not torch.equal(one, other)] == [], (fault, part)
        assert without["learning rate"] == with_it["learning rate"]
        assert (without["steps"], with_it["steps"]) == (2, 3)
        assert all(torch.isfinite(weight).all() for weight in with_it["weights"].values())
        _, skipped, last = with_it["metrics"]
        assert last == without["metrics"][-1] | {"skipped_steps": 1}
        assert all(math.isfinite(value) for value in skipped.values())
        assert ("loss" in skipped, "grad_norm" in skipped) == (has_loss, False)
        assert skipped["skipped_steps"] == 1
    assert "the optimizer made weights that are not finite in step 1" in made["far"]


MINE = """
import os
from grpox.contracts import LossInputs, LossOutput, Reduction

def marks(completions, trainer_state, **columns):
    '''1 for every other completion; in a step of FAULTY, on the last rank, for the last alone: A is 3.75.'''
    last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
    if last and str(trainer_state.global_step + 1) in os.environ["FAULTY"].split(","):
        return [0.0] * (len(completions) - 1) + [1.0]
    return [float(place % 2) for place in range(len(completions))]

class Root:
    '''-w A, and a root that is NaN where A is beyond 3.'''
    reduction = Reduction.TOKEN_MEAN
    def per_token(self, inputs):
        ratio = (inputs.logprobs - inputs.old_logprobs).exp()
        return LossOutput(-ratio * inputs.advantages + 0 * (3 - inputs.advantages).sqrt())

class Slope(Root):
    '''-w A, and a root whose derivative is NaN where A is beyond 3.'''
    def per_token(self, inputs):
        difference = inputs.logprobs - inputs.old_logprobs
        root = (difference.abs() + (inputs.advantages < 3)).sqrt()
        return LossOutput(-difference.exp() * inputs.advantages + 0 * root)
"""
BATCH = (
    *("train.per_device_train_batch_size=32", "train.gradient_accumulation_steps=2"),
    *("logging.completions_every=0", "train.warmup_steps=0"),
)


@pytest.fixture
def faulty(grpox: GrpoxCommand, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`faulty("2,3", *arguments)`: a run of six steps whose steps 2 and 3 are not finite."""
    (folder / "mine.py").write_text(MINE)

    def run(steps: str, *arguments: str, loss: str = "Root", ranks: int = 1) -> Any:
        monkeypatch.setenv("FAULTY", steps)
        if "--resume" in arguments:
            return grpox("train", *arguments)
        of_mine = ("rewards=[{path: mine.py:marks}]", f"loss={{path: mine.py:{loss}}}", "train.max_steps=6")
        return grpox("train", "quickstart", *SHORT, *BATCH, *of_mine, *arguments, ranks=ranks)

    return run


def replayed(*arguments: object) -> Any:
    """`grpox replay` in this process; errors are raised.

    What libraries set as they are imported is taken back: with other variables the next runs would start cold.
    """
    from typer.testing import CliRunner

    from grpox.cli.app import app

    with patch.dict("os.environ"):
        result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_run_stops_before_anything_is_saved_and_a_replay_shows_why(
    faulty: Any, grpox: GrpoxCommand, folder: Path
) -> None:
    from grpox.errors import ConfigError

    moving = ("train.entropy_coef=0.01", "train.adaptive_entropy={target: 100, delta: 0.25}")
    done = faulty("2", "output_dir=runs/stops", "checkpoint.every=1", *moving)
    assert done.returncode == 1
    assert "the loss is nan in step 2: " in done.stderr
    assert "policy loss nan at rank 0, micro-batch 1, row 31, token 0" in done.stderr
    assert "grpox replay runs/stops/faults/step-00000002" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in (folder / "runs" / "stops" / "checkpoints").iterdir()] == ["step-00000001"]
    assert not (folder / "runs" / "stops" / "model").exists()

    dump = "runs/stops/faults/step-00000002"
    train = json.loads((folder / dump / "fault.json").read_text())["config"]["train"]
    assert (train["entropy_coef"], train["adaptive_entropy"]) == (0.26, None)  # those of step 2
    shown = grpox("replay", dump)
    assert shown.returncode == 0, shown.stderr
    assert "policy loss nan" in shown.stdout
    assert ">>>" in shown.stdout
    assert "appears again: loss nan" in shown.stdout
    mended = replayed(folder / dump, "loss=dapo")
    assert (mended.exit_code, "solved" in mended.output) == (1, True), mended.output

    with pytest.raises(ConfigError, match=r"train\.learning_rate: changes nothing of a replay"):
        replayed(folder / dump, "train.learning_rate=1")
    with pytest.raises(ConfigError, match=r"train\.beta: the run had no reference"):
        replayed(folder / dump, "train.beta=1")
    (folder / dump / "rank-00000.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"damaged: rank-00000\.pt has 0 bytes"):
        replayed(folder / dump)


def test_a_fault_of_one_rank_is_that_of_all_and_a_replay_of_one_process_shows_it(
    faulty: Any, folder: Path
) -> None:
    settings = ("train.per_device_train_batch_size=16", "output_dir=runs/two", "train.on_nonfinite=skip")
    done = faulty("3", *settings, "train.max_steps=3", loss="Slope", ranks=2)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "derivative nan at rank 1" in line]
    assert "step 3" in line
    assert summary_of(folder / "runs" / "two")["skipped_steps"] == 1
    shown = replayed(folder / "runs" / "two" / "faults" / "step-00000003")
    assert shown.exit_code == 0, shown.output
    assert "derivative nan" in shown.output
    assert "model.embed_tokens.weight" in shown.output


def test_a_run_that_skipped_goes_on_bit_by_bit_and_keeps_the_first_batches(faulty: Any, folder: Path) -> None:
    """Also how many were skipped one after the other before the checkpoint counts."""
    from support.killing import assert_same

    runs = folder / "runs"
    skips = ("train.on_nonfinite=skip", "train.max_skips_in_a_row=4", "checkpoint.every=3")
    done = faulty("2,3,4,6", *skips, "output_dir=runs/whole")
    assert done.returncode == 0, done.stderr
    steps = metrics_of(runs / "whole")
    assert [step["skipped_steps"] for step in steps] == [0, 1, 2, 3, 3, 4]
    assert [step["learning_rate"] for step in steps][1:5] == [steps[1]["learning_rate"]] * 4
    kept = ["step-00000002", "step-00000003", "step-00000004"]
    assert sorted(path.name for path in (runs / "whole" / "faults").iterdir()) == kept
    assert "its batch is not kept" in done.stderr
    assert "skipped" in done.stdout

    shutil.copytree(runs / "whole", runs / "again")
    shutil.rmtree(runs / "again" / "checkpoints" / "step-00000006")
    (runs / "again" / "summary.json").unlink()  # as if it had been killed
    shutil.copytree(runs / "again", runs / "ends")
    done = faulty("2,3,4,6", "--resume", "runs/again")
    assert done.returncode == 0, done.stderr
    assert_same(runs / "whole", runs / "again")
    shutil.rmtree(runs / "ends" / "faults")
    (runs / "ends" / "faults").touch()  # no batch can be kept there, which hurts nothing
    done = faulty("2,3,4,5", "--resume", "runs/ends")
    assert done.returncode == 1
    assert "could not be kept in runs/ends/faults/step-00000004: " in done.stderr
    assert "4 steps in a row" in done.stderr
