"""KL and corrections in steps small enough to work out on paper, and ratios far beyond all bounds.

grpox and the float64 reference both have to give these numbers.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.reference import step as reference
from support.reference.worked import Step, check, micro_batch

from grpox import testing

LN2 = math.log(2)


@pytest.fixture(params=[testing.step_gradient, reference.step_gradient], ids=["grpox", "reference"])
def step(request: pytest.FixtureRequest) -> Step:
    given: Step = request.param
    return given


# -- KL --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "value", "gradient"),
    [
        # rho = ln 2, w = 1/2; the derivative of rho in log pi is -1
        ("k1", -LN2, 1.0),
        ("k2", LN2**2 / 2, -LN2),
        ("k3", 2 - LN2 - 1, -1.0),  # -exp(rho) + 1
        ("unbiased", (1 - LN2) / 2, (1 - LN2) / 2 - 1 / 2),  # w (k3 + its derivative)
    ],
)
def test_kl(step: Step, kl: str, value: float, gradient: float) -> None:
    """A = 0 leaves the KL term alone: one token of two is off the reference, and beta is 0.1."""
    batch = micro_batch([[0.5, 0.5]], [0], ref=[[2, 1]])
    still = 0.1 / 2 if kl == "k1" else 0.0  # k1 has slope 1 everywhere, the others 0 at rho = 0

    result = step("dapo", [batch], beta=0.1, kl=kl, max_completion_length=4)

    check(result, 0.1 * value / 2, [0.1 * gradient / 2, still])


def test_kl_is_reduced_as_the_loss_is(step: Step) -> None:
    """k1 = -ln 2 at two tokens and 0 at a third; A = 0. The sums are -2 ln 2 of two tokens and 0 of one."""
    batch = micro_batch([[1, 1], [1]], [0, 0], ref=[[2, 2], [1]])
    k1: dict[str, Any] = {"beta": 0.5, "kl": "k1", "max_completion_length": 4}

    check(step("dapo", [batch], **k1), -LN2 / 3, [0.5 / 3] * 2, [0.5 / 3])
    check(step("grpo", [batch], **k1), -LN2 / 4, [0.5 / 4] * 2, [0.5 / 2])
    check(step("dr_grpo", [batch], **k1), -LN2 / 8, [0.5 / 8] * 2, [0.5 / 8])


# -- Corrections -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correction", "ratios", "expected"),
    [
        ("none", [4, 0.4, 1], [1, 1, 1]),
        ("token-truncate", [4, 0.4, 1], [2, 0.4, 1]),
        ({"name": "token-truncate", "cap": 3.0}, [4, 0.4, 1], [3, 0.4, 1]),
        ("token-mask", [4, 0.4, 6], [4, 0, 0]),
        ({"name": "token-mask", "low": 0.25, "high": 3.0}, [4, 0.4, 6], [0, 0.4, 0]),
        ("sequence-truncate", [1.5, 1.25], [1.875, 1.875]),
        ("sequence-truncate", [1.5, 1.6], [2, 2]),
        ({"name": "sequence-truncate", "cap": 1.2}, [1.5, 1.6], [1.2, 1.2]),
        ("sequence-mask", [2, 1.25], [2.5, 2.5]),
        ("sequence-mask", [2, 2], [0, 0]),
        ("sequence-mask", [0.1, 0.1], [0.01, 0.01]),
        ({"name": "sequence-mask", "low": 0.5, "high": 5.0}, [2, 2], [4, 4]),
        ({"name": "sequence-mask", "low": 0.5, "high": 5.0}, [0.1, 0.1], [0, 0]),
        # a product of 1 is a mean of 1; 1.01 in one token of four is a mean of 1.0025
        ("geometric-mask", [2, 0.5], [2, 0.5]),
        ("geometric-mask", [1.01, 1, 1, 1], [0, 0, 0, 0]),
        ({"name": "geometric-mask", "low": 0.9, "high": 1.01}, [1.01, 1, 1, 1], [1.01, 1, 1, 1]),
        ({"name": "geometric-mask", "low": 0.9, "high": 1.01}, [0.25, 0.5, 2], [0, 0, 0]),
        ({"name": "geometric-mask", "low": 0.5, "high": 1.01}, [0.25, 0.5, 2], [0.25, 0.5, 2]),
    ],
)
def test_correction(step: Step, correction: Any, ratios: list[float], expected: list[float]) -> None:
    """A = 1, w = 1: the loss of a token is -R, and so is its gradient; a dropped token still counts as one."""
    batch = micro_batch([[1.0] * len(ratios)], [1], correction=[ratios])

    result = step("dapo", [batch], correction=correction, max_completion_length=4)

    n = len(ratios)
    check(result, -sum(expected) / n, [-weight / n for weight in expected])


def test_a_correction_leaves_the_kl_alone(step: Step) -> None:
    """token-mask drops the first token (6 > 5) and weights the second by 4; k1 is -ln 2 at both."""
    batch = micro_batch([[1, 1]], [1], correction=[[6, 4]], ref=[[2, 2]])

    result = step("dapo", [batch], correction="token-mask", beta=0.5, kl="k1", max_completion_length=4)

    check(result, (-4 - LN2) / 2, [0.5 / 2, (-4 + 0.5) / 2])


@pytest.mark.parametrize("correction", ["token-truncate", "sequence-truncate"])
def test_an_unknown_sampler_logprob_corrects_nothing(step: Step, correction: str) -> None:
    """The second token's log mu is NaN: d = 0, so the sequence's product is the first token's 1.5."""
    batch = micro_batch([[1, 1]], [1], correction=[[1.5, 1.7]])
    batch["sampler_logprobs"][0, 1] = math.nan
    second = 1.5 if correction == "sequence-truncate" else 1.0

    result = step("dapo", [batch], correction=correction, max_completion_length=4)

    check(result, -(1.5 + second) / 2, [-1.5 / 2, -second / 2])


