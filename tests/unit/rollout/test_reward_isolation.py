"""Places where a run calls its reward functions: those in separate processes, and refused settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpox.errors import ConfigError
from grpox.rollout.rewards.isolation import isolation_of, reward_functions
from grpox.rollout.rewards.process import RewardProcess
from grpox.rollout.rewards.worker import _use_device
from grpox.runfile.load import ResolvedRun, load_run

FUNCTIONS = """
def plain(completions, **_):
    return [0.0] * len(completions)

def on_the_gpu(completions, **_):
    return [0.0] * len(completions)

on_the_gpu.isolation = "thread"
"""


@pytest.fixture
def resolved(tmp_path: Path) -> Any:
    (tmp_path / "mine.py").write_text(FUNCTIONS)

    def resolve(reward: str) -> ResolvedRun:
        return load_run(
            "quickstart", ["evaluation=null", f"rewards=[{reward.replace('mine.py', f'{tmp_path}/mine.py')}]"]
        )

    return resolve


def where(run: ResolvedRun, given: bool = False) -> str:
    return isolation_of(run.components["rewards[0]"], run.config.rewards[0], given)


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("exact", "thread"),
        ("{name: exact, isolation: process}", "process"),
        ("{path: 'mine.py:plain'}", "process"),
        ("{path: 'mine.py:plain', isolation: thread}", "thread"),
        ("{path: 'mine.py:on_the_gpu'}", "thread"),
    ],
)
def test_who_gets_a_process(resolved: Any, reward: str, expected: str) -> None:
    assert where(resolved(reward)) == expected


def test_an_object_given_in_python_stays_in_the_trainer_which_alone_has_it(resolved: Any) -> None:
    assert where(resolved("{path: 'mine.py:plain'}"), given=True) == "thread"
    with pytest.raises(ConfigError, match="is an object given in Python"):
        where(resolved("{path: 'mine.py:plain', isolation: process}"), given=True)


def test_a_function_that_says_it_needs_the_trainers_process_is_not_taken_out_of_it(resolved: Any) -> None:
    with pytest.raises(ConfigError, match="says of itself that it needs the trainer's process") as caught:
        where(resolved("{path: 'mine.py:on_the_gpu', isolation: process}"))
    assert caught.value.problems[0].key == "rewards[0].isolation"


def test_a_built_in_reward_works_in_a_process_and_the_processes_end_with_the_block(resolved: Any) -> None:
    with reward_functions(resolved("{name: exact, column: answer, isolation: process}")) as (function,):
        assert isinstance(function, RewardProcess)
        assert function.ready.signature.needs == ("answer",)
        process = function.get()._process
    assert process.returncode == -9


def test_a_reward_process_allocates_nothing_on_its_gpu_before_the_function_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queued: list[Any] = []
    monkeypatch.setattr(torch.cuda, "_queued_calls", queued)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: chosen.append(index))
    chosen: list[int] = []
    _use_device(3)
    assert chosen == []
    for call, _ in queued:  # as torch does when CUDA is first used
        call()
    assert chosen == [3]
