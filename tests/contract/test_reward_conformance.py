"""The conformance suite of rewards: each fault is found by the check meant for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.scoring_server import Answer, chat, scoring_server

from grpox.plugins.registry import installed
from grpox.testing import RewardConformance
from grpox.testing.runner import Outcome, outcomes

BROKEN = Path(__file__).with_name("broken_rewards.py")
INSTALLED: dict[str, dict[str, Any]] = {
    "exact": {"column": "answer"},
    "math": {},
    "code": {},
    "regex": {"pattern": r"\d+"},
    "format": {},
    "length": {"target": 10},
    "soft_overlong": {"max_length": 8, "buffer": 4},
    "cosine": {"max_length": 8},
    "repetition": {},
    "environment": {},
}
"""All but those that need a model or a server: name -> parameters."""
SERVED: dict[str, dict[str, Any]] = {"http": {}, "judge": {"model": "m", "prompt": "{prompt}: {completion}"}}
"""Rewards of a server: name -> parameters beside its address."""


def checked(component: str | dict[str, Any], **own: Any) -> dict[str, Outcome]:
    suite = type("Suite", (RewardConformance,), {"component": component, **own})
    return {outcome.check.removeprefix("test_"): outcome for outcome in outcomes(suite())}


def failed(name: str) -> dict[str, Outcome]:
    made = checked({"path": f"{BROKEN}:{name}"})
    return {check: outcome for check, outcome in made.items() if outcome.status == "failed"}


def test_all_rewards_but_a_model_are_checked_here() -> None:
    names = {o.spec.name for o in installed().plugins.offers if o.kind == "reward"}
    assert names - set(INSTALLED) - set(SERVED) == {"reward_model"}


@pytest.mark.parametrize("name", INSTALLED)
def test_every_installed_one_conforms(name: str) -> None:
    made = checked({"name": name, **INSTALLED[name]})
    assert {check: outcome for check, outcome in made.items() if outcome.status == "failed"} == {}


@pytest.mark.parametrize("name", SERVED)
def test_those_of_a_server_conform_with_one(name: str) -> None:
    def answer(body: Any, _: int) -> Answer:
        texts = body.get("completions") or [body["messages"][-1]["content"]]
        scores = [float(len(str(text)) % 10) for text in texts]
        return 200, {"scores": scores} if name == "http" else chat(f"Score: {scores[0]:g}")

    with scoring_server(answer) as server:
        made = checked({"name": name, "url": server.url, **SERVED[name]})
    assert {check: outcome for check, outcome in made.items() if outcome.status == "failed"} == {}
    assert {"alignment", "direction"} <= made.keys()


def test_completions_that_the_author_ranks_are_scored_in_that_order() -> None:
    ranked = ("short", "rather long")
    assert checked({"path": f"{BROKEN}:the_shorter_the_better"}, ranked=ranked)["direction"].status == "passed"
    outcome = checked({"path": f"{BROKEN}:right"}, ranked=ranked)["direction"]
    assert outcome.status == "failed"
    assert outcome.example.splitlines()[-1] == "scores [5.0, 11.0]"


@pytest.mark.parametrize("name", ["right", "asks_for_an_answer", "UsesOrder", "compares_with_others"])
def test_what_is_right_passes(name: str) -> None:
    assert failed(name) == {}


@pytest.mark.parametrize(
    ("name", "check", "told"),
    [
        ("one_number", "runs", "not a list"),
        ("one_too_few", "runs", "6 scores for 7 completions"),
        ("not_finite", "runs", "finite"),
        ("needs_a_word", "runs", "IndexError"),
        ("strips_in_place", "pure", "changes completions"),
        ("KeepsState", "two_at_once", "two calls at once"),
        ("of_the_neighbour", "alignment", "scores of others"),
        ("sorted_by_length", "alignment", "scores of others"),
        ("answers_of_others", "alignment", "scores of others"),
        ("first_is_best", "alignment", "scores of others"),
    ],
)
def test_each_fault_is_found_by_the_check_meant_for_it(name: str, check: str, told: str) -> None:
    assert re.search(told, failed(name)[check].what)


def test_odd_completions_are_tried_beside_those_of_the_author() -> None:
    made = checked({"path": f"{BROKEN}:needs_a_word"}, completions=("two words",))
    assert [check for check, outcome in made.items() if outcome.status == "failed"] == ["odd_completions"]
    assert made["odd_completions"].example == "completion 0: ''"


def test_that_it_scored_nothing_is_told() -> None:
    assert "abstained from all" in checked({"path": f"{BROKEN}:of_other_data"})["runs"].what


def test_randomness_and_dependence_on_others_are_reported_and_allowed() -> None:
    assert "second time" in checked({"path": f"{BROKEN}:never_the_same"})["the_same_twice"].what
    assert "other completions" in checked({"path": f"{BROKEN}:compares_with_others"})["the_same_twice"].what
    assert failed("never_the_same") == {}
