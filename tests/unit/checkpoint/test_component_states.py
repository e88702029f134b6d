"""States of components in checkpoints: saved, restored, compared between ranks, and missed in a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.logs import LoggedText

from grpox.checkpoint.components import FILE, RunComponent, RunComponents
from grpox.checkpoint.rank_state import write_state
from grpox.contracts import StepContext, TrainerState
from grpox.errors import ConfigError, RunFailed
from grpox.observing.observers import Observers
from grpox.plugins.loader import new_manager
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)


class Counts:
    """Has a state."""

    def __init__(self, count: Any = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Forgets:
    """Changes itself and has no state."""

    def __init__(self) -> None:
        self.seen = 0


class Declares(Forgets):
    stateless = True


class Fails(Counts):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("total")


def states(world: World = ALONE, **instances: Any) -> RunComponents:
    run: Any = None
    components = RunComponents(run, world, PhaseTimes())
    for key, each in instances.items():
        kind = "observer" if key == "tracker" else key
        components.by_key[key] = RunComponent(key, kind, key, each, "my-plugin", "1.2")
    return components


def saved(folder: Path, **instances: Any) -> Path:
    write_state(states(**instances).saved(), folder / FILE)
    return folder


def test_a_state_comes_back_with_its_plugin(tmp_path: Path) -> None:
    tensor = torch.tensor([1.5])
    saved(tmp_path, loss=Counts({"a": tensor}), advantage=Forgets())
    content = torch.load(tmp_path / FILE, weights_only=True)
    assert content == {
        "loss": {
            "kind": "loss",
            "name": "loss",
            "distribution": "my-plugin",
            "version": "1.2",
            "state": {"count": {"a": tensor}},
        }
    }
    loss = Counts()
    states(loss=loss).restore(tmp_path)
    assert loss.count == {"a": tensor}


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({"loss": Forgets()}, {"loss": Counts()}, "loss: loss 'loss' of my-plugin 1.2 has a state, and the"),
        ({"loss": Counts()}, {"loss": Forgets()}, "which has no load_state_dict now"),
        ({"loss": Counts()}, {"advantage": Forgets()}, "which the run does not use there"),
        ({"loss": Counts()}, {"loss": Fails()}, "cannot restore its state of version 1.2"),
    ],
)
def test_a_state_and_a_component_that_do_not_fit_are_refused_or_warned_of(
    tmp_path: Path, logged: LoggedText, before: Any, now: Any, words: str
) -> None:
    saved(tmp_path, **before)
    with pytest.raises(ConfigError) as error:
        states(**now).restore(tmp_path)
    assert words in str(error.value)
    assert "--allow-changes" in str(error.value)
    states(**now).restore(tmp_path, allow=True)
    assert words in logged()


def test_another_component_under_a_key_does_not_get_the_state(tmp_path: Path) -> None:
    saved(tmp_path, loss=Counts(5))
    other = Counts()
    components = states()
    components.by_key["loss"] = RunComponent("loss", "loss", "another", other, "my-plugin", "1.2")
    with pytest.raises(ConfigError) as error:
        components.restore(tmp_path)
    assert len(error.value.problems) == 3
    assert other.count == 0


class Two(World):
    """Rank 0 of two; the other rank gathers the same."""

    def gather(self, items: Any) -> Any:
        return [*items, *map(self.other, items)]

    def other(self, item: Any) -> Any:
        return item


class Differs(Two):
    def other(self, item: Any) -> Any:
        own = isinstance(item, dict) and "loss" in item and "state" not in item["loss"]
        return {"loss": {**item["loss"], "['count']": "other"}} if own else item


def test_states_that_differ_between_ranks_are_an_error_with_component_and_ranks() -> None:
    assert states(Two(0, 2, CPU), loss=Counts(), tracker=Counts()).saved().keys() == {"loss", "tracker"}
    with pytest.raises(RunFailed) as error:
        states(Differs(0, 2, CPU), loss=Counts()).saved()
    assert "loss 'loss' of my-plugin 1.2 (loss) has another state on rank 1 than on rank 0" in str(error.value)
    assert "at ['count']" in str(error.value)


def test_an_observer_has_its_state_on_rank_0_alone(tmp_path: Path) -> None:
    saved(tmp_path, tracker=Counts(2))
    states(World(1, 1, CPU)).restore(tmp_path)  # nothing is missing there
    with pytest.raises(ConfigError):
        states().restore(tmp_path)


def test_a_component_that_forgets_is_told_once_at_the_first_checkpoint(logged: LoggedText) -> None:
    forgets, declares, counts, calm = Forgets(), Declares(), Counts(), Forgets()
    silent = Counts()
    silent.stateless = True  # type: ignore[attr-defined]
    all_of_them = states(advantage=forgets, loss=declares, correction=counts, reward=calm, dataset=silent)
    all_of_them.start()
    forgets.seen = declares.seen = counts.count = silent.count = 1
    assert all_of_them.saved().keys() == {"correction"}
    text = logged()
    assert "advantage 'advantage' of my-plugin 1.2 (advantage) changes its attribute seen" in text
    assert text.count("between calls") == 1
    forgets.seen = 2
    all_of_them.saved()
    assert logged() == ""


def test_a_state_that_no_checkpoint_can_hold_ends_the_run_before_its_first_step_and_at_a_checkpoint() -> None:
    states(loss=Counts(3), reward=Declares()).start()
    bad = states(loss=Counts({1}))
    for call in (bad.start, bad.saved):
        with pytest.raises(RunFailed, match=r"loss 'loss' of my-plugin 1.2: .*\['count'\] is a set"):
            call()


def test_steps_are_told_to_the_components_that_follow_them_and_only_if_there_is_one() -> None:
    class Follows:
        def __init__(self) -> None:
            self.seen: list[object] = []

        def begin_step(self, step: StepContext) -> None:
            self.seen.append((step.step, step.total_steps, step.epoch))

        def end_step(self, statistics: dict[str, Any]) -> None:
            self.seen.append(statistics)

    plain, follows = states(loss=Forgets()), Follows()
    following = states(loss=Forgets(), advantage=follows)
    for components in (plain, following):
        components.complete(Observers(new_manager(), []), beta=0.0)
    assert (plain.has_begin_step, plain.has_end_step) == (False, False)
    assert (following.has_begin_step, following.has_end_step) == (True, True)
    plan: Any = None
    following.begin_step(3, TrainerState(3, 9, 0.5))
    following.end_step(plan, [])
    assert follows.seen == [(3, 9, 0.5), {}]