# -- Far out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_ratio", [25.0, 1000.0])
@pytest.mark.parametrize(
    ("loss", "advantage", "expected", "gradient"),
    [
        ("dapo", 1.0, -1.2, 0.0),
        ({"name": "dapo", "delta": 3.0}, -1.0, 3.0, 0.0),
        ({"name": "grpo", "level": "sequence"}, 1.0, -1.2, 0.0),
        ("cispo", 1.0, 5.0, -5.0),  # log pi is -1
        ("sapo", 1.0, -4.0, 0.0),  # the sigmoid is 1 and flat
        ("sapo", -1.0, 4 / 1.05, 0.0),
    ],
)
def test_a_ratio_beyond_all_bounds(
    log_ratio: float, loss: Any, advantage: float, expected: float, gradient: float
) -> None:
    """The bounded losses keep their bound, without an overflow on the branch that is not taken."""
    batch = micro_batch([[1.0]], [advantage])
    batch["old_logprobs"] = batch["logprobs"] - log_ratio

    check(testing.step_gradient(loss, [batch], max_completion_length=4), expected, [gradient])


@pytest.mark.parametrize("gap", [60.0, 1000.0, math.inf])
@pytest.mark.parametrize(
    ("correction", "weight"),
    [
        ("token-truncate", 2.0),
        ("token-mask", 0.0),
        ("sequence-truncate", 2.0),
        ("sequence-mask", 0.0),
        ("geometric-mask", 0.0),
    ],
)
def test_a_sampler_that_thought_a_token_impossible(correction: str, weight: float, gap: float) -> None:
    """pi_old/mu is e^60 or more."""
    batch = micro_batch([[1.0]], [1.0])
    batch["sampler_logprobs"] = batch["old_logprobs"] - gap

    result = testing.step_gradient("dapo", [batch], correction=correction, max_completion_length=4)

    check(result, -weight, [-weight])
