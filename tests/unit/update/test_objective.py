"""The loss of a micro-batch by hand: inputs, terms, corrections, tokens left out, and components that are none.

Numbers that are not finite lie at the masked position of every input, and reach nothing.
"""

from __future__ import annotations

import math
import signal
import sys
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.handlers import handlers_kept
from torch import Tensor

from grpox.config import TrainConfig
from grpox.contracts import LossInputs, LossOutput, Reduction, Rollout
from grpox.errors import RunFailed
from grpox.policy.batch import collate, samples_of
from grpox.runtime.signals import Terminated, first_signal_waits, install_handlers
from grpox.update.objective import KL_ESTIMATORS, MicroBatchLoss, StepLoss, build_inputs
from grpox.update.packing import LossTraits, StepTotals

NAN, INF = math.nan, math.inf
# Two completions of three and two tokens, of a step of five tokens and two completions.
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
TOTALS = StepTotals(tokens=5, sequences=2, micro_batches=1, max_completion_length=3)


def f64(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


PI = f64([-1.0, -2.0, -0.5], [-0.3, -1.5, NAN])
OLD = f64([-1.1, -1.8, -0.5], [-0.5, -1.4, INF])
MU = f64([-1.3, -1.7, NAN], [-0.4, -INF, -7.0])
REFERENCE = f64([-1.0, -1.0, -1.5], [-0.3, -1.5, NAN])
ENTROPY = f64([0.5, 1.0, 0.25], [0.75, 1.5, NAN])
ADVANTAGES = torch.tensor([1.0, -1.0], dtype=torch.float64)
NEEDED: dict[str, Any] = {
    "reference_logprobs": REFERENCE,
    "sampler_logprobs": MU,
    "rewards": torch.tensor([[1.0], [NAN]]),
    "group_ids": torch.tensor([4, 4]),
    "sequence_ids": torch.tensor([16, 17]),
    "columns": {"answer": ["yes", "no"]},
}


class LogPi:
    """-A log pi, of gradient -A times the token's weight; keeps its inputs, and writes NaN where masked."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        self.given = inputs
        holes = torch.where(inputs.token_mask, 1.0, NAN)
        return LossOutput(-inputs.advantages * inputs.logprobs * holes, {"mine": inputs.logprobs * 2 * holes})


class BySequence(LogPi):
    reduction = Reduction.SEQUENCE_MEAN


class OfEntropy(LogPi):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.entropy is not None
        return LossOutput(inputs.logprobs * inputs.entropy)


class Folding(LogPi):
    folds_correction = True

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.correction_weights is not None
        return LossOutput(super().per_token(inputs).loss * inputs.correction_weights)


class Given:
    """A correction that keeps what it was given, and returns what it was made with."""

    def __init__(self, weights: Tensor | None = None, keep: Any = None) -> None:
        self.weights, self.keep = weights, keep

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        self.given = old, sampler, mask
        weights = torch.ones_like(old) if self.weights is None else self.weights
        return weights, mask if self.keep is None else torch.tensor(self.keep).bool()


Gradient = Tensor | None


def taken(
    loss: Any, correction: Any = None, given: dict[str, Any] | None = None, keep: Any = None, **settings: Any
) -> tuple[MicroBatchLoss, Gradient, Gradient]:
    """The loss of the micro-batch, and the gradients of log pi and of the entropy."""
    held: dict[str, Any] = {"logprobs": PI, "entropy": ENTROPY, "advantages": ADVANTAGES} | (given or {})
    leaves = [held[name].clone().requires_grad_() for name in ("logprobs", "entropy")]
    held |= {"logprobs": leaves[0], "entropy": leaves[1]}
    keep = None if keep is None else torch.tensor(keep).bool()
    step_loss = StepLoss(loss, correction or Given(), **settings)
    inputs = build_inputs(token_mask=MASK, **held)
    made = step_loss.micro_batch(inputs, TOTALS, held.get("sampler_logprobs"), keep)
    made.loss.backward()  # type: ignore[no-untyped-call]
    assert made.policy_share is None or not made.policy_share.requires_grad
    return made, leaves[0].grad, leaves[1].grad


def same(found: Any, expected: Any) -> None:
    found = torch.as_tensor(found, dtype=torch.float64).detach()
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_the_step_loss_of_a_run_has_the_runs_settings() -> None:
    loss, correction = LogPi(), Given()
    train = TrainConfig(beta=0.1, kl="k2", entropy_coef=0.2, off_policy_mask_threshold=0.3)
    assert StepLoss.of(loss, correction, train) == StepLoss(loss, correction, 0.1, "k2", 0.2, 0.3)
    assert StepLoss.of(loss, correction, train, ["rewards"]).needs == {"rewards"}


# -- The inputs of a loss --------------------------------------------------------------------------------


def test_a_loss_is_given_neutral_values_where_masked_and_log_pi_alone_has_a_gradient() -> None:
    loss = LogPi()
    taken(loss, Given(f64([3.0] * 3, [0.5, 0.5, NAN])), NEEDED | {"old_logprobs": OLD})
    given = loss.given
    same(given.logprobs, [[-1.0, -2.0, -0.5], [-0.3, -1.5, 0.0]])
    same(given.old_logprobs, [[-1.1, -1.8, -0.5], [-0.5, -1.4, 0.0]])
    same(given.advantages, [[1, 1, 1], [-1, -1, 0]])
    same(given.entropy, [[0.5, 1.0, 0.25], [0.75, 1.5, 0.0]])
    assert torch.equal(given.token_mask, MASK)
    assert given.correction_weights is None
    tensors = {name: value for name, value in vars(given).items() if isinstance(value, Tensor)}
    assert [name for name, value in tensors.items() if value.requires_grad] == ["logprobs"]
    assert [name for name in NEEDED if getattr(given, name) is not None] == []


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_a_loss_is_given_what_it_asks_for_and_nothing_else(name: str) -> None:
    loss, needs = LogPi(), frozenset([name])
    taken(loss, given=NEEDED | {"old_logprobs": OLD}, needs=needs)
    assert [each for each in NEEDED if getattr(loss.given, each) is not None] == [name]
    found = getattr(loss.given, name)
    expected = {
        "reference_logprobs": REFERENCE.nan_to_num(0.0),
        # Unknown ones are pi_old; what is known stays, however unlikely.
        "sampler_logprobs": f64([-1.3, -1.7, -0.5], [-0.4, -INF, 0.0]),
    }
    if name in expected:
        assert torch.equal(found, expected[name])
        found = None
    assert found is None or found is NEEDED[name]
    if name == "sampler_logprobs":
        taken(loss, given={"old_logprobs": OLD}, needs=needs)
        same(loss.given.sampler_logprobs, [[-1.1, -1.8, -0.5], [-0.5, -1.4, 0.0]])
    else:
        with pytest.raises(RunFailed, match=f"'LogPi' needs {name}"):
            taken(loss, given=NEEDED | {name: None}, needs=needs)


def test_an_advantage_of_each_token_is_its_own() -> None:
    advantages = f64([2.0, -1.0, 0.5], [1.0, 3.0, NAN])
    made, gradient, _ = taken(LogPi(), given={"advantages": advantages})
    assert made.loss.item() == pytest.approx((2 - 2 + 0.25 + 0.3 + 4.5) / 5)
    same(gradient, [[-0.4, 0.2, -0.1], [-0.2, -0.6, 0.0]])


def test_before_the_first_update_the_old_policy_is_the_policy_without_its_gradient() -> None:
    loss, correction = LogPi(), Given()
    made, _, _ = taken(loss, correction)
    assert not correction.given[0].requires_grad
    same(correction.given[0], PI.nan_to_num(0.0))
    same(made.diagnostics["ratio"], [[1, 1, 1], [1, 1, 0]])
    same(made.diagnostics["kl_old"], [[0.0] * 3] * 2)


# -- Terms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "weights"),
    [(LogPi(), [[-1 / 5] * 3, [1 / 5, 1 / 5, 0]]), (BySequence(), [[-1 / 6] * 3, [1 / 4, 1 / 4, 0]])],
    ids=["tokens", "sequences"],
)
def test_weights_are_of_the_losss_reduction_and_the_bonus_is_a_mean_of_tokens(loss: Any, weights: Any) -> None:
    """In the dtype of log pi. The entropies add up to 4, of 5 tokens."""
    without, gradient, of_entropy = taken(loss)
    torch.testing.assert_close(gradient, f64(*weights), rtol=1e-15, atol=0)
    assert (of_entropy, without.policy_share) == (None, None)
    with_bonus, gradient, of_entropy = taken(loss, entropy_coef=0.1)
    assert (with_bonus.loss - without.loss).item() == pytest.approx(-0.1 * 4 / 5)
    torch.testing.assert_close(gradient, f64(*weights), rtol=1e-15, atol=0)
    same(of_entropy, [[-0.02] * 3, [-0.02, -0.02, 0]])
    same(with_bonus.policy_share, without.loss)


def test_the_entropy_that_a_loss_uses_has_a_gradient_only_if_it_asks_for_it() -> None:
    slopes = (PI / 5).nan_to_num(0.0)
    for needs, bonus, expected in (
        (["entropy"], 0.0, None),
        (["entropy_gradient"], 0.0, slopes),
        ([], 0.1, -0.02 * MASK.double()),
        (["entropy_gradient"], 0.1, slopes - 0.02 * MASK.double()),
    ):
        step_loss = StepLoss(OfEntropy(), Given(), entropy_coef=bonus, needs=frozenset(needs))
        assert step_loss.entropy_gradient == (expected is not None)
        made, gradient, of_entropy = taken(OfEntropy(), entropy_coef=bonus, needs=frozenset(needs))
        same(gradient, ENTROPY.nan_to_num(0.0) / 5)
        assert (of_entropy is None) == (expected is None)
        if expected is not None:
            same(of_entropy, expected)
        assert made.loss.item() == pytest.approx((-0.5 - 2 - 0.125 - 0.225 - 2.25) / 5 - bonus * 4 / 5)


@pytest.mark.parametrize(
    ("kl", "expected", "slopes"),
    [
        # rho = log ref - log pi is 0, 1, -1, 0, 0; pi / pi_old is e^-0.2 at the second token, 1 at the third.
        ("k1", [0, -1, 1], [1, 1, 1]),
        ("k2", [0, 0.5, 0.5], [0, -1, 1]),
        ("k3", [0, math.e - 2, 1 / math.e], [0, 1 - math.e, 1 - 1 / math.e]),
        ("unbiased", [0, math.exp(-0.2) * (math.e - 2), 1 / math.e], [0, -math.exp(-0.2), 1]),
    ],
)
def test_the_kl_by_hand(kl: str, expected: list[float], slopes: list[float]) -> None:
    """Also at a token whose policy term is left out."""
    keep = [[0, 1, 1], [1, 1, 1]]
    given = {"reference_logprobs": REFERENCE, "old_logprobs": OLD}
    without, plain, _ = taken(LogPi(), given=given, keep=keep)
    made, gradient, _ = taken(LogPi(), given=given, keep=keep, beta=0.1, kl=kl)
    assert "kl" not in without.diagnostics
    same(made.diagnostics["kl"], [expected, [0.0] * 3])
    assert not made.diagnostics["kl"].requires_grad
    assert (made.loss - without.loss).item() == pytest.approx(0.1 * sum(expected) / 5)
    assert plain is not None
    assert gradient is not None
    same(gradient[0] - plain[0], [0.1 * slope / 5 for slope in slopes])
    same(made.policy_share, without.loss)
    same(without.loss, (2 + 0.5 - 0.3 - 1.5) / 5)
    same(made.policy_loss, [[1.0, 2.0, 0.5], [-0.3, -1.5, 0.0]])
    assert not made.policy_loss.requires_grad


def test_a_reference_that_a_loss_needs_is_measured_by_k3_and_adds_nothing_even_where_it_is_infinite() -> None:
    far = torch.where(REFERENCE == -1.5, 1000.0, REFERENCE)
    made, gradient, _ = taken(
        LogPi(), given={"reference_logprobs": far}, needs=frozenset(["reference_logprobs"])
    )
    same(made.diagnostics["kl"], [[0, math.e - 2, INF], [0, INF, 0]])
    same(gradient, [[-0.2] * 3, [0.2, 0.2, 0]])
    assert made.policy_share is None


def test_diagnostics_by_hand_without_gradient_and_0_where_masked() -> None:
    made, _, _ = taken(LogPi(), given={"old_logprobs": OLD})
    assert sorted(made.diagnostics) == ["kl_old", "mine", "ratio"]
    same(made.diagnostics["mine"], [[-2.0, -4.0, -1.0], [-0.6, -3.0, 0.0]])
    rho = [[0.1, -0.2, 0.0], [0.2, -0.1]]  # log pi - log pi_old, as the tokens are pi_old's
    same(made.diagnostics["ratio"], [list(map(math.exp, rho[0])), [*map(math.exp, rho[1]), 0.0]])
    k3 = [[math.exp(each) - each - 1 for each in row] for row in rho]
    same(made.diagnostics["kl_old"], [k3[0], [*k3[1], 0.0]])
    assert not any(values.requires_grad for values in made.diagnostics.values())


# -- The KL estimators -----------------------------------------------------------------------------------

LOGITS, OTHER, STALE = f64([0.3, -1.2, 0.8, 0.1], [0.1, 0.4, -0.5, 0.2], [0.9, -0.2, 0.1, -0.6])


def expectation(kind: str, old: Tensor) -> tuple[float, Tensor]:
    """Over tokens that pi_old samples, and its gradient by the logits; `exact`: the KL itself."""
    logits = LOGITS.clone().requires_grad_()
    logprobs, reference, sampled = (torch.log_softmax(x, -1) for x in (logits, OTHER, old))
    if kind == "exact":
        value = (logprobs.exp() * (logprobs - reference)).sum()
    else:
        value = (sampled.exp() * KL_ESTIMATORS[kind](reference, logprobs, sampled)).sum()
    return value.item(), torch.autograd.grad(value, logits)[0]


def test_estimators_have_the_value_or_the_gradient_of_the_kl() -> None:
    kl, slope = expectation("exact", LOGITS)
    for kind in ("k1", "k3", "unbiased"):
        assert expectation(kind, LOGITS)[0] == pytest.approx(kl, rel=1e-12)
    torch.testing.assert_close(expectation("k2", LOGITS)[1], slope)
    torch.testing.assert_close(expectation("k1", LOGITS)[1], torch.zeros(4, dtype=torch.float64))
    value, gradient = expectation("unbiased", STALE)  # off-policy too
    assert value == pytest.approx(kl, rel=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(expectation("k3", STALE)[1], slope, atol=1e-3)


# -- Corrections -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [LogPi(), Folding()], ids=["by the core", "by the loss"])
def test_a_correction_scales_kept_tokens_and_drops_the_others(loss: Any) -> None:
    weights = f64([0.5, 3.0, NAN], [2.0, 1.0, 7.0]).requires_grad_()
    correction = Given(weights, [[1, 1, 0], [1, 0, 0]])
    made, gradient, _ = taken(loss, correction)
    same(gradient, [[-0.1, -0.6, 0], [0.4, 0, 0]])
    same(made.terms()["correction R"], [[0.5, 3.0, 0], [2.0, 0, 0]])
    assert made.correction is not None
    torch.testing.assert_close(made.correction[0], weights.detach(), equal_nan=True)
    assert not made.correction[0].requires_grad
    same(made.correction[1], [[1, 1, 0], [1, 0, 0]])
    made, gradient, _ = taken(loss, Given(f64([1.0] * 3, [1.0, 2.0, NAN]), [[1, 1, 1]] * 2))  # NaN where masked
    assert made.loss.item() == pytest.approx((1 + 2 + 0.5 - 0.3 - 2 * 1.5) / 5)
    same(gradient, [[-0.2] * 3, [0.2, 0.4, 0]])
    if isinstance(loss, Folding):
        same(loss.given.correction_weights, [[1, 1, 1], [1, 2, 0]])


def test_a_correction_is_given_zeros_where_masked_and_pi_old_where_mu_is_unknown() -> None:
    correction = Given()
    taken(LogPi(), correction, {"old_logprobs": OLD, "sampler_logprobs": MU})
    same(correction.given[0], [[-1.1, -1.8, -0.5], [-0.5, -1.4, 0.0]])
    same(correction.given[1], [[-1.3, -1.7, -0.5], [-0.4, -INF, 0.0]])
    assert torch.equal(correction.given[2], MASK)


# -- Tokens that are left out ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold", "keep", "counted"),
    [
        (None, None, [[1, 1, 1], [1, 1, 0]]),
        (None, [[1, 0, 1], [1, 1, 1]], [[1, 0, 1], [1, 1, 0]]),
        # By (1/n) sum of log mu - log pi the second completion is (-0.1 + -0.4) / 2 = -0.25 away.
        (0.0, None, [[1, 1, 1], [1, 1, 0]]),
        (-0.3, None, [[1, 1, 1], [0, 0, 0]]),
        (-0.3, [[1, 0, 1], [1, 1, 1]], [[1, 0, 1], [0, 0, 0]]),
    ],
)
def test_a_token_counts_that_both_masks_keep(threshold: float | None, keep: Any, counted: Any) -> None:
    sampler = f64([-1.3, -1.7, NAN], [-0.4, -1.9, NAN])
    made, gradient, _ = taken(
        LogPi(), given={"sampler_logprobs": sampler}, keep=keep, off_policy_mask_threshold=threshold
    )
    same(gradient, torch.tensor(counted) * f64([-0.2] * 3, [0.2] * 3))
    if threshold is None:
        assert made.off_policy_keep is None
    else:
        assert made.off_policy_keep is not None
        assert made.off_policy_keep[:, 0].tolist() == [True, threshold == 0.0]


# -- Components that are none ----------------------------------------------------------------------------


def per_token(make: Any) -> Any:
    class Mine(LogPi):
        def per_token(self, inputs: LossInputs) -> LossOutput:
            made: LossOutput = make(inputs)
            return made

    inputs = build_inputs(torch.zeros(2, 3).requires_grad_(), MASK, torch.ones(2), torch.zeros(2, 3))
    step_loss = StepLoss(Mine(), Given(), needs=frozenset(["rewards"]))
    return step_loss.micro_batch(replace(inputs, rewards=torch.ones(2, 1)), TOTALS)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda i: LossOutput(i.logprobs.mean()), r"its loss has shape \(\); \[B, T\] is \(2, 3\)"),
        (lambda i: LossOutput(i.logprobs.sum(1, keepdim=True)), r"its loss has shape \(2, 1\)"),
        (lambda i: LossOutput(i.logprobs.sum(1)), r"its loss has shape \(2,\)"),
        (lambda i: LossOutput(i.logprobs.detach()), "does not depend on the log-probabilities"),
        (lambda i: i.logprobs, "returned a Tensor; per_token returns a LossOutput"),
        (lambda i: LossOutput(3.0), "its loss is a float, not a tensor"),
        (lambda i: LossOutput(-i.logprobs, {"x": i.logprobs[:1]}), r"diagnostic 'x' has shape \(1, 3\)"),
        (lambda i: LossOutput(-i.logprobs, {"loss": i.logprobs}), "'loss' is a metric of grpox's own"),
        (lambda i: LossOutput(-i.logprobs, {"sampling/kl": i.logprobs}), "'sampling/kl' is a metric"),
        (lambda i: 1 / 0, r"raised ZeroDivisionError: division by zero \(test_objective.py:\d+\)"),
        (lambda i: sys.exit(0), r"raised SystemExit: 0 \(test_objective.py:\d+\)"),
        (lambda i: LossOutput(-i.logprobs * i.advantages.mul_(2)), "not change advantages in place"),
        (lambda i: LossOutput(-i.logprobs * i.token_mask.logical_not_()), "not change token_mask in place"),
        (lambda i: LossOutput(i.old_logprobs.sub_(i.logprobs)), "not change old_logprobs in place"),
        (lambda i: LossOutput(-i.logprobs * i.rewards.add_(1)), "not change rewards in place"),
    ],
)
def test_a_wrong_loss_is_named(make: Any, told: str) -> None:
    with pytest.raises(RunFailed, match=f"^loss 'Mine'.*{told}"):
        per_token(make)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda old, mask: 1 / 0, r"raised ZeroDivisionError: division by zero \(test_objective.py"),
        (lambda old, mask: old, r"returned Tensor, not \(weights, keep\)"),
        (lambda old, mask: (old, mask, mask), r"returned tuple, not \(weights, keep\)"),
        (lambda old, mask: (2.0, mask), r"returned tuple, not \(weights, keep\)"),
        (lambda old, mask: (old, 2.0), r"returned tuple, not \(weights, keep\)"),
        (lambda old, mask: (old[:, :1], mask), r"returned weights \(2, 1\) and keep \(2, 3\) of torch.bool"),
        (lambda old, mask: (old, mask[:1]), r"returned weights \(2, 3\) and keep \(1, 3\)"),
        (lambda old, mask: (old, old), r"returned weights \(2, 3\) and keep \(2, 3\) of torch.float64"),
        (lambda old, mask: (old.exp_(), mask), "must not change old"),
    ],
)
def test_a_correction_that_is_none_is_named(make: Any, told: str) -> None:
    class Mine:
        def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Any:
            return make(old, mask)

    with pytest.raises(RunFailed, match=f"correction 'Mine' {told}"):
        taken(LogPi(), Mine(), {"old_logprobs": OLD})


def test_an_interrupt_of_a_loss_ends_the_run_by_name_and_a_signal_as_a_signal() -> None:
    def interrupts(inputs: LossInputs) -> None:
        raise KeyboardInterrupt

    def wraps(inputs: LossInputs) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            raise RuntimeError("wrapped") from error

    with handlers_kept():
        install_handlers()
        try:
            with pytest.raises(RunFailed, match=r"loss 'Mine' raised KeyboardInterrupt \(test_objective"):
                per_token(interrupts)
            with first_signal_waits(), pytest.raises(RunFailed, match="loss 'Mine' raised ZeroDivisionError"):
                per_token(lambda inputs: signal.raise_signal(signal.SIGTERM) or 1 / 0)
            with pytest.raises(Terminated):
                per_token(wraps)
        finally:
            install_handlers()  # forgets the signals


# -- What samples and losses declare ---------------------------------------------------------------------


def test_a_batch_holds_its_own_copies_of_what_its_samples_carry() -> None:
    rollouts = [Rollout(0, 0, (1,), (2, 3), "stop", 0), Rollout(0, 1, (1,), (4,), "stop", 0)]
    samples = samples_of(rollouts, [1, -1])
    for row, sample in enumerate(samples):
        sample.rewards = np.array([row, NAN], np.float32)
        sample.group_id, sample.sequence_id = 7, 2**40 + row
        sample.columns = {"answer": str(row), "tags": ["a"]}
    batch = collate(samples, torch.device("cpu"))
    torch.testing.assert_close(batch.rewards, torch.tensor([[0.0, NAN], [1.0, NAN]]), equal_nan=True)
    ids = [batch.ids(name) for name in ("group_id", "sequence_id")]
    assert [None if each is None else each.tolist() for each in ids] == [[7, 7], [2**40, 2**40 + 1]]
    assert batch.columns == {"answer": ["0", "1"], "tags": [["a"], ["a"]]}
    batch.columns["tags"][0].append("b")
    assert batch.columns["tags"] == [["a"], ["a"]]


def test_declarations_are_read_from_a_loss_or_its_class_and_default_to_false() -> None:
    class Own(Folding):
        reduction = Reduction.SEQUENCE_SUM

        def __init__(self) -> None:
            self.zero_at_zero_advantage = True

    assert LossTraits.of(LogPi()) == LossTraits(Reduction.TOKEN_MEAN, False, False)
    assert LossTraits.of(Own()) == LossTraits(Reduction.SEQUENCE_SUM, True, True)
