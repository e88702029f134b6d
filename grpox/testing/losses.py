"""Contract of every policy loss, checked on CPU in float64 through the core that trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from typing import Any, ClassVar
from unittest import SkipTest

import torch
from torch import Tensor

from grpox.contracts import Capability, LossInputs, Reduction
from grpox.errors import RunFailed, nearest
from grpox.plugins.component import level_of
from grpox.plugins.optional_methods import statistics_of
from grpox.testing.conformance import TensorConformance, Violation, require
from grpox.testing.formula import Reference, StepReduction, compare_loss, compare_step
from grpox.testing.loss_examples import (
    COLUMNS,
    GROUP,
    SHAPES,
    Measured,
    close,
    depends_on_others,
    example,
    filled,
    is_of_groups,
    leaf,
    leaves,
    mapped,
    measured_on,
    padded,
    rows,
    shown,
    slope,
    step_gradient_of,
    step_gradient_on,
    to_dtype,
    units_of,
    without_gaps,
)
from grpox.update.objective import per_token_loss
from grpox.update.step_statistics import OF_COMPLETIONS, OF_TOKENS

OPTIONAL = {
    **{each.value: f"needs=('{each}',)" for each in Capability if each in LossInputs.__dataclass_fields__},
    "correction_weights": "folds_correction = True",
}
"""Inputs that are None unless the loss declares them, and the declaration."""
NEAR = (0.0, 0.02, -0.02, 0.1, -0.1)
"""Log-ratios on policy and near it."""
FAR = (-1.0, 0.0, 1.0)
"""Log-ratios at which the gradient is reported."""
ROUNDING = 1e-9
LARGEST_LOG_RATIO = 20.0
BFLOAT16_ERROR = 0.05
"""Tolerance as a share of the largest loss: about six roundings to eight bits of mantissa."""


class LossConformance(TensorConformance):
    """The checks of a policy loss."""

    kind = "loss"
    _results = "losses"
    _may_draw = False
    _device_advice = "pass device=inputs.logprobs.device, or use torch.zeros_like and numbers"
    reference: ClassVar[Reference | None] = None
    """The paper's formula, as `grpox.testing.same_as` describes it."""
    reduction: ClassVar[StepReduction | None] = None
    """The paper's sum or mean over the tokens of a step, as `grpox.testing.same_as` describes it."""

    # -- Its form ----------------------------------------------------------------------------------------

    def test_runs_on_what_it_declares(self) -> None:
        """Runs on what it declares to need, and returns one number for each token."""
        loss, capabilities = self.build(), [str(each) for each in Capability]
        for name in self.bound.needs:
            near, what = nearest(name, capabilities), f"it needs {name!r}, which is no capability"
            require(name in capabilities or not near, what, advice=f"did you mean {near!r}?")
        for inputs in self._cases():
            what = "it has scope 'group' and does not ask which sequences belong together"
            advice = "declare needs = ('group_ids',), in the ComponentSpec if it is a plugin's"
            require(not is_of_groups(loss) or inputs.group_ids is not None, what, shown(inputs), advice)
            try:
                output = per_token_loss(loss, leaf(inputs))
            except RunFailed as error:
                raise Violation(str(error), shown(inputs), self._undeclared(inputs)) from error
            is_finite = bool(output.loss[inputs.token_mask].isfinite().all())
            require(is_finite, "its loss is not finite", shown(inputs, loss=output.loss.detach()))
            known = [*OF_TOKENS, *OF_COMPLETIONS, *output.diagnostics]
            for name in statistics_of(loss):
                what = f"it asks for the statistic {name!r}, which no step has"
                advice = f"there are {', '.join(known)}: those of a step, and its own diagnostics"
                require(name in known, what, advice=advice)
            if (weights := inputs.correction_weights) is not None:
                others = (torch.full_like(weights, value) for value in (1.0, 0.5))
                pair = [self._values(loss, replace(inputs, correction_weights=each)) for each in others]
                what = "it declares folds_correction, and other correction weights change no loss or gradient"
                advice = "the core leaves the correction to it: apply the weights, or drop the declaration"
                require(not all(map(torch.equal, *pair)), what, shown(inputs), advice)
            if inputs.rewards is None:
                continue
            for places in ((..., 0), (0,)):  # where a reward function abstained, from all sequences or from one
                rewards = inputs.rewards.clone()
                rewards[places] = float("nan")
                at = replace(inputs, rewards=rewards)
                is_finite = all(bool(each.isfinite().all()) for each in self._values(loss, at))
                what = "where a reward function abstained, its loss or gradient is not finite"
                advice = "rewards are NaN there: use nansum, nan_to_num, or mask by rewards.isnan()"
                require(is_finite, what, shown(at), advice)

    def test_dtype(self) -> None:
        """Computes in the dtype of the log-probabilities."""
        advice = "a constant tensor of another dtype does that: use torch.full_like or numbers"
        for dtype in (torch.float32, torch.float64):
            for loss, inputs in self._examples(dtype):
                returned = per_token_loss(loss, leaf(inputs)).loss.dtype
                what = f"for log-probabilities of {dtype} its loss is of {returned}"
                require(returned == dtype, what, shown(inputs), advice)

    # -- Its gradient ------------------------------------------------------------------------------------

    def test_gradient_reaches_log_probabilities_only(self) -> None:
        """Its gradient reaches log-probabilities, perhaps entropies, and nothing that it keeps itself."""
        for loss, inputs in self._examples():
            given = leaf(inputs)
            for variable in leaves(per_token_loss(loss, given).loss):
                what = f"its gradient reaches a tensor of its own, {tuple(variable.shape)}"
                advice = "only the policy is trained: keep numbers, or tensors without requires_grad"
                require(variable is given.logprobs or variable is given.entropy, what, shown(inputs), advice)

    def test_gradient_is_that_of_its_value(self) -> None:
        """Its gradient is that of its value, or for a surrogate the one it declares."""
        for loss, inputs in self._examples():
            if getattr(loss, "gradient", "value") == "surrogate":
                declared = getattr(loss, "expected_gradient", None)
                what = "it declares gradient = 'surrogate' and has no method expected_gradient"
                advice = "def expected_gradient(self, inputs): d loss / d log pi of each token, [B, T]"
                if not callable(declared):
                    raise Violation(what, advice=advice)
                expected, source = (
                    torch.where(inputs.token_mask, declared(inputs), 0.0),
                    "expected_gradient says",
                )
                advice = "one of the two is wrong: expected_gradient is d loss / d log pi of each token"
            else:
                expected, source = slope(loss, inputs), "the slope of its value is"
                advice = (
                    "a detach() hides a part of the value from autograd. Where that is the point, as in cispo, "
                    "declare gradient = 'surrogate' and write expected_gradient"
                )
            _require_gradient(measured_on(loss, inputs).gradient, expected, inputs, source, advice)

    def test_entropy(self) -> None:
        """Trains on the entropy that its value depends on, or declares that it does not."""
        for loss, inputs in self._examples():
            entropy = inputs.entropy
            if entropy is None:
                return
            if entropy.requires_grad and getattr(loss, "gradient", "value") == "value":
                gradient, source = (
                    measured_on(loss, inputs).by_entropy,
                    "by the entropy, the slope of its value is",
                )
                advice = "a detach() hides a part of the value from autograd: use inputs.entropy as it is"
                _require_gradient(gradient, slope(loss, inputs, "entropy"), inputs, source, advice)
            if entropy.requires_grad or getattr(loss, "entropy_as_constant", False):
                continue
            gradient = measured_on(loss, replace(inputs, entropy=entropy.clone().requires_grad_())).by_entropy
            what = "its value depends on the entropy, and its gradient does not: the entropy has none"
            advice = (
                "declare needs = ('entropy_gradient',) to train on the entropy, or entropy_as_constant = True "
                "if it is meant as a constant"
            )
            example = shown(inputs, gradient_by_entropy=gradient)
            require(not bool((gradient != 0).any()), what, example, advice)

    def test_on_policy_gradient(self) -> None:
        """On policy (pi = pi_old) its gradient is finite, and reported."""
        loss, inputs = self._example(1, 1)
        gradients = (
            _finite(loss, _at(inputs, 0.0, sign)).gradient.mean().item() / sign for sign in (1.0, -1.0)
        )
        values = " and ".join(f"{value:.4g} A" for value in dict.fromkeys(gradients))
        self.notes.append(f"d loss / d log pi at pi = pi_old is {values}; the policy gradient's is -1 A")

    def test_sign(self) -> None:
        """A step raises the probability of tokens with positive advantage, and lowers the others'."""
        loss = self.build()
        cases = [self._example(*shape, loss=loss)[1] for shape in ((1, 1), (1, 3), (2, 2), (4, 6))]
        texts = []
        for sign in (1.0, -1.0):
            of_ratios = [measured_on(loss, _at(cases[0], ratio, sign)).gradient[0, 0].item() for ratio in FAR]
            texts.append(f"{'  '.join(f'{each:.3g}' for each in of_ratios)} for A = {sign:g}")
        ratios = ", ".join(f"{ratio:g}" for ratio in FAR)
        self.notes.append(f"d loss / d log pi at log-ratios {ratios}: {'; '.join(texts)}")
        if getattr(loss, "sign", "policy") == "other":
            raise SkipTest("it declares sign = 'other'")
        for inputs, sign, log_ratio in product(cases, (1.0, -1.0), NEAR):
            _check_direction(loss, _at(inputs, log_ratio, sign), log_ratio)

        def is_clipped(log_ratio: float, sign: float) -> bool:
            return not bool((measured_on(loss, _at(cases[0], log_ratio, sign)).gradient != 0).any())

        is_wrong = all(is_clipped(-sign, sign) and not is_clipped(sign, sign) for sign in (1.0, -1.0))
        what = "it clips tokens that moved against their advantage, and goes on with those that moved with it"
        advice = "the surrogate is the smaller of both branches: -torch.min(ratio * A, clipped * A)"
        require(not is_wrong, what, shown(_at(cases[0], -1.0, 1.0)), advice)

    def test_same_as_reference(self) -> None:
        """Is the formula of the reference, in value and gradient."""
        numbers = [value for value in dict(self.bound.config or {}).values() if type(value) in (int, float)]
        compare_loss(self.build(), self._formula, self.bound.needs, numbers)
        if (reduction := type(self).reduction) is not None:
            compare_step(self.build(), self._formula, reduction, self.bound.needs)
        else:
            self.notes.append("its reduction is not compared: the suite has no `reduction`")

    def test_zero_advantage(self) -> None:
        """Adds no gradient where the advantage is 0, if it declares so."""
        declared = getattr(self.build(), "zero_at_zero_advantage", False)
        for loss, inputs in self._examples():
            at = replace(inputs, advantages=torch.zeros_like(inputs.advantages))
            measured = measured_on(loss, at)
            if bool(((measured.gradient != 0) | (measured.by_entropy != 0)).any()):
                advice = "drop zero_at_zero_advantage, or make the loss a multiple of the advantage"
                require(not declared, "it trains on tokens whose advantage is 0", shown(at), advice)
                self.notes.append("trains on tokens whose advantage is 0, as an entropy term does")
                return
        if not declared:
            self.notes.append("could declare zero_at_zero_advantage = True")

    # -- The mask ----------------------------------------------------------------------------------------

    def test_masked_positions(self) -> None:
        """Values at masked positions, NaN included, change nothing."""
        for loss, inputs in self._examples():
            inputs = padded(inputs, 1)  # so that the smallest has a masked position as well
            clean = step_gradient_on(loss, inputs)
            for poison in (float("nan"), 1e4):
                given = filled(inputs, poison)
                gradient = step_gradient_on(loss, given)
                same = torch.equal(gradient, clean) and not bool((gradient[~inputs.token_mask] != 0).any())
                what = f"with {poison:g} at masked positions its gradient is another one"
                advice = "use inputs.token_mask, never a value, to tell"
                require(same, what, shown(given, gradient=gradient), advice)

    def test_padding(self) -> None:
        """Padding a sequence, or a masked token within it, changes neither loss nor gradient of the others."""
        for loss, inputs in self._examples():
            what = "two masked positions at the end change its loss or gradient"
            advice = (
                "a mean over positions counts masked ones: weigh by inputs.token_mask and divide by its sum"
            )
            there = (..., slice(inputs.token_mask.shape[1]))
            self._check_same(inputs, padded(inputs, 2), there, what, advice)
            what = "a masked token within a sequence changes the loss or gradient of its neighbours"
            advice = "a token's neighbour may be masked: count positions by inputs.token_mask.cumsum(1)"
            each_row = (rows(inputs, [row]) for row in range(len(inputs.logprobs)))
            for unit in [inputs] if is_of_groups(loss) else each_row:
                closed, places = without_gaps(unit)
                self._check_same(closed, unit, places, what, advice, unit)

    def test_all_masked(self) -> None:
        """Takes a batch without one token to learn from."""
        for loss, inputs in self._examples():
            at = filled(replace(inputs, token_mask=torch.zeros_like(inputs.token_mask)), 0.0)
            try:
                step_gradient_on(loss, at)
            except RunFailed as error:
                what = f"it fails on a batch that is wholly masked: {error}"
                advice = "as for a micro-batch of truncated completions alone: divide by counts.clamp(min=1)"
                raise Violation(what, shown(at), advice) from error

    # -- Batches, ranks ----------------------------------------------------------------------------------

    def test_rows_are_independent(self) -> None:
        """Changing one sequence, or one group of a loss of groups, changes no other's loss or gradient."""
        if getattr(self.build(), "mixes_rows", False):
            raise SkipTest("it declares mixes_rows: what a sequence learns may depend on its neighbours")
        for loss, inputs in self._examples():
            for number, unit in enumerate(units_of(loss, inputs)):
                sort = "group" if is_of_groups(loss) else "sequence"
                what = f"{sort} {number} has another loss or gradient by itself than among the others"
                advice = (
                    "something is averaged over the batch, and a loss sees one micro-batch, not the step: "
                    "return one number for each token and let `reduction` average. A loss that compares the "
                    "sequences of a group declares scope = 'group'"
                )
                self._check_same(rows(inputs, unit), inputs, unit, what, advice, inputs)

    def test_level(self) -> None:
        """Has the level that it declares, if any: a ratio for each token, or one of the sequence."""
        if (level := level_of(self.build())) is None:
            return
        examples = list(self._examples())
        depends = any(depends_on_others(loss, inputs) for loss, inputs in examples)
        what = f"it declares the level {level!r}, and its tokens {'depend' if depends else 'do not depend'} on "
        advice = "the level is 'sequence' if a token's loss has the ratios of its whole sequence, else 'token'"
        require(depends == (level == "sequence"), f"{what}the ratios of others", shown(examples[0][1]), advice)

    def test_permutation(self) -> None:
        """The order of the sequences, or of the groups of a loss of groups, does not matter."""
        for loss, inputs in self._examples():
            order = torch.tensor([row for unit in reversed(units_of(loss, inputs)) for row in unit])
            advice = "it treats a place in the batch as if it meant something"
            self._check_same(
                rows(inputs, order), inputs, order, "in another order it gives other losses", advice
            )

    def test_micro_batches_and_ranks(self) -> None:
        """The step's gradient is the same for every split into micro-batches and ranks."""
        loss, inputs = self._example(4, 6)
        if loss.reduction is Reduction.LOCAL_TOKEN_MEAN:
            raise SkipTest("its reduction LOCAL_TOKEN_MEAN depends on the micro-batch size by definition")
        if getattr(loss, "mixes_rows", False):
            raise SkipTest("it declares mixes_rows")
        whole, units = step_gradient_of(loss, [inputs]), units_of(loss, inputs)
        for size in (1, 2, 3):
            parts = [rows(inputs, [*chain(*units[at : at + size])]) for at in range(0, len(units), size)]
            split = step_gradient_of(loss, parts)
            advice = "it divides by a count of its own: the core divides, by those of the whole step"
            of = "groups" if is_of_groups(loss) else "sequences"
            what = f"in micro-batches of {size} {of} its gradient is another one than at once"
            require(close(whole, split), what, shown(inputs, at_once=whole, split=split), advice)

    # -- Numbers -----------------------------------------------------------------------------------------

    def test_extreme_ratios(self) -> None:
        """Log-ratios of 20 either way leave loss and gradient finite, in float32 too."""
        for dtype in (torch.float64, torch.float32):
            loss, inputs = self._example(1, 1, dtype)
            for log_ratio, advantage in product((LARGEST_LOG_RATIO, -LARGEST_LOG_RATIO), (1.0, -1.0)):
                advantages = torch.full_like(inputs.advantages, advantage)
                logprobs = inputs.old_logprobs + log_ratio
                _finite(loss, replace(inputs, logprobs=logprobs, advantages=advantages))

    def test_not_a_number(self) -> None:
        """A log-probability that is not a number shows in its loss."""
        for loss, inputs in self._examples():
            logprobs = inputs.logprobs.clone()
            logprobs[tuple(inputs.token_mask.nonzero()[0].tolist())] = float("nan")
            at = replace(inputs, logprobs=logprobs)
            advice = "a run reports or ends at a loss that is not finite: replace no NaN, leave out no token"
            hidden = bool(per_token_loss(loss, leaf(at)).loss.isfinite().all())
            require(not hidden, "with a NaN among the log-probabilities its loss is finite", shown(at), advice)

    def test_certain_tokens(self) -> None:
        """A token of probability 1 counts as any other."""
        for inputs in self._cases():
            place = tuple(inputs.token_mask.nonzero()[0].tolist())
            pair: list[LossInputs] = []
            for value in (0.0, -1e-15):
                logprobs, old = inputs.logprobs.clone(), inputs.old_logprobs.clone()
                logprobs[place] = old[place] = value
                pair.append(replace(inputs, logprobs=logprobs, old_logprobs=old))
            what = "a log-probability of exactly 0 gives another loss than one next to it"
            self._check_same(
                pair[0], pair[1], ..., what, "only inputs.token_mask tells which tokens are masked", inputs
            )

    def test_bfloat16(self) -> None:
        """In bfloat16 it is off by rounding alone."""
        for loss, inputs in self._examples(torch.bfloat16):
            exact = measured_on(loss, to_dtype(inputs, torch.float64)).loss
            rounded = measured_on(loss, inputs).loss.double()
            error = (rounded - exact).abs().max() / exact.abs().max().clamp(min=1e-6)
            what = f"in bfloat16 its loss is off by {error:.2g} of the largest; allowed is {BFLOAT16_ERROR:g}"
            advice = "small differences of large numbers lose their digits: compute those in float32"
            require(bool(error <= BFLOAT16_ERROR), what, shown(inputs, exact=exact, bfloat16=rounded), advice)

    def test_diagnostics(self) -> None:
        """Its diagnostics are finite, and their mean over tokens is the same for every split of the batch."""
        loss, inputs = self._example(4, 6)
        whole = measured_on(loss, inputs).diagnostics
        alone = [measured_on(loss, rows(inputs, unit)).diagnostics for unit in units_of(loss, inputs)]
        for name, values in whole.items():
            example = shown(inputs, **{name: values})
            require(bool(values.isfinite().all()), f"diagnostic '{name}' is not finite", example)
            if getattr(loss, "mixes_rows", False):
                continue
            always = all(name in each for each in alone)
            advice = "return every diagnostic at every call: its mean is over the whole step"
            require(always, f"diagnostic '{name}' is there for some batches only", shown(inputs), advice)
            same = close(torch.cat([each[name] for each in alone]), values)
            advice = "return a value for each token and let the core average, weighed by tokens"
            require(same, f"diagnostic '{name}' depends on the micro-batch", shown(inputs), advice)

    # -- Helpers -----------------------------------------------------------------------------------------

    def _cases(self) -> list[LossInputs]:
        return [inputs for _, inputs in self._examples()]

    def _values(self, component: Any, inputs: LossInputs) -> list[Tensor]:
        measured = measured_on(component, inputs)
        return [measured.loss, measured.gradient]

    def _copy(self, inputs: LossInputs) -> LossInputs:
        return leaf(mapped(inputs, torch.clone))

    def _shown(self, inputs: LossInputs) -> str:
        return shown(inputs)

    def _examples(self, dtype: torch.dtype = torch.float64) -> Iterator[tuple[Any, LossInputs]]:
        """Yield one loss with its inputs of every shape, which are always the same."""
        loss = self.build()
        for seed, (sequences, tokens) in enumerate(SHAPES):
            yield self._example(sequences, tokens, dtype, seed, loss)

    def _example(
        self, sequences: int, tokens: int, dtype: torch.dtype = torch.float64, seed: int = 7, loss: Any = None
    ) -> tuple[Any, LossInputs]:
        loss = loss or self.build()
        folds = bool(getattr(loss, "folds_correction", False))
        sequences *= GROUP if is_of_groups(loss) else 1
        columns = getattr(loss, "example_columns", COLUMNS)
        return loss, example(sequences, tokens, seed, self.bound.needs, folds, dtype, columns)

    def _undeclared(self, inputs: LossInputs) -> str:
        """Name the missing declaration, if the loss runs once it is given an undeclared input."""
        loss, (sequences, tokens) = self.build(), inputs.logprobs.shape
        others = example(sequences, tokens, 0, list(Capability), True, inputs.logprobs.dtype)
        for name, declaration in OPTIONAL.items():
            if getattr(inputs, name) is None:
                given = replace(inputs, **{name: getattr(others, name)})
                try:
                    per_token_loss(loss, leaf(given))
                except RunFailed:
                    continue
                return f"it uses inputs.{name}, which is None unless the loss declares {declaration}"
        return ""


