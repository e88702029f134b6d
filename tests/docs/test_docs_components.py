"""The components on the pages for authors work as they stand there."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest
import torch
from support.docs_folder import block_with

from grpox.contracts import AdvantageInputs, Capability, LossInputs, Rollout, RunContext, StepContext, Turn
from grpox.observing.control import RunControl
from grpox.observing.observers import Observers
from grpox.plugins import hookspecs
from grpox.testing import AdvantageConformance, CorrectionConformance, LossConformance
from grpox.testing.runner import outcomes

Names = dict[str, Any]


def executed(page: str, text: str, **given: Any) -> Names:
    block = block_with(f"docs/{page}", text)
    names: Names = {"__name__": __name__, **given}
    exec(compile(block.text, block.place, "exec"), names)
    return names


def test_the_correction_keeps_what_both_distributions_agree_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    block = block_with("docs/own-correction.md", "class IcePop")
    Path("icepop.py").write_text(block.text, encoding="utf-8")
    suite = type("Suite", (CorrectionConformance,), {"component": {"path": "icepop.py:IcePop"}})
    assert {outcome.status for outcome in outcomes(suite())} <= {"passed", "skipped"}
    icepop = executed("own-correction.md", "class IcePop")["IcePop"]
    old, sampler = torch.log(torch.tensor([[0.6, 0.2, 0.9]])), torch.log(torch.tensor([[0.3, 0.5, 0.1]]))
    weights, keep = icepop(icepop.Config()).correct(old, sampler, torch.ones(1, 3, dtype=torch.bool))
    assert keep.tolist() == [[True, False, False]]  # the ratios are 2, 0.4 and 9
    assert weights.tolist() == [pytest.approx([2.0, 0.0, 0.0])]


@pytest.mark.parametrize(("file", "name"), [("anchored.py", "Anchored"), ("ranked.py", "Ranked")])
def test_the_losses_conform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(block_with("docs/own-loss.md", f"class {name}").text, encoding="utf-8")
    suite = type("Suite", (LossConformance,), {"component": {"path": f"{file}:{name}"}})
    assert {outcome.check: outcome.what for outcome in outcomes(suite()) if outcome.status == "failed"} == {}


def test_the_loss_of_pairs_by_hand() -> None:
    """Two sequences with the means -1 and -3; the second is better, so that exp(-1 + 3) is large."""
    loss = executed("own-loss.md", "class Ranked")["Ranked"]()
    logprobs = torch.tensor([[-1.0, -1.0], [-3.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 0]]).bool()
    rewards, ids = torch.tensor([[0.0], [1.0]]), torch.tensor([5, 5])
    inputs = LossInputs(logprobs, logprobs, torch.zeros(2, 2), mask, rewards=rewards, group_ids=ids)
    assert loss.per_token(inputs).loss.tolist() == [[0.0, 0.0], [pytest.approx(math.log(1 + math.e**2)), 0.0]]


def test_the_anchored_loss_by_hand() -> None:
    names = executed("own-loss.md", "class Anchored")["Anchored"]
    ones = torch.ones(1, 1)
    inputs = LossInputs(-ones, -2 * ones, 3 * ones, ones.bool(), reference_logprobs=-5 * ones)
    output = names(names.Config(strength=0.5)).per_token(inputs)
    assert output.loss.item() == pytest.approx(-math.e * 3 + 0.5 * 16 / 2)
    assert output.diagnostics["distance"].item() == 8


def test_a_generator_marks_what_the_model_did_not_write() -> None:
    prompt = SimpleNamespace(group_id=3, token_ids=(1, 2))
    given: Names = {"prompt": prompt, "sample": 0, "tokens": (5, 9), "version": 4, "logprobs": (-0.1, -0.2)}
    plain = executed("own-generator.md", "rollout = Rollout(", Rollout=Rollout, stop_token_ids={9}, **given)[
        "rollout"
    ]
    assert (plain.finish_reason, plain.completion_ids, plain.policy_version) == ("stop", (5, 9), 4)
    parts = {"first": (5, 9), "observation": (7,), "second": (6, 8, 9)}
    names = {"rollout": plain, "replace": replace, "Turn": Turn, "version": 4, **parts}
    rollout = executed("own-generator.md", "rollout = replace(", **names)["rollout"]
    assert rollout.completion_ids == (5, 9, 7, 6, 8, 9)
    assert rollout.model_mask == (True, True, False, True, True, True)
    assert [rollout.completion_ids[turn.start : turn.end] for turn in rollout.turns] == [(5, 9), (6, 8, 9)]


def test_the_dataset_reads_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "problems.csv").write_text("question,answer\n1+1=,2\n2+2=,4\n")
    source = executed("own-training-parts.md", "class FromCsv")["FromCsv"]
    source.Config.model_rebuild(_types_namespace=source.load.__globals__)
    rows = source(source.Config(file=str(tmp_path / "problems.csv"))).load()
    assert rows[1] == {"question": "2+2=", "answer": 4}


def test_lion_steps_by_the_sign_of_an_interpolated_momentum() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = executed("own-training-parts.md", "class LionFactory")["LionFactory"]().build([weight], 0.1)
    weight.grad = torch.tensor([2.0, -1.0])
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.9, 1.1])
    # The momentum is 0.01 g = [0.02, -0.01]; 0.9 m + 0.1 g' = [0.018 - 0.01, -0.009 + 0.02].
    weight.grad = torch.tensor([-0.1, 0.2])
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.8, 1.0])


def test_the_schedule_begins_anew_after_a_quarter_of_the_steps() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = executed("own-training-parts.md", "class Restarts")["Restarts"]().build(optimizer, 8)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.1, 0.05, 0.1, 0.05])  # (1 + cos(pi / 2)) / 2 in the middle of a period


def test_the_observer_halves_the_rate_and_ends_a_run_that_gains_nothing(tmp_path: Path) -> None:
    names = executed("observers.md", "class Patience")
    spec = executed("observers.md", "def grpox_observers")["grpox_observers"]()[0]
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
        asked.append((requests.changed, requests.stop_reason))
    assert observers.failures == {}
    assert asked == [
        ({}, ""),
        ({}, ""),
        ({"learning_rate_factor": 0.5}, ""),
        ({}, ""),
        ({}, "the reward has not risen for 4 steps"),
    ]
    other = names["Patience"](names["PatienceConfig"](steps=4))
    other.load_state_dict(patience.state_dict())
    assert (other.best, other.since) == (0.5, 4)


def advantage_inputs(**changes: Any) -> AdvantageInputs:
    """Two completions of one prompt, with rewards 1 and 0; the first has two turns."""
    turns = (Turn(0, 1, "stop", 0, reward=0.5), Turn(2, 3, "stop", 0, reward=2.0))
    given = AdvantageInputs(
        rewards=torch.tensor([[1.0], [0.0]]),
        weights=torch.ones(1),
        group_ids=torch.tensor([0, 0]),
        prompt_ids=torch.tensor([7, 7]),
        lengths=torch.tensor([3, 2]),
        model_masks=[torch.tensor([True, False, True]), torch.ones(2, dtype=torch.bool)],
        columns={"difficulty": [2, 2]},
        step=1,
        turns=[turns, (Turn(0, 2, "length", 0),)],
    )
    return replace(given, **changes)


def test_scalers_of_both_forms() -> None:
    centred = executed("own-advantage.md", "class Centred")["Centred"]
    inputs = advantage_inputs()
    assert centred().scale(inputs.rewards, inputs.weights, inputs.group_ids).tolist() == [0.5, -0.5]
    given = {"torch": torch, "Centred": centred}
    hard = executed("own-advantage.md", "class ByDifficulty", **given)["ByDifficulty"]
    assert hard().scale(inputs).tolist() == [1.0, -1.0]


@pytest.mark.parametrize("name", ["Centred", "ByDifficulty", "TurnReturns", "TokenReturns"])
def test_the_scalers_conform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("Centred", "ByDifficulty", "TurnReturns", "TokenReturns")
    blocks = [block_with("docs/own-advantage.md", f"class {each}").text for each in names]
    Path("advantages.py").write_text("\n".join(["import torch", *blocks]), encoding="utf-8")
    suite = type("Suite", (AdvantageConformance,), {"component": {"path": f"advantages.py:{name}"}})
    assert {outcome.check: outcome.what for outcome in outcomes(suite()) if outcome.status == "failed"} == {}


def test_scalers_of_turns_and_tokens() -> None:
    turns = executed("own-advantage.md", "class TurnReturns", torch=torch)["TurnReturns"]
    assert [each.tolist() for each in turns().scale(advantage_inputs())] == [[2.5, 2.0], [0.0]]
    tokens = executed("own-advantage.md", "class TokenReturns", torch=torch)["TokenReturns"]
    lists = {"steps": [torch.tensor([0.0, 1.0, 2.0]), torch.tensor([math.nan, math.nan])]}
    scaled = tokens().scale(advantage_inputs(token_rewards=lists, labels=("steps",)))
    assert [each.tolist() for each in scaled] == [[3.0, 3.0, 2.0], [0.0, 0.0]]


def test_a_reward_rates_each_part_of_a_text() -> None:
    steps = executed("rewards.md", "steps.per")["steps"]
    assert (steps.per, steps(completions=["a = 1\n\nso", "b"])) == ("separator", [[1.0, 0.0], [0.0]])


def test_a_cap_follows_the_steps() -> None:
    cap = executed("state-and-steps.md", "class ScheduledCap")["ScheduledCap"]()
    cap.begin_step(StepContext(step=50, total_steps=100, epoch=0.5))
    assert cap.cap == 5.0


def test_a_running_quantile_goes_on_from_its_state() -> None:
    names = executed("state-and-steps.md", "class RunningQuantile")
    running, other = names["RunningQuantile"](), names["RunningQuantile"]()
    running.end_step({"ratio": torch.tensor([2.0, 2.0, 2.0])})
    assert running.cap == pytest.approx(0.9 * 1.2 + 0.1 * 2.0)
    other.load_state_dict(running.state_dict())
    assert other.cap == running.cap


def test_declarations_name_what_there_is() -> None:
    assert executed("observers.md", "hyperparameters = ")["Mine"].hyperparameters == ("clip",)
    needs = executed("capabilities.md", "group_ids")["Mine"].needs
    assert {Capability(name) for name in needs} == {Capability.ENTROPY, Capability.GROUP_IDS}
    page = (Path(__file__).parents[2] / "docs" / "capabilities.md").read_text(encoding="utf-8")
    assert [name for name in Capability if f"| `{name}` |" not in page] == []


def test_a_reward_of_turns_and_calls() -> None:
    few_calls = executed("rewards.md", "def few_calls")["few_calls"]
    scores = few_calls(turns=[["a"], ["b", "c", "d"]], tool_calls=[[], [{"name": "add"}, {"name": "add"}]])
    assert scores == pytest.approx([0.0, -0.3])


def test_facts_about_an_episode() -> None:
    info = executed("evaluation.md", "def info(self)")["info"]
    ended = {"answer": 3, "wanted": 3, "guesses": 2, "calls": 1}
    assert info(SimpleNamespace(has_carry=True, **ended)) == {"success": True, "guesses": 2}
    without = info(SimpleNamespace(has_carry=False, **ended))
    assert without["calls_without_carry"] is True
