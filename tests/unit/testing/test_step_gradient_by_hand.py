"""Steps small enough to work out on paper, and ratios far beyond all bounds.

grpox and the float64 reference both have to give these numbers. In the tables w is a token's ratio, and a
gradient is that in log pi of the token, where d w / d log pi = w.
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


# -- Clipped ratios and the reductions -------------------------------------------------------------------
#
# clip_low = clip_high = 0.2:
#
#   A    w     w A   clip(w) A   loss   gradient
#   +1   1.5   1.5    1.2        -1.2    0
#        0.5   0.5    0.8        -0.5   -0.5
#   -2   0.5  -1.0   -1.6         1.6    0
#   -1   1.1  -1.1   -1.1         1.1    1.1
#        1.3  -1.3   -1.2         1.3    1.3
#        2.0  -2.0   -1.2         2.0    2.0
#
# Their sums are -1.7, 1.6 and 4.4, together 4.3.

RATIOS = [[1.5, 0.5], [0.5], [1.1, 1.3, 2.0]]
ADVANTAGES = [1.0, -2.0, -1.0]
TOKENS = [[0, -0.5 / 6], [0], [1.1 / 6, 1.3 / 6, 2.0 / 6]]


@pytest.mark.parametrize(
    ("loss", "expected", "gradients"),
    [
        ("dapo", 4.3 / 6, TOKENS),
        ("grpo", (-1.7 / 2 + 1.6 / 1 + 4.4 / 3) / 3, [[0, -0.5 / 6], [0], [1.1 / 9, 1.3 / 9, 2.0 / 9]]),
        ("dr_grpo", 4.3 / 12, [[0, -0.5 / 12], [0], [1.1 / 12, 1.3 / 12, 2.0 / 12]]),
        # The first token's -1.2 becomes -1.28; the third row's min is w A as before.
        ({"name": "dapo", "clip_low": 0.2, "clip_high": 0.28}, 4.22 / 6, TOKENS),
        # clip_high is clip_low: every w but 2.0 is inside [0.4, 1.6], and that one's A is negative.
        ({"name": "dapo", "clip_low": 0.6}, 3.4 / 6, [[-1.5 / 6, -0.5 / 6], [1.0 / 6], TOKENS[2]]),
        # The last token's loss is 1.6 instead of 2.0, without gradient; 1.5 with A > 0 stays at 1.2.
        ({"name": "dapo", "delta": 1.6}, 3.9 / 6, [*TOKENS[:2], [1.1 / 6, 1.3 / 6, 0]]),
    ],
    ids=str,
)
def test_clipped_ratios(step: Step, loss: Any, expected: float, gradients: list[list[float]]) -> None:
    check(step(loss, [micro_batch(RATIOS, ADVANTAGES)], max_completion_length=4), expected, *gradients)


@pytest.mark.parametrize("ranks", [1, 2])
def test_bnpo_divides_by_the_tokens_of_a_micro_batch(step: Step, ranks: int) -> None:
    """Micro-batches of two tokens with the sum -1.7 and of four with 6.0: the means are -0.85 and 1.5."""
    parts = [micro_batch(RATIOS[:1], ADVANTAGES[:1]), micro_batch(RATIOS[1:], ADVANTAGES[1:])]
    result = step("bnpo", parts, max_completion_length=4, world_size=ranks)
    check(result, (-0.85 + 1.5) / 2, [0, -0.5 / 4], [0], [1.1 / 8, 1.3 / 8, 2.0 / 8])


def test_sequence_level_is_the_geometric_mean(step: Step) -> None:
    """
    w        w_i             A    loss of each token        gradient of each token
    4, 1     sqrt(4) = 2    -1    2                         w_i/2 from each of the two, 2 in all
    2, 0.5   sqrt(1) = 1    +1    -1                        -1/2 from each, -1 in all
    3        3              +2    -1.2 * 2, clipped         0
    """
    batch = micro_batch([[4, 1], [2, 0.5], [3]], [-1, 1, 2])
    gspo = {"name": "grpo", "level": "sequence"}
    by_tokens = {"name": "dapo", "level": "sequence"}
    check(step(gspo, [batch], max_completion_length=4), (2 - 1 - 2.4) / 3, [1 / 3] * 2, [-1 / 6] * 2, [0])
    check(step(by_tokens, [batch], max_completion_length=4), (4 - 2 - 2.4) / 5, [2 / 5] * 2, [-1 / 5] * 2, [0])


def test_a_completion_without_tokens_counts_as_one(step: Step) -> None:
    """Two completions, one of them empty: -A at w = 1 is halved, but dapo has one token to divide by."""
    batch = micro_batch([[1.0], []], [3.0, 5.0])
    check(step("grpo", [batch], max_completion_length=4), -3 / 2, [-3 / 2], [])
    check(step("dr_grpo", [batch], max_completion_length=4), -3 / 8, [-3 / 8], [])
    check(step("dapo", [batch], max_completion_length=4), -3, [-3], [])


# -- cispo, sapo -----------------------------------------------------------------------------------------


def test_cispo_weights_log_pi(step: Step) -> None:
    """
    A    w     min(w, 5)   log pi   loss = -weight A log pi   gradient = -weight A
    +1   8     5           -1        5                        -5
         0.1   0.1         -2        0.2                      -0.1
    -2   2     2           -0.5     -2                         4
    """
    batch = micro_batch([[8, 0.1], [2]], [1, -2], logprobs=[[-1, -2], [-0.5]])
    check(step("cispo", [batch], max_completion_length=4), 3.2 / 3, [-5 / 3, -0.1 / 3], [4 / 3])
    capped = step({"name": "cispo", "cap": 1.5}, [batch], max_completion_length=4)
    check(capped, (1.5 + 0.2 - 1.5) / 3, [-1.5 / 3, -0.1 / 3], [3 / 3])


def test_cispo_reproduces_a_policy_gradient_worked_by_hand(step: Step) -> None:
    """Rewards [2, 1, 1] have mean 4/3 and deviation sqrt(2)/3, so A = [sqrt(2), -sqrt(2)/2, -sqrt(2)/2].

    With w = 1 and completions of one token the loss is -(1/3) sum A log pi
    = -(sqrt(2)/3) (-2.30 + 1.20/2 + 1.61/2) = 0.895 sqrt(2)/3 = 0.42191.
    A second prompt with rewards [1, 1, 1] has A = 0 and adds only to the divisor: 0.21095.
    """
    root = math.sqrt(2)
    rows, logprobs = [[1.0]] * 3, [[-2.30], [-1.20], [-1.61]]
    first = micro_batch(rows, [root, -root / 2, -root / 2], logprobs=logprobs)
    second = micro_batch(rows, [0, 0, 0], logprobs=logprobs)
    alone = step("cispo", [first], max_completion_length=1)
    both = step("cispo", [first, second], max_completion_length=1, world_size=2)
    check(alone, 0.895 * root / 3, [-root / 3], [root / 6], [root / 6])
    check(both, 0.895 * root / 6, [-root / 6], [root / 12], [root / 12], [0], [0], [0])


def test_sapo_gates_smoothly(step: Step) -> None:
    """sigmoid(ln 3) = 3/4, and its slope there is 3/16.

    A    tau   w             loss = -A (4/tau) 3/4   slope in w = -A 4 (3/16)
    +2   1     1 + ln 3      -6                      -3/2
    -1   2     1 + ln 3/2     3/2                     3/4
    """
    up, down = 1 + math.log(3), 1 + math.log(3) / 2
    batch = micro_batch([[up], [down]], [2, -1])
    result = step({"name": "sapo", "tau_pos": 1.0, "tau_neg": 2.0}, [batch], max_completion_length=4)
    check(result, (-6 + 1.5) / 2, [-1.5 * up / 2], [0.75 * down / 2])
    # w = 1: -2 A/tau at each token, so the two of the first count as one; tau is 1 and 1.05.
    result = step("sapo", [micro_batch([[1, 1], [1]], [3, -1])], max_completion_length=4)
    check(result, (-6 + 2 / 1.05) / 2, [-3 / 4, -3 / 4], [1 / 2])


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
        ("sequence-truncate", [1.5, 1.25], [1.875, 1.875]),
        ("sequence-truncate", [1.5, 1.6], [2, 2]),
        ("sequence-mask", [2, 2], [0, 0]),
        ("geometric-mask", [2, 0.5], [2, 0.5]),
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
