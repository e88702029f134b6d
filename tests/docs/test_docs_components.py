"""The components on the pages for authors work as they stand there."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest
import torch
from support.docs_folder import block_with, executed

from grpox.contracts import AdvantageInputs, Capability, LossInputs, Rollout, RunContext, StepContext, Turn
from grpox.environments.contract import tool_problem
from grpox.observing.control import RunControl
from grpox.observing.observers import Observers
from grpox.plugins import hookspecs
from grpox.runfile.load import load_run
from grpox.runfile.yaml_lines import read_yaml
from grpox.testing import AdvantageConformance, CorrectionConformance, EnvironmentConformance, LossConformance
from grpox.testing.runner import outcomes

COMPONENTS = [
    (CorrectionConformance, "docs/own-correction.md", ("IcePop",)),
    (LossConformance, "docs/own-loss.md", ("Anchored", "Ranked")),
    (AdvantageConformance, "docs/own-advantage.md", ("Centred", "ByDifficulty", "TurnReturns", "TokenReturns")),
    (EnvironmentConformance, "docs/own-environment.md", ("Guess", "Shop")),
]


@pytest.mark.parametrize(("kit", "page", "names"), COMPONENTS)
def test_the_components_of_the_pages_conform(kit: type, page: str, names: tuple[str, ...]) -> None:
    blocks = [block_with(page, f"class {name}").text for name in names]
    plays = kit is EnvironmentConformance
    head, allowed = ("", {"passed"}) if plays else ("import torch", {"passed", "skipped"})
    Path("mine.py").write_text("\n".join([head, *blocks]), encoding="utf-8")
    for name in names:
        checks = list(outcomes(type("Suite", (kit,), {"component": {"path": f"mine.py:{name}"}})()))
        assert len(checks) >= 11
        assert {each.check: each.what for each in checks if each.status not in allowed} == {}, name


def test_the_correction_keeps_what_both_distributions_agree_on() -> None:
    icepop = executed("docs/own-correction.md", "class IcePop")["IcePop"]
    old, sampler = torch.log(torch.tensor([[0.6, 0.2, 0.9]])), torch.log(torch.tensor([[0.3, 0.5, 0.1]]))
    weights, keep = icepop(icepop.Config()).correct(old, sampler, torch.ones(1, 3, dtype=torch.bool))
    assert keep.tolist() == [[True, False, False]]  # the ratios are 2, 0.4 and 9
    assert weights.tolist() == [pytest.approx([2.0, 0.0, 0.0])]


def test_the_losses_by_hand() -> None:
    """Ranked: two sequences with the means -1 and -3; the second is better, so that exp(-1 + 3) is large."""
    loss = executed("docs/own-loss.md", "class Ranked")["Ranked"]()
    logprobs = torch.tensor([[-1.0, -1.0], [-3.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 0]]).bool()
    rewards, ids = torch.tensor([[0.0], [1.0]]), torch.tensor([5, 5])
    inputs = LossInputs(logprobs, logprobs, torch.zeros(2, 2), mask, rewards=rewards, group_ids=ids)
    assert loss.per_token(inputs).loss.tolist() == [[0.0, 0.0], [pytest.approx(math.log(1 + math.e**2)), 0.0]]
    anchored = executed("docs/own-loss.md", "class Anchored")["Anchored"]
    ones = torch.ones(1, 1)
    inputs = LossInputs(-ones, -2 * ones, 3 * ones, ones.bool(), reference_logprobs=-5 * ones)
    output = anchored(anchored.Config(strength=0.5)).per_token(inputs)
    assert output.loss.item() == pytest.approx(-math.e * 3 + 0.5 * 16 / 2)
    assert output.diagnostics["distance"].item() == 8


def test_a_generator_marks_what_the_model_did_not_write() -> None:
    given: dict[str, Any] = {"Rollout": Rollout, "replace": replace, "Turn": Turn, "version": 4}
    given |= {"prompt": SimpleNamespace(group_id=3, token_ids=(1, 2)), "sample": 0, "tokens": (5, 9)}
    given |= {"logprobs": (-0.1, -0.2), "stop_token_ids": {9}}
    given |= {"first": (5, 9), "observation": (7,), "second": (6, 8, 9)}
    plain = executed("docs/own-generator.md", "rollout = Rollout(", **given)["rollout"]
    assert (plain.finish_reason, plain.completion_ids, plain.policy_version) == ("stop", (5, 9), 4)
    rollout = executed("docs/own-generator.md", "rollout = replace(", rollout=plain, **given)["rollout"]
    assert rollout.completion_ids == (5, 9, 7, 6, 8, 9)
    assert rollout.model_mask == (True, True, False, True, True, True)
    assert [rollout.completion_ids[turn.start : turn.end] for turn in rollout.turns] == [(5, 9), (6, 8, 9)]


def test_the_dataset_reads_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "problems.csv").write_text("question,answer\n1+1=,2\n2+2=,4\n")
    source = executed("docs/own-training-parts.md", "class FromCsv")["FromCsv"]
    source.Config.model_rebuild(_types_namespace=source.load.__globals__)
    rows = source(source.Config(file=str(tmp_path / "problems.csv"))).load()
    assert rows[1] == {"question": "2+2=", "answer": 4}


def test_an_optimizer_and_a_schedule_by_hand() -> None:
    """Lion steps by the sign of a momentum; a period of the schedule is a quarter of the steps."""
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    factory = executed("docs/own-training-parts.md", "class LionFactory")["LionFactory"]()
    optimizer = factory.build([weight], 0.1)
    weight.grad = torch.tensor([2.0, -1.0])
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.9, 1.1])
    # The momentum is 0.01 g = [0.02, -0.01]; 0.9 m + 0.1 g' = [0.018 - 0.01, -0.009 + 0.02].
    weight.grad = torch.tensor([-0.1, 0.2])
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.8, 1.0])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = executed("docs/own-training-parts.md", "class Restarts")["Restarts"]().build(optimizer, 8)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.1, 0.05, 0.1, 0.05])  # (1 + cos(pi / 2)) / 2 in the middle of a period


def test_the_observer_halves_the_rate_and_ends_a_run_that_gains_nothing(tmp_path: Path) -> None:
    names = executed("docs/observers.md", "class Patience")
    spec = executed("docs/observers.md", "def grpox_observers")["grpox_observers"]()[0]
    assert spec.target.endswith(":Patience")
    manager = pluggy.PluginManager("grpox")
    manager.add_hookspecs(hookspecs)
    patience = names["Patience"](names["PatienceConfig"](steps=4))
    observers = Observers(manager, [("patience", patience)])
    control = RunControl({"learning_rate_factor": 1.0}, {"learning_rate_factor": lambda value: None})
    run: Any = RunContext(SimpleNamespace(make_read_only=lambda: None), tmp_path, 9, 1, {}, None, "run.yaml")  # type: ignore[arg-type]
    asked = []
    for step, reward in enumerate((0.5, 0.5, 0.4, math.nan, 0.5), start=1):
        observers.step_finished(run, step, {"reward": reward}, control)
        requests = control.take()
        asked.append((requests.changed.get("learning_rate_factor"), requests.stop_reason))
    assert observers.failures == {}
    assert asked[:4] == [(None, ""), (None, ""), (0.5, ""), (None, "")]
    assert asked[4] == (None, "the reward has not risen for 4 steps")
    other = names["Patience"](names["PatienceConfig"](steps=4))
    other.load_state_dict(patience.state_dict())
    assert (other.best, other.since) == (0.5, 4)


def test_scalers_of_every_form() -> None:
    """Two completions of one prompt, with rewards 1 and 0; the first has two turns."""
    inputs = AdvantageInputs(
        rewards=torch.tensor([[1.0], [0.0]]),
        weights=torch.ones(1),
        group_ids=torch.tensor([0, 0]),
        prompt_ids=torch.tensor([7, 7]),
        lengths=torch.tensor([3, 2]),
        model_masks=[torch.tensor([True, False, True]), torch.ones(2, dtype=torch.bool)],
        columns={"difficulty": [2, 2]},
        step=1,
        turns=[
            (Turn(0, 1, "stop", 0, reward=0.5), Turn(2, 3, "stop", 0, reward=2.0)),
            (Turn(0, 2, "length", 0),),
        ],
        token_rewards={"steps": [torch.tensor([0.0, 1.0, 2.0]), torch.tensor([math.nan, math.nan])]},
        labels=("steps",),
    )
    centred = executed("docs/own-advantage.md", "class Centred")["Centred"]
    given = {"torch": torch, "Centred": centred}
    hard = executed("docs/own-advantage.md", "class ByDifficulty", **given)["ByDifficulty"]
    turns = executed("docs/own-advantage.md", "class TurnReturns", **given)["TurnReturns"]
    tokens = executed("docs/own-advantage.md", "class TokenReturns", **given)["TokenReturns"]
    assert centred().scale(inputs.rewards, inputs.weights, inputs.group_ids).tolist() == [0.5, -0.5]
    assert hard().scale(inputs).tolist() == [1.0, -1.0]
    assert [each.tolist() for each in turns().scale(inputs)] == [[2.5, 2.0], [0.0]]
    assert [each.tolist() for each in tokens().scale(inputs)] == [[3.0, 3.0, 2.0], [0.0, 0.0]]


def test_state_follows_the_steps_and_goes_on_from_a_checkpoint() -> None:
    cap = executed("docs/state-and-steps.md", "class ScheduledCap")["ScheduledCap"]()
    cap.begin_step(StepContext(step=50, total_steps=100, epoch=0.5))
    assert cap.cap == 5.0
    names = executed("docs/state-and-steps.md", "class RunningQuantile")
    running, other = names["RunningQuantile"](), names["RunningQuantile"]()
    running.end_step({"ratio": torch.tensor([2.0, 2.0, 2.0])})
    assert running.cap == pytest.approx(0.9 * 1.2 + 0.1 * 2.0)
    other.load_state_dict(running.state_dict())
    assert other.cap == running.cap


def test_declarations_name_what_there_is() -> None:
    assert executed("docs/observers.md", "hyperparameters = ")["Mine"].hyperparameters == ("clip",)
    needs = executed("docs/capabilities.md", "group_ids")["Mine"].needs
    assert {Capability(name) for name in needs} == {Capability.ENTROPY, Capability.GROUP_IDS}
    page = (Path(__file__).parents[2] / "docs" / "capabilities.md").read_text(encoding="utf-8")
    assert [name for name in Capability if f"| `{name}` |" not in page] == []


def test_rewards_of_parts_and_calls_and_facts_about_an_episode() -> None:
    steps = executed("docs/rewards.md", "steps.per")["steps"]
    assert (steps.per, steps(completions=["a = 1\n\nso", "b"])) == ("separator", [[1.0, 0.0], [0.0]])
    few_calls = executed("docs/rewards.md", "def few_calls")["few_calls"]
    scores = few_calls(turns=[["a"], ["b", "c", "d"]], tool_calls=[[], [{"name": "add"}, {"name": "add"}]])
    assert scores == pytest.approx([0.0, -0.3])
    info = executed("docs/evaluation.md", "def info(self)")["info"]
    ended = {"answer": 3, "wanted": 3, "guesses": 2, "calls": 1}
    assert info(SimpleNamespace(has_carry=True, **ended)) == {"success": True, "guesses": 2}
    without = info(SimpleNamespace(has_carry=False, **ended))
    assert without["calls_without_carry"] is True


def test_the_environments_by_hand() -> None:
    guess = executed("docs/own-environment.md", "class Guess")["Guess"]
    game = guess(guess.Config(highest=7, guesses=3))
    assert game.reset({"prompt": ""}, seed=5) == "It is from 0 to 7."
    number = random.Random(5).randint(0, 7)
    assert game.number == number
    assert game.reply(str(number + 1)) == "lower"
    assert game.reply("nothing") == "higher"
    assert game.reply(str(number)) is None
    assert (game.reward(), game.info()) == (1.0, {"success": True, "guesses": 3})
    lost = guess(guess.Config(guesses=1))
    lost.reset({}, seed=5)
    assert (lost.reply("no number"), lost.reward()) == (None, 0.0)
    shop = executed("docs/own-environment.md", "class Shop")["Shop"]()
    with pytest.raises(ValueError, match="6 is more than the 4"):
        shop.buy("bread", 2)
    assert (shop.buy("apple"), shop.reward()) == ("2 left.", 1.0)
    assert (shop.buy("apple"), shop.reward()) == ("0 left.", 0.0)


def test_the_tools_of_a_run_file_can_be_called() -> None:
    names = executed("docs/run-file.md", "async def search")
    assert [tool_problem(names[name], name) for name in ("add", "search")] == ["", ""]
    assert names["add"](37, 48) == 85
    assert asyncio.run(names["search"]("cats")) == "nothing about cats"


def test_a_class_named_by_path_takes_the_place_of_adamw() -> None:
    Path("mine.py").write_text(block_with("docs/run-file.md", "class Momentum").text, encoding="utf-8")
    train = read_yaml(block_with("docs/run-file.md", '"mine.py:Halving"').text, "page").data["train"]
    overrides = [f"train.{key}={{path: '{each['path']}'}}" for key, each in train.items()]
    run = load_run("quickstart", [*overrides, f"train.optimizer.momentum={train['optimizer']['momentum']}"])

    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = run.build("train.optimizer").build([weight], 0.1)
    schedule = run.build("train.scheduler").build(optimizer, 3)
    for _ in range(2):
        weight.grad = torch.ones(1)
        optimizer.step()
        schedule.step()
    # 0.1 * 1, then half the rate with momentum 0.5: 0.05 * (0.5 + 1).
    assert weight.item() == pytest.approx(1 - 0.1 - 0.075)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
