"""Detection, report and count of non-finite values, and the end of the run that they cause."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.logs import LoggedText

from grpox.checkpoint.faults import FAULT
from grpox.config import TrainConfig
from grpox.contracts import Rollout
from grpox.errors import ConfigError, RunFailed
from grpox.policy.batch import Sample, collate, samples_of
from grpox.runtime.world import World
from grpox.training.replay import open_dump
from grpox.update.nonfinite import NonFinite, NonFinitePolicy, Row, find, in_order

WORLD = World(0, 1, torch.device("cpu"))
MASK = torch.tensor([[True, True, False], [True, True, True]])


def values(**at: float) -> torch.Tensor:
    """f32[2, 3] of ones, but for what is given as ``r1t2=inf``."""
    made = torch.ones(2, 3)
    for place, value in at.items():
        made[int(place[1]), int(place[3])] = value
    return made


def rows(terms: dict[str, torch.Tensor]) -> list[Row]:
    """The terms [2, 3] of a micro-batch by sample, as `find` takes them."""
    return [({name: value[row] for name, value in terms.items()}, MASK[row]) for row in range(2)]


def test_the_first_token_of_each_term_is_found_with_how_many_there_are() -> None:
    terms = {"policy loss": values(r1t0=math.nan, r1t2=math.inf), "log-probability": values(r1t2=-math.inf)}
    assert find([rows({"policy loss": values()}), rows(terms)], rank=3) == [
        NonFinite("log-probability", "-inf", 3, 1, 1, 2, 1),
        NonFinite("policy loss", "nan", 3, 1, 1, 0, 2),
    ]
    assert find([rows({"KL": values(r0t2=math.nan)})], rank=0) == []  # it is masked


def test_a_cause_comes_before_what_it_causes_whatever_rank_it_is_on() -> None:
    consequence, cause = (
        NonFinite("policy loss", "nan", 0, 0, 0, 0, 1),
        NonFinite("advantage", "nan", 1, 0, 0, 0, 1),
    )
    assert in_order([consequence, cause]) == [cause, consequence]


def micro_batch() -> list[Sample]:
    rollout = Rollout(0, 0, (3, 4), (5, 6), "stop", 0)
    return samples_of([rollout, rollout], [1.0, -1.0])


def policy(**train: object) -> NonFinitePolicy:
    return NonFinitePolicy(TrainConfig.model_validate(train), WORLD)


def fail(policy: NonFinitePolicy, step: int) -> None:
    samples, terms = micro_batch(), {"policy loss": values(r0t1=math.nan)[:, :2]}
    result: Any = SimpleNamespace(terms=lambda: terms)
    policy.on_step_skipped(step, math.nan, [samples], [(collate(samples, WORLD.device), result)], {})


def test_a_run_stops_unless_told_otherwise_and_says_where() -> None:
    with pytest.raises(
        RunFailed, match=r"the loss is nan in step 7: policy loss nan at rank 0, .* row 0, token 1"
    ):
        fail(policy(), 7)


def test_each_skip_is_told_and_so_many_in_a_row_end_the_run(logged: LoggedText) -> None:
    skipping = policy(on_nonfinite="skip", max_skips_in_a_row=3)
    fail(skipping, 1)
    fail(skipping, 2)
    told = logged()
    assert [f"in step {step}" in told for step in (1, 2, 3)] == [True, True, False]
    skipping.on_step_applied()
    fail(skipping, 4)
    fail(skipping, 5)
    assert skipping.metrics() == {"skipped_steps": 4}
    with pytest.raises(RunFailed, match="3 steps in a row"):
        fail(skipping, 6)
    assert policy().metrics() == {}  # of a run that skips none


def test_a_folder_that_is_no_dump_names_one_that_is(tmp_path: Path) -> None:
    dump = tmp_path / "faults" / "step-00000003"
    dump.mkdir(parents=True)
    (dump / FAULT).write_text("{}")
    for folder, what in ((tmp_path, "holds no dump"), (tmp_path / "faults" / "step-3", "no such folder")):
        with pytest.raises(ConfigError, match=what) as caught:
            open_dump(folder)
        assert str(dump) in str(caught.value)
    (tmp_path / FAULT).write_text("{}")
    with pytest.raises(ConfigError, match=r"damaged: manifest\.json is missing"):
        open_dump(tmp_path)
