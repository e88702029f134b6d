"""Checkpoints of another number of ranks: the same weights, optimizer states, rollouts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rank_scripts import run_script
from support.killing import finish
from support.run_files import SHORT

VARIANTS = ("own settings", "bfloat16")
"""In float32 shards of at most so many numbers; in bfloat16 one for each group of parameters."""
States = dict[str, list[dict[str, Any]]]


def go_on(folder: Path, source: str, out: str, ranks: int, batch_size: int) -> States:
    import torch

    (folder / out).mkdir()
    run_script("other_ranks.py", source, out, batch_size, *VARIANTS, folder=folder, ranks=ranks)
    states: States = torch.load(folder / out / "states.pt", weights_only=True)
    return states


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, States]:
    """One rank took a step and saved; two went on and saved; one went on with that."""
    folder = tmp_path_factory.mktemp("engines")
    made = {"one": go_on(folder, "-", "one", 1, 12), "two": go_on(folder, "one", "two", 2, 6)}
    made["again"] = go_on(folder, "two", "again", 1, 24)
    assert [path.name for path in folder.glob("*/.*")] == []  # what was converted is gone
    return made


def differing(state: Any, other: Any, path: str = "") -> list[str]:
    """The places at which two states are not the same, bit by bit."""
    import torch

    if isinstance(state, dict):
        assert state.keys() == other.keys()
        return [place for key in state for place in differing(state[key], other[key], f"{path}/{key}")]
    if isinstance(state, torch.Tensor):
        return [] if torch.equal(state, other) else [path]
    return [] if state == other else [f"{path}: {state} and {other}"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("saved", "loaded"), [("one", "two"), ("two", "again")])
def test_weights_and_optimizer_states_are_exactly_those_that_were_saved(
    states: dict[str, States], variant: str, saved: str, loaded: str
) -> None:
    # The first of "one" is what it saved; of the others the first is what was read, the second what was saved.
    before = states[saved][variant][0 if saved == "one" else 1]
    after = states[loaded][variant][0]
    # Shards of at most so many numbers make other numbers of shards; their counters are all the same.
    assert set(before["counters"]) == set(after["counters"])
    assert differing(before | {"counters": []}, after | {"counters": []}) == []


def test_the_next_step_is_the_one_that_the_saved_run_took(states: dict[str, States]) -> None:
    import torch

    went_on, other = states["one"]["own settings"][1], states["two"]["own settings"][1]
    for kind in ("weights", "master", "exp_avg", "exp_avg_sq"):
        for name, tensor in went_on[kind].items():
            torch.testing.assert_close(other[kind][name], tensor, rtol=1e-4, atol=1e-5)
    assert (went_on["groups"], went_on["schedule"]) == (other["groups"], other["schedule"])
    assert {group["weight_decay"] for group in other["groups"]} == {0.1, 0.0}
    assert set(other["counters"]) == {2.0}


# -- A run -----------------------------------------------------------------------------------------------


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    told = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["metrics"] for line in told if "metrics" in line}


def back_to(folder: Path, step: int) -> None:
    """As if the run had been killed after `step` steps."""
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.split("-")[1]) > step:
            shutil.rmtree(checkpoint)
    (folder / "summary.json").unlink()


def test_a_run_goes_on_with_more_ranks_and_with_fewer(tmp_path: Path) -> None:
    """A generation batch is trained on for four steps: those that are left are on what was saved."""
    more = (
        *("train.per_device_train_batch_size=32", "train.gradient_accumulation_steps=2"),
        *("train.steps_per_generation=4", "train.num_iterations=2", "train.max_steps=8", "train.beta=0.04"),
        *("checkpoint.every=2", "checkpoint.keep=9", *SHORT, "output_dir=run"),
    )
    run, whole = tmp_path / "run", tmp_path / "whole"
    finish(tmp_path, "quickstart", *more)

    def assert_goes_on(step: int, ranks: int, *settings: str) -> None:
        shutil.rmtree(whole, ignore_errors=True)
        shutil.copytree(run, whole)
        back_to(run, step)
        assert "taking run/checkpoints/" in finish(tmp_path, "--resume", "run", *settings, ranks=ranks)
        expected, found = metrics(whole), metrics(run)
        assert sorted(found) == list(range(1, 9))
        for name in ("loss", "grad_norm", "kl", "reward", "ratio/mean"):
            for next_step in (step + 1, step + 2):
                if name in expected[next_step]:
                    wanted = pytest.approx(expected[next_step][name], rel=1e-4, abs=1e-7)
                    assert found[next_step][name] == wanted

    assert_goes_on(2, 2, "train.per_device_train_batch_size=16")
    larger = ("train.per_device_train_batch_size=64", "train.gradient_accumulation_steps=1")
    assert_goes_on(6, 1, *larger, "train.steps_per_generation=2")