def _finite(loss: Any, inputs: LossInputs) -> Measured:
    measured = measured_on(loss, inputs)
    for what, values in (("loss", measured.loss), ("gradient", measured.gradient)):
        advice = "exp() of an unbounded number, or 0 * inf: clamp the log-ratio before exp()"
        finite = bool(values.isfinite().all())
        require(finite, f"its {what} is not finite", shown(inputs, **{what: values}), advice)
    return measured


def _require_gradient(gradient: Tensor, expected: Tensor, inputs: LossInputs, source: str, advice: str) -> None:
    """Require that the gradient f64[B, T] of autograd is the expected one."""
    place = divmod(int((gradient - expected).abs().argmax()), gradient.shape[1])
    got, wanted = gradient[place].item(), expected[place].item()
    what = f"at token {place} autograd gives {got:.6g}, and {source} {wanted:.6g}"
    example = shown(inputs, gradient=gradient, expected=expected)
    require(torch.allclose(gradient, expected, rtol=1e-5, atol=1e-7), what, example, advice)


def _check_direction(loss: Any, inputs: LossInputs, log_ratio: float) -> None:
    """Check every token's gradient: on policy it is not 0, and nowhere of the wrong sign."""
    gradient = measured_on(loss, inputs).gradient
    raises = torch.where(inputs.token_mask, -gradient * inputs.advantages.sign(), 1.0)  # f64[B, T]
    place = divmod(int(raises.argmin()), raises.shape[1])
    advantage = inputs.advantages[place].item()
    wanted, got = ("raises", "lowers") if advantage > 0 else ("lowers", "raises")
    example = shown(inputs, gradient=gradient)
    what = f"a step {got} the probability of a token with advantage {advantage:g}; policy gradient {wanted} it"
    advice = "check the sign: the loss is minimised. Where that is the point, declare sign = 'other'"
    require(raises[place].item() >= -ROUNDING, what, example, advice)
    if log_ratio == 0:
        what = f"on policy it does not train on a token with advantage {advantage:g}"
        advice = "a clip, a mask or a clamp drops it. Where that is the point, declare sign = 'other'"
        require(raises[place].item() > ROUNDING, what, example, advice)


def _at(inputs: LossInputs, log_ratio: float, advantage: float) -> LossInputs:
    """Move the inputs to a log-ratio and an advantage, the same at all tokens; the correction weighs 1."""
    weights, mask = inputs.correction_weights, inputs.token_mask
    return replace(
        inputs,
        logprobs=torch.where(mask, inputs.old_logprobs + log_ratio, 0.0),
        advantages=torch.where(mask, torch.full_like(inputs.advantages, advantage), 0.0),
        correction_weights=None if weights is None else mask.to(weights),
    )
