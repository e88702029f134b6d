"""Contract of every importance-sampling correction, as a suite of checks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, NamedTuple
from unittest import SkipTest

import torch
from torch import Tensor

from grpox.contracts import LossInputs
from grpox.errors import RunFailed
from grpox.plugins.component import level_of
from grpox.testing.conformance import TensorConformance, Violation, require
from grpox.testing.formula import Reference, parameters_of
from grpox.testing.loss_examples import SHAPES, close, example, mapped, padded, rows, shown
from grpox.update.objective import apply_correction, build_inputs

LARGEST = 20.0
"""Difference of log-probabilities."""
ROUNDING = 1e-9


@dataclass(frozen=True)
class CorrectionCase:
    """The input of a correction, as the core passes it: zeros where masked."""

    old: Tensor  # f64[B, T]
    sampler: Tensor  # f64[B, T]
    mask: Tensor  # bool[B, T]

    def __str__(self) -> str:
        return shown(self)


class Corrected(NamedTuple):
    """The result of a correction."""

    weights: Tensor  # f64[B, T]
    keep: Tensor  # bool[B, T]


class CorrectionConformance(TensorConformance):
    """The checks of a correction."""

    kind = "correction"
    _results = "weights"
    _device_advice = "pass device=old.device, or use torch.ones_like(mask)"
    reference: ClassVar[Reference | None] = None
    """The paper's formula, as `grpox.testing.same_as` describes it."""

    def test_runs(self) -> None:
        """Returns weights [B, T] and keep [B, T], finite, from 0, and without a gradient."""
        for given in _examples():
            corrected = _correct(self.build(), given)
            advice = "R is a constant of the step: compute it under torch.no_grad()"
            require(not corrected.weights.requires_grad, "its weights carry a gradient", given, advice)
            _check_sound(corrected, given)

    def _cases(self) -> list[CorrectionCase]:
        return list(_examples())

    def _values(self, component: Any, inputs: CorrectionCase) -> list[Tensor]:
        corrected = _correct(component, inputs)
        return [corrected.weights, corrected.keep.double()]

    def test_direction(self) -> None:
        """A token weighs no less the likelier the trainer finds it than the generator did."""
        correction = self.build()
        if getattr(correction, "monotone", True) is False:
            raise SkipTest("it declares monotone = False")
        advice = "the weight is exp(old - sampler), not exp(sampler - old). If meant, declare monotone = False"
        for others in ([], [0.0, 0.0]):
            before, least = 0.0, -math.inf
            for difference in (-3.0, -1.0, -0.5, -0.1, 0.0, 0.1, 0.5, 1.0, 1.9):
                given = _completion([difference, *others], old=-2.0)
                corrected = _correct(correction, given)
                if not bool(corrected.keep[0, 0]):
                    continue
                weight = corrected.weights[0, 0].item()
                what = f"with old - sampler = {difference:g} the token weighs {weight:.4g}"
                what += f", less than {least:.4g} with {before:g}"
                require(weight >= least - ROUNDING, what, given, advice)
                before, least = difference, weight

    def test_same_as_reference(self) -> None:
        """Is the formula of the reference, in weights and in tokens that are kept."""
        correction = self.build()
        names = parameters_of(self._formula, ("old", "sampler", "mask"))
        for given in _random_completions():
            weights, keep = correction.correct(given.old, given.sampler, given.mask)
            of_row = {name: tensor[0] for name, tensor in vars(given).items()}
            there = torch.ones_like(given.mask[0]) if "mask" in names else given.mask[0]
            pairs = list(self._formula(**{name: of_row[name][there].tolist() for name in names}))
            places = there.nonzero().flatten().tolist()
            what = f"the reference returned {len(pairs)} results for {len(places)} tokens"
            require(len(pairs) == len(places), what, given)
            for place, (wanted, is_wanted) in zip(places, pairs, strict=True):
                if not given.mask[0, place]:
                    continue
                is_there, weight = bool(keep[0, place]), weights[0, place].item()
                verb = ("drops", "keeps")
                what = f"it {verb[is_there]} token {place}, which the reference {verb[bool(is_wanted)]}"
                require(is_there == bool(is_wanted), what, given)
                what = f"token {place} weighs {weight:.6g}, and by the reference {wanted:.6g}"
                same = math.isclose(weight, wanted, rel_tol=1e-6, abs_tol=1e-9)
                require(same or not is_there, what, given)

    def test_identity(self) -> None:
        """Every token is kept with weight 1 where sampler and trainer agree."""
        for given in _examples():
            given = replace(given, sampler=given.old.clone())
            corrected = _correct(self.build(), given)
            weights = corrected.weights[given.mask]
            agrees = bool(corrected.keep[given.mask].all()) and close(weights, torch.ones_like(weights))
            advice = "R is pi_old / mu or a bounded form of it: 1 where they are equal"
            require(agrees, "where sampler and trainer agree it does not weigh by 1", given, advice)

    def test_difference(self) -> None:
        """Weighs or drops a token somewhere, where sampler and trainer differ."""
        if getattr(self.build(), "corrects", True) is False:
            raise SkipTest("it declares corrects = False")
        differences = (-LARGEST, -1.0, 1.0, LARGEST)
        corrected = [_correct(self.build(), _completion([each] * 3)) for each in differences]
        acts = any(bool((each.weights != 1).any()) or not bool(each.keep.all()) for each in corrected)
        what = f"it keeps every token with weight 1, even where old - sampler is {LARGEST:g} or -{LARGEST:g}"
        require(acts, what, advice="it corrects nothing: the weight is a form of exp(old - sampler)")

    def test_level(self) -> None:
        """Has the level that it declares, if any: a weight for each token, or one of the completion."""
        if (level := level_of(self.build())) is None:
            return
        given = _completion([1e-4, 2e-4, -1e-4])  # so small that no bound drops or caps a weight
        weights = _correct(self.build(), given).weights
        is_one = close(weights, weights[:, :1].expand_as(weights))
        what = f"it declares the level {level!r}, and gives the tokens of a completion {weights[0].tolist()}"
        advice = "the level is 'sequence' if all tokens of a completion have one weight, else 'token'"
        require(is_one == (level == "sequence"), what, given, advice)

    def test_missing_log_probabilities(self) -> None:
        """Completions without log-probabilities of the sampler count as drawn from the policy."""
        correction = self.build()
        for given in _examples():
            for missing in (None, torch.full_like(given.sampler, float("nan"))):
                weights, keep = apply_correction(correction, _inputs(given, missing))
                what = "without log-probabilities of the sampler it does not weigh by 1"
                require(bool((torch.where(keep, weights, 0.0)[given.mask] == 1).all()), what, given)

    def test_padding(self) -> None:
        """Masked positions at the end change nothing."""
        for given in _examples():
            advice = "a mean or sum over positions counts masked ones: weigh by mask and divide by its sum"
            part = (..., slice(given.mask.shape[1]))
            self._check_same(given, padded(given, 2), part, "padding counts", advice)

    def test_masked_positions(self) -> None:
        """Values at masked positions change no other token's weight."""
        for given in _examples():
            given = padded(given, 1)
            other = replace(
                given,
                old=given.old.masked_fill(~given.mask, -1.0),
                sampler=given.sampler.masked_fill(~given.mask, -3.0),
            )
            one, two = _correct(self.build(), given), _correct(self.build(), other)
            same = close(one.weights[given.mask], two.weights[given.mask])
            same &= torch.equal(one.keep[given.mask], two.keep[given.mask])
            advice = "use torch.where(mask, old - sampler, 0) before a sum or mean over tokens"
            require(same, "values at masked positions change the weights of others", other, advice)

    def test_rows_are_independent(self) -> None:
        """A completion's weights depend on no other completion: micro-batches would matter."""
        for given in _examples():
            for row in range(len(given.old)):
                advice = "it is computed for one micro-batch at a time: normalise nothing over the batch"
                what = f"completion {row} is weighed otherwise by itself"
                self._check_same(rows(given, [row]), given, [row], what, advice, given)

    def test_extreme_differences(self) -> None:
        """Differences of 20 either way, for every token of a completion, and of 1,000 leave weights finite."""
        for tokens, difference in product((1, 64), (LARGEST, -LARGEST)):
            given = _completion([difference] * tokens)
            _check_sound(_correct(self.build(), given), given)
        # A ratio beyond the largest number weighs no less than a large one.
        large, beyond = _completion([LARGEST]), _completion([1000.0])
        one, two = _correct(self.build(), large), _correct(self.build(), beyond)
        _check_sound(two, beyond)
        falls = bool(one.keep[0, 0] & two.keep[0, 0]) and bool(two.weights[0, 0] < one.weights[0, 0])
        what = f"a difference of 1,000 weighs {two.weights[0, 0]:.4g}, less than one of {LARGEST:g}"
        is_monotone = getattr(self.build(), "monotone", True)
        require(not (falls and is_monotone), what, beyond, "bound the log-ratio before exp()")

    def test_all_masked(self) -> None:
        """Takes a batch without one token to learn from."""
        for given in _examples():
            empty = mapped(given, torch.zeros_like)
            finite = bool(_correct(self.build(), empty).weights.isfinite().all())
            require(finite, "on a batch that is wholly masked its weights are not finite", empty)


