"""State and steps of a reward function in its own process, also after that has been started again."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.logs import LoggedText

from grpox.checkpoint.components import RunComponent, RunComponents
from grpox.contracts import StepContext
from grpox.errors import RunFailed
from grpox.plugins.optional_methods import has_method, has_state, statistics_of
from grpox.rollout.rewards.messages import Blueprint
from grpox.rollout.rewards.process import ProcessFailed, RemoteComponent, RewardProcess
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World

FILE = Path(__file__).with_name("stateful_rewards.py")


def process_of(name: str) -> Iterator[RewardProcess]:
    plan = Blueprint(name, "rewards[0]", f"{FILE}:{name}", True, pickle.dumps(None), tuple(sys.path), None)
    process = RewardProcess(plan, timeout=60.0, memory=16.0)
    yield process
    process.close()


@pytest.fixture
def counts() -> Iterator[RewardProcess]:
    yield from process_of("Counts")


@pytest.fixture
def forgets() -> Iterator[RewardProcess]:
    yield from process_of("Forgets")


def score(process: RewardProcess, *completions: str) -> list[float | None]:
    ids = [[1]] * len(completions)
    arguments = {"completions": list(completions), "prompts": ["p"], "completion_ids": ids}
    return process.ask(arguments, len(completions))[0].values


def test_methods_are_called_in_the_process_and_errors_name_the_reward(counts: RewardProcess) -> None:
    reward: Any = RemoteComponent(counts)
    assert has_state(reward)
    assert statistics_of(reward) == {"reward": "mean", "ratio": "gather"}
    reward.begin_step(StepContext(2, 9, 0.5))
    reward.end_step({"reward": 0.5, "ratio": torch.tensor([1.0, 2.0])})
    assert score(counts, "a") == [211.0]
    assert reward.state_dict() == {"calls": 1, "seen": [3.0]}
    with pytest.raises(RunFailed, match="reward 'Counts' raised ValueError: a negative reward in end_step"):
        reward.end_step({"reward": -1.0, "ratio": torch.zeros(1)})
    reward.end_step({"reward": 0.0, "ratio": torch.full((2,), 40.0)})
    with pytest.raises(RunFailed, match=r"reward 'Counts' the state's value \['seen'\] is a numpy.ndarray"):
        reward.state_dict()


def test_a_process_that_is_started_again_has_the_state_and_the_step_of_before(
    counts: RewardProcess, logged: LoggedText
) -> None:
    reward: Any = RemoteComponent(counts)
    reward.load_state_dict({"calls": 5, "seen": []})
    reward.begin_step(StepContext(1, 9, 0.0))
    assert score(counts, "a") == [106.0]
    reward.end_step({"reward": 0.5, "ratio": torch.tensor([1.0])})
    assert reward.state_dict() == {"calls": 6, "seen": [1.0]}
    reward.begin_step(StepContext(2, 9, 0.0))
    assert score(counts, "a") == [217.0]  # a call that is lost
    with pytest.raises(ProcessFailed):
        score(counts, "die")
    assert logged() == ""
    assert score(counts, "a") == [217.0]
    assert "reward 'Counts' was started again, with the state after the last step" in logged()


def test_a_reward_that_forgets_is_seen_in_its_process(forgets: RewardProcess, logged: LoggedText) -> None:
    reward = RemoteComponent(forgets)
    assert not any(has_method(reward, name) for name in ("state_dict", "begin_step", "end_step"))
    component = RunComponent("rewards[0]", "reward", "Forgets", reward)
    run: Any = None
    states = RunComponents(run, World(0, 1, torch.device("cpu")), PhaseTimes())
    states.by_key["rewards[0]"] = component
    states.start()
    score(forgets, "a")
    assert states.saved() == {}
    assert "reward 'Forgets' (rewards[0]) changes its attribute calls" in logged()
