"""A component is compared with the formula of its paper, written over plain lists."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from contract.planted import references as paper
from support.problems import problem_of

from grpox.testing import AdvantageConformance, CorrectionConformance, LossConformance, same_as
from grpox.testing.conformance import Violation
from grpox.testing.runner import outcomes

LOSSES = Path(__file__).with_name("broken_losses.py")
clipped, gspo, cispo_gradient = paper.clipped(0.2, 0.2), paper.gspo(0.2, 0.2), paper.capped(5.0)
group, token_truncate = paper.standardised, paper.token_truncate(2.0)
token_mean, sequence_mean = paper.token_mean, paper.sequence_mean


def gspo_with_mask(
    logprobs: list[float], old_logprobs: list[float], advantages: list[float], mask: list[bool]
) -> list[float]:
    """GSPO of all tokens, of which masked ones are in no mean."""
    there = [place for place, keep in enumerate(mask) if keep]
    ratio = math.exp(sum(logprobs[place] - old_logprobs[place] for place in there) / len(there))
    return [-min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage) for advantage in advantages]


def sequence_mask(old: list[float], sampler: list[float]) -> list[tuple[float, bool]]:
    ratio = math.exp(sum(a - b for a, b in zip(old, sampler, strict=True)))
    return [(ratio, 0.0 <= ratio <= 3.0)] * len(old)


def mean_by_longest(losses: list[list[float]], max_length: int) -> float:
    return sum(map(sum, losses)) / (len(losses) * max_length)


@pytest.mark.parametrize(
    ("kind", "component", "reference", "reduction"),
    [
        ("loss", "dapo", clipped, token_mean),
        ("loss", "dr_grpo", clipped, mean_by_longest),
        ("loss", {"name": "grpo", "level": "sequence"}, gspo, None),
        ("loss", {"name": "grpo", "level": "sequence"}, gspo_with_mask, sequence_mean),
        ("loss", "cispo", cispo_gradient, token_mean),
        ("advantage", "group", group, None),
        ("correction", "sequence-mask", sequence_mask, None),
        ("correction", "token-truncate", token_truncate, None),
    ],
)
def test_built_ins_are_the_formulas_of_their_papers(
    kind: str, component: Any, reference: Any, reduction: Any
) -> None:
    same_as(kind, component, reference, reduction)


@pytest.mark.parametrize(
    ("kind", "component", "reference", "message"),
    [
        ("loss", {"name": "dapo", "clip_high": 0.28}, clipped, "its loss is"),
        ("loss", "grpo", gspo, "its loss is"),
        ("loss", {"path": f"{LOSSES}:HiddenGradient"}, clipped, "its loss is"),
        ("loss", {"path": f"{LOSSES}:SurrogateOfAnother"}, cispo_gradient, "its gradient is"),
        ("advantage", "none", group, "the advantage of row 0 is"),
        ("correction", "token-truncate", sequence_mask, "weighs|drops"),
        ("correction", {"name": "token-truncate", "cap": 3.0}, token_truncate, "and by the reference 2"),
    ],
)
def test_another_formula_is_a_violation(kind: str, component: Any, reference: Any, message: str) -> None:
    with pytest.raises(Violation, match=message):
        same_as(kind, component, reference)


@pytest.mark.parametrize(
    ("component", "reference", "reduction"),
    [
        ("grpo", clipped, token_mean),  # DAPO with GRPO's reduction
        ("dapo", clipped, sequence_mean),
        ("bnpo", clipped, token_mean),  # the mean of its own micro-batch
        ("dr_grpo", clipped, sequence_mean),
        ("cispo", cispo_gradient, sequence_mean),
    ],
)
def test_another_reduction_is_a_violation(component: Any, reference: Any, reduction: Any) -> None:
    same_as("loss", component, reference)
    with pytest.raises(Violation, match="its gradient of the step is") as caught:
        same_as("loss", component, reference, reduction)
    assert "Reduction." in caught.value.advice


def test_a_function_of_another_kind_or_with_an_unknown_parameter_is_refused() -> None:
    problem = problem_of(same_as, "loss", "dapo", clipped, lambda loss: 0.0)
    assert (problem.given, problem.nearest) == ("loss", "losses")
    problem = problem_of(same_as, "loss", "dapo", lambda logprob: [])
    assert (problem.key, problem.given, problem.nearest) == ("reference", "logprob", "logprobs")
    assert problem_of(same_as, "loss", "dapo", lambda x: []).nearest == ""
    assert problem_of(same_as, "advantage", "group", group, token_mean).key == "reduction"
    kinds = "loss, advantage, correction, reward, scheduler"
    assert problem_of(same_as, "generator", "hf", clipped).allowed == kinds


def test_the_smallest_example_is_shown() -> None:
    """The formula has another upper clip: one token is enough to see it."""
    with pytest.raises(Violation) as caught:
        same_as("loss", "dapo", paper.clipped(0.2, 0.25))
    lines = caught.value.example.splitlines()
    assert [line.split()[0] for line in lines] == [
        "logprobs", "old_logprobs", "advantages", "token_mask", "loss", "reference",
    ]  # fmt: skip
    assert all(len(line.split()) == 3 for line in lines)


def test_a_reference_of_another_length_is_a_violation() -> None:
    with pytest.raises(Violation, match=r"\[1\] numbers for sequences of \[2\] tokens"):
        same_as("loss", "dapo", lambda logprobs, old_logprobs, advantages: clipped(
            logprobs[:1], old_logprobs[:1], advantages[:1]
        ))  # fmt: skip


@pytest.mark.parametrize(
    ("suite", "component", "members", "told"),
    [
        (LossConformance, "dapo", {"reference": clipped}, "its reduction is not compared"),
        (LossConformance, "dapo", {"reference": clipped, "reduction": token_mean}, ""),
        (AdvantageConformance, "group", {"reference": group}, ""),
        (CorrectionConformance, "token-truncate", {"reference": token_truncate}, ""),
    ],
)
def test_a_suite_has_the_check_where_it_has_a_reference(
    suite: Any, component: str, members: dict[str, Any], told: str
) -> None:
    without = type("Suite", (suite,), {"component": component})
    having = type("Suite", (without,), {name: staticmethod(formula) for name, formula in members.items()})
    [outcome] = [each for each in outcomes(having()) if each.check == "test_same_as_reference"]
    assert (outcome.status, outcome.what.partition(":")[0]) == ("passed", told)
    assert "test_same_as_reference" not in {check.name for check in without().checks()}