def _check_sound(corrected: Corrected, given: CorrectionCase) -> None:
    weights = corrected.weights[corrected.keep & given.mask]
    advice = "bound the log-ratio before exp(), or drop the token by `keep`"
    sound = bool((weights.isfinite() & (weights >= 0)).all())
    require(sound, "a kept token has a weight that is not finite and at least 0", given, advice)


def _examples() -> Iterator[CorrectionCase]:
    for seed, (sequences, tokens) in enumerate(SHAPES):
        inputs = example(sequences, tokens, seed)
        yield CorrectionCase(inputs.logprobs, inputs.old_logprobs, inputs.token_mask)


def _completion(differences: Sequence[float], old: float = -30.0) -> CorrectionCase:
    """Build a completion of tokens with these values of old - sampler."""
    by = torch.tensor([differences], dtype=torch.float64)
    return CorrectionCase(torch.full_like(by, old), old - by, torch.ones_like(by).bool())


def _random_completions() -> Iterator[CorrectionCase]:
    """Yield completions from one token up, [1, T], zeros where masked."""
    for size in (0.0, 0.1, -0.1, 0.5, -0.5, 0.75, -0.75, 1.5, -1.5, 3.0, -3.0, 8.0, -8.0):
        yield _completion([size], old=-2.0)
    for (tokens, spread), seed in product(((2, 0.5), (3, 1.0), (6, 0.1), (6, 2.0), (40, 0.2)), range(4)):
        generator = torch.Generator().manual_seed(seed)
        by = spread * torch.randn((1, tokens), generator=generator, dtype=torch.float64)
        mask = torch.ones_like(by).bool()
        mask[0, 1 + seed % tokens :: 3] = False
        old = torch.where(mask, torch.linspace(-2.0, -10.0, tokens, dtype=torch.float64), 0.0)
        yield CorrectionCase(old, torch.where(mask, old - by, 0.0), mask)


def _inputs(given: CorrectionCase, sampler: Tensor | None) -> LossInputs:
    """Build what the core hands to a correction."""
    return build_inputs(given.old, given.mask, torch.zeros_like(given.old), given.old, sampler)


def _correct(correction: Any, given: CorrectionCase) -> Corrected:
    try:
        _, keep = apply_correction(correction, _inputs(given, given.sampler))
        weights = correction.correct(given.old, given.sampler, given.mask)[0]
    except RunFailed as error:
        raise Violation(str(error), str(given)) from error
    return Corrected(weights, keep)
