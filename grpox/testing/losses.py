"""What every policy loss must hold to, checked on CPU in float64 through the core that trains.

from grpox.testing import LossConformance

class TestMine(LossConformance):
    component = "mine"
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor

from grpox.contracts import LossInputs, Reduction
from grpox.errors import RunFailed
from grpox.testing.conformance import Conformance, Violation
from grpox.testing.loss_examples import (
    Measured,
    close,
    columns,
    example,
    examples,
    leaf,
    leaves,
    mapped,
    masked,
    measured_on,
    neutral,
    padded,
    poisoned,
    random_numbers,
    rows,
    shown,
    slope,
    step_gradient_of,
    step_gradient_on,
    tensors,
    worst,
)
from grpox.update.objective import per_token_loss

LARGEST_LOG_RATIO = 20.0
BFLOAT16_ERROR = 0.05
"""Of the largest loss: some six roundings to eight bits of mantissa."""
OPTIONAL = {"entropy": "needs=('entropy',)", "correction_weights": "folds_correction = True"}
"""What is None unless the loss declares it, and the declaration."""


class LossConformance(Conformance):
    """The checks of a policy loss."""

    kind = "loss"

    # -- Whether it is a loss ----------------------------------------------------------------------------

    def test_runs_on_what_it_declares(self) -> None:
        """Runs on what it declares to need, and returns one number for each token."""
        loss = self.build()
        for inputs in self._examples():
            try:
                per_token_loss(loss, leaf(inputs))
            except RunFailed as error:
                raise Violation(str(error), shown(inputs), self._undeclared(inputs)) from error

    def test_dtype(self) -> None:
        """Computes in the dtype of the log-probabilities."""
        loss = self.build()
        for dtype in (torch.float32, torch.float64):
            for inputs in self._examples(dtype):
                made = per_token_loss(loss, leaf(inputs)).loss.dtype
                if made != dtype:
                    advice = "a constant tensor of another dtype does that: use torch.full_like or numbers"
                    raise Violation(
                        f"for log-probabilities of {dtype} its loss is of {made}", shown(inputs), advice
                    )

    def test_pure(self) -> None:
        """Returns the same bits twice, and changes neither its inputs nor the global random numbers."""
        loss = self.build()
        for inputs in self._examples():
            given = leaf(inputs)
            kept, before = mapped(given, lambda tensor: tensor.detach().clone()), random_numbers()
            first = per_token_loss(loss, given).loss
            for name, tensor in tensors(given):
                if not torch.equal(tensor.detach(), getattr(kept, name)):
                    advice = (
                        f"the core uses {name} again: copy it before an in-place operation (x.mul_, x[...] =)"
                    )
                    raise Violation(f"it changes inputs.{name} in place", shown(kept), advice)
            if not torch.equal(first, per_token_loss(loss, given).loss):
                advice = "draw nothing at random and keep nothing from one call to the next"
                raise Violation(
                    "called twice on the same inputs, it returned two losses", shown(inputs), advice
                )
            if random_numbers() != before:
                advice = "the trainer's draws would depend on the loss: use a torch.Generator of its own"
                raise Violation("it draws from the global random numbers", shown(inputs), advice)

    # -- Its gradient ------------------------------------------------------------------------------------

    def test_gradient_reaches_log_probabilities_only(self) -> None:
        """Its gradient reaches the log-probabilities, and nothing that it keeps itself."""
        loss = self.build()
        for inputs in self._examples():
            given = leaf(inputs)
            others = [leaf for leaf in leaves(per_token_loss(loss, given).loss) if leaf is not given.logprobs]
            if others:
                what = f"its gradient reaches a tensor of its own, {tuple(others[0].shape)}"
                advice = "only the policy is trained: keep numbers, or tensors without requires_grad"
                raise Violation(what, shown(inputs), advice)

    def test_gradient_is_that_of_its_value(self) -> None:
        """Its gradient is that of its value, or for a surrogate the one it declares."""
        loss = self.build()
        surrogate = getattr(loss, "gradient", "value") == "surrogate"
        for inputs in self._examples():
            measured = measured_on(loss, inputs)
            if surrogate:
                expected, told = self._declared_gradient(loss, inputs), "expected_gradient says"
                advice = "one of the two is wrong: expected_gradient is d loss / d log pi of each token"
            else:
                expected, told = slope(loss, inputs), "the slope of its value is"
                advice = (
                    "a detach() hides a part of the value from autograd. Where that is the point, as in cispo, "
                    "declare gradient = 'surrogate' and write expected_gradient"
                )
            if not torch.allclose(measured.gradient, expected, rtol=1e-5, atol=1e-7):
                place = worst(measured.gradient, expected)
                got, wanted = measured.gradient[place].item(), expected[place].item()
                what = f"at token {place} autograd gives {got:.6g} and {told} {wanted:.6g}"
                raise Violation(what, shown(inputs, gradient=measured.gradient, expected=expected), advice)

    def test_on_policy_gradient(self) -> None:
        """On policy (pi = pi_old) its gradient is finite, and reported."""
        loss = self.build()
        inputs = self._example(1, 1)
        inputs = replace(inputs, old_logprobs=inputs.logprobs.clone())
        if inputs.correction_weights is not None:  # on policy the generator's distribution is pi_old as well
            inputs = replace(inputs, correction_weights=torch.ones_like(inputs.correction_weights))
        gradients = []
        for advantage in (1.0, -1.0):
            at = replace(inputs, advantages=torch.full_like(inputs.advantages, advantage))
            gradients.append(self._finite(loss, at).gradient.item() / advantage)
        told = " and ".join(f"{value:.4g} A" for value in dict.fromkeys(gradients))
        self.notes.append(f"d loss / d log pi at pi = pi_old is {told}; the policy gradient's is -1 A")

    def test_zero_advantage(self) -> None:
        """Where the advantage is 0 it adds no gradient, if it declares so."""
        loss = self.build()
        declared = getattr(loss, "zero_at_zero_advantage", False)
        for inputs in self._examples():
            at = replace(inputs, advantages=torch.zeros_like(inputs.advantages))
            if bool((measured_on(loss, at).gradient != 0).any()):
                if declared:
                    advice = "drop zero_at_zero_advantage, or make the loss a multiple of the advantage"
                    raise Violation("it trains on tokens whose advantage is 0", shown(at), advice)
                self.notes.append("trains on tokens whose advantage is 0, as an entropy term does")
                return
        if not declared:
            self.notes.append("could declare zero_at_zero_advantage = True")

    # -- The mask ----------------------------------------------------------------------------------------

    def test_masked_positions(self) -> None:
        """What stands at masked positions, NaN included, changes nothing."""
        loss = self.build()
        for inputs in self._examples():
            inputs = padded(inputs, 1)  # so that the smallest has a masked position as well
            clean = step_gradient_on(loss, inputs)
            for poison in (float("nan"), 1e4):
                given = poisoned(inputs, poison)
                gradient = step_gradient_on(loss, given)
                if bool((gradient[~inputs.token_mask] != 0).any()) or not torch.equal(gradient, clean):
                    what = f"with {poison:g} at masked positions its gradient is another one"
                    raise Violation(
                        what, shown(given, gradient=gradient), "use inputs.token_mask, never a value, to tell"
                    )

    def test_padding(self) -> None:
        """Padding a sequence, or a masked token within it, changes neither loss nor gradient of the others."""
        loss = self.build()
        for inputs in self._examples():
            measured = measured_on(loss, inputs)
            longer = measured_on(loss, padded(inputs, 2))
            tokens = inputs.token_mask.shape[1]
            self._same(
                measured,
                replace(longer, loss=longer.loss[:, :tokens], gradient=longer.gradient[:, :tokens]),
                inputs,
                "two masked positions at the end change its loss or gradient",
                "a mean over positions counts masked ones: weigh by inputs.token_mask and divide by its sum",
            )
            self._compacted(loss, inputs)

    def test_all_masked(self) -> None:
        """Takes a batch without one token to learn from."""
        loss = self.build()
        for inputs in self._examples():
            at = neutral(replace(inputs, token_mask=torch.zeros_like(inputs.token_mask)))
            advice = "as for a micro-batch of nothing but truncated completions: divide by counts.clamp(min=1)"
            try:
                step_gradient_on(loss, at)
            except RunFailed as error:
                raise Violation(
                    f"it fails on a batch that is wholly masked: {error}", shown(at), advice
                ) from error

    # -- Batches, ranks ----------------------------------------------------------------------------------

    def test_rows_are_independent(self) -> None:
        """Changing one sequence changes no other sequence's loss or gradient, unless it declares mixes_rows."""
        loss = self.build()
        if getattr(loss, "mixes_rows", False):
            raise SkipTest("it declares mixes_rows: what a sequence learns may depend on its neighbours")
        for inputs in self._examples():
            whole = measured_on(loss, inputs)
            for row in range(len(inputs.logprobs)):
                alone = measured_on(loss, rows(inputs, [row]))
                part = Measured(
                    whole.loss[[row]],
                    whole.gradient[[row]],
                    {name: values[[row]] for name, values in whole.diagnostics.items()},
                )
                self._same(
                    alone,
                    part,
                    inputs,
                    f"sequence {row} has another loss or gradient by itself than among the others",
                    "something is averaged over the batch, and a loss sees one micro-batch, not the step: "
                    "return one number for each token and let `reduction` average",
                )

    def test_permutation(self) -> None:
        """The order of the sequences does not matter."""
        loss = self.build()
        for inputs in self._examples():
            order = torch.arange(len(inputs.logprobs)).flip(0)
            whole, turned = measured_on(loss, inputs), measured_on(loss, rows(inputs, order))
            back = Measured(turned.loss[order], turned.gradient[order], {})
            advice = "it treats a place in the batch as if it meant something"
            self._same(
                replace(whole, diagnostics={}), back, inputs, "in another order it gives other losses", advice
            )

    def test_micro_batches_and_ranks(self) -> None:
        """The step's gradient is the same for every split into micro-batches and ranks."""
        loss = self.build()
        if loss.reduction is Reduction.LOCAL_TOKEN_MEAN:
            raise SkipTest("its reduction LOCAL_TOKEN_MEAN depends on the micro-batch size by definition")
        if getattr(loss, "mixes_rows", False):
            raise SkipTest("it declares mixes_rows")
        inputs = self._example(4, 6)
        whole = step_gradient_of(loss, [inputs])
        for size in (1, 2, 3):
            parts = [rows(inputs, list(range(at, min(at + size, 4)))) for at in range(0, 4, size)]
            split = step_gradient_of(loss, parts)
            if not close(whole, split):
                advice = "it divides by a count of its own: the core divides, by those of the whole step"
                what = f"in micro-batches of {size} its gradient is another one than at once"
                raise Violation(what, shown(inputs, at_once=whole, split=split), advice)

    # -- Numbers -----------------------------------------------------------------------------------------

    def test_extreme_ratios(self) -> None:
        """Log-ratios of 20 either way leave loss and gradient finite, in float32 too."""
        loss = self.build()
        for dtype in (torch.float64, torch.float32):
            inputs = self._example(1, 1, dtype)
            for log_ratio in (LARGEST_LOG_RATIO, -LARGEST_LOG_RATIO):
                for advantage in (1.0, -1.0):
                    at = replace(
                        inputs,
                        logprobs=inputs.old_logprobs + log_ratio,
                        advantages=torch.full_like(inputs.advantages, advantage),
                    )
                    self._finite(loss, at)

    def test_bfloat16(self) -> None:
        """In bfloat16 it is off by rounding alone."""
        loss = self.build()
        for inputs in self._examples(torch.bfloat16):
            exact = measured_on(loss, mapped(inputs, lambda tensor: tensor.double())).loss
            rounded = measured_on(loss, inputs).loss.double()
            error = (rounded - exact).abs().max() / exact.abs().max().clamp(min=1e-6)
            if not error <= BFLOAT16_ERROR:
                what = (
                    f"in bfloat16 its loss is off by {error:.2g} of the largest; allowed is {BFLOAT16_ERROR:g}"
                )
                advice = "small differences of large numbers lose their digits: compute those in float32"
                raise Violation(what, shown(inputs, exact=exact, bfloat16=rounded), advice)

    def test_diagnostics(self) -> None:
        """Its diagnostics are finite, and their mean over tokens is the same for every split of the batch."""
        loss = self.build()
        inputs = self._example(4, 6)
        whole = measured_on(loss, inputs).diagnostics
        for name, values in whole.items():
            if not bool(values.isfinite().all()):
                raise Violation(f"diagnostic '{name}' is not finite", shown(inputs, **{name: values}))
            if getattr(loss, "mixes_rows", False):
                continue
            alone = [measured_on(loss, rows(inputs, [row])).diagnostics for row in range(len(values))]
            names = [set(each) for each in alone]
            if any(name not in each for each in names):
                advice = "return every diagnostic at every call: its mean is over the whole step"
                raise Violation(f"diagnostic '{name}' is there for some batches only", shown(inputs), advice)
            if not close(torch.cat([each[name] for each in alone]), values):
                advice = "return a value for each token and let the core average, weighed by tokens"
                raise Violation(f"diagnostic '{name}' depends on the micro-batch", shown(inputs), advice)

    # -- Helpers -----------------------------------------------------------------------------------------

    def _examples(self, dtype: torch.dtype = torch.float64) -> Iterator[LossInputs]:
        return examples(self.bound.needs, self._folds, dtype)

    def _example(self, sequences: int, tokens: int, dtype: torch.dtype = torch.float64) -> LossInputs:
        return example(sequences, tokens, 7, self.bound.needs, self._folds, dtype)

    @property
    def _folds(self) -> bool:
        return bool(getattr(self.build(), "folds_correction", False))

    def _undeclared(self, inputs: LossInputs) -> str:
        """What to declare, where the loss runs once it is given what it does not declare."""
        loss = self.build()
        for name, declaration in OPTIONAL.items():
            if getattr(inputs, name) is None:
                given = replace(inputs, **{name: torch.ones_like(inputs.logprobs)})
                try:
                    per_token_loss(loss, leaf(given))
                except RunFailed:
                    continue
                return f"it uses inputs.{name}, which is None unless the loss declares {declaration}"
        return ""

    def _finite(self, loss: Any, inputs: LossInputs) -> Measured:
        measured = measured_on(loss, inputs)
        for what, values in (("loss", measured.loss), ("gradient", measured.gradient)):
            if not bool(values.isfinite().all()):
                advice = "exp() of an unbounded number, or 0 * inf: clamp the log-ratio before exp()"
                raise Violation(f"its {what} is not finite", shown(inputs, **{what: values}), advice)
        return measured

    def _compacted(self, loss: Any, inputs: LossInputs) -> None:
        """A masked token within a sequence is as good as none."""
        for row in range(len(inputs.logprobs)):
            kept = inputs.token_mask[row].nonzero().squeeze(1)
            one = rows(inputs, [row])
            whole, short = measured_on(loss, one), measured_on(loss, columns(one, kept))
            there = replace(whole, loss=whole.loss[:, kept], gradient=whole.gradient[:, kept])
            advice = "a token's neighbour may be masked: count positions by inputs.token_mask.cumsum(1)"
            what = "a masked token within a sequence changes the loss or gradient of its neighbours"
            self._same(replace(short, diagnostics={}), replace(there, diagnostics={}), one, what, advice)

    def _same(self, one: Measured, other: Measured, inputs: LossInputs, what: str, advice: str) -> None:
        for left, right in ((one.loss, other.loss), (one.gradient, other.gradient)):
            if not close(left, right):
                raise Violation(what, shown(inputs), advice)

    def _declared_gradient(self, loss: Any, inputs: LossInputs) -> Tensor:
        if not callable(getattr(loss, "expected_gradient", None)):
            advice = "def expected_gradient(self, inputs): d loss / d log pi of each token, [B, T]"
            raise Violation(
                "it declares gradient = 'surrogate' and has no method expected_gradient", advice=advice
            )
        return masked(loss.expected_gradient(inputs), inputs)
