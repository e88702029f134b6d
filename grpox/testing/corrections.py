"""What every importance-sampling correction must hold to.

from grpox.testing import CorrectionConformance

class TestMine(CorrectionConformance):
    component = "mine"
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpox.errors import RunFailed
from grpox.testing.conformance import Conformance, Violation
from grpox.testing.loss_examples import SHAPES, close, example
from grpox.update.objective import apply_correction

LARGEST = 20.0
"""Difference of log-probabilities."""


@dataclass(frozen=True)
class Given:
    """What a correction is given, as the core hands it over: zeros where masked."""

    old: Tensor  # f64[B, T]
    sampler: Tensor  # f64[B, T]
    mask: Tensor  # bool[B, T]

    def __str__(self) -> str:
        rows = zip(self.old.tolist(), self.sampler.tolist(), self.mask.tolist(), strict=True)
        return "\n".join(
            f"{name:8}[{row}]  " + "  ".join(f"{float(value):.4g}" for value in values)
            for row, tensors in enumerate(rows)
            for name, values in zip(("old", "sampler", "mask"), tensors, strict=True)
        )


@dataclass(frozen=True)
class Made:
    weights: Tensor  # f64[B, T]
    keep: Tensor  # bool[B, T]


class CorrectionConformance(Conformance):
    """The checks of a correction."""

    kind = "correction"

    def test_runs(self) -> None:
        """Returns weights [B, T] and keep [B, T], finite, from 0, and without a gradient."""
        for given in _examples():
            made = self._correct(given)
            if made.weights.requires_grad:
                advice = "R is a constant of the step: compute it under torch.no_grad()"
                raise Violation("its weights carry a gradient", str(given), advice)
            self._sound(made, given)

    def test_pure(self) -> None:
        """Returns the same twice, and leaves its inputs as they are."""
        correction = self.build()
        for given in _examples():
            kept = Given(given.old.clone(), given.sampler.clone(), given.mask.clone())
            first = _made(correction, kept)
            if not torch.equal(kept.old, given.old) or not torch.equal(kept.sampler, given.sampler):
                raise Violation(
                    "it changes its inputs in place", str(given), "copy before an in-place operation"
                )
            second = _made(correction, kept)
            if not torch.equal(first.weights, second.weights) or not torch.equal(first.keep, second.keep):
                raise Violation("called twice on the same inputs, it returned two results", str(given))

    def test_identity(self) -> None:
        """Where sampler and trainer agree, every token is kept with weight 1."""
        for given in _examples():
            self._identity(replace(given, sampler=given.old.clone()))

    def test_missing_log_probabilities(self) -> None:
        """Completions without log-probabilities of the sampler count as drawn from the policy."""
        correction = self.build()
        for given in _examples():
            for missing in (None, torch.full_like(given.sampler, float("nan"))):
                made = apply_correction(correction, given.old, missing, given.mask)
                if not bool((made.factor[given.mask] == 1).all()):
                    raise Violation(
                        "without log-probabilities of the sampler it does not weigh by 1", str(given)
                    )

    def test_padding(self) -> None:
        """Masked positions at the end change nothing."""
        for given in _examples():
            tokens = given.mask.shape[1]
            longer = Given(
                *(torch.nn.functional.pad(tensor, (0, 2)) for tensor in (given.old, given.sampler, given.mask))
            )
            made, wider = self._correct(given), self._correct(longer)
            advice = "a mean or sum over positions counts masked ones: weigh by mask and divide by its sum"
            self._same(
                made, Made(wider.weights[:, :tokens], wider.keep[:, :tokens]), given, "padding counts", advice
            )

    def test_rows_are_independent(self) -> None:
        """A completion's weights depend on no other completion: micro-batches would matter."""
        for given in _examples():
            whole = self._correct(given)
            for row in range(len(given.old)):
                one = slice(row, row + 1)
                alone = self._correct(Given(given.old[one], given.sampler[one], given.mask[one]))
                advice = "it is computed for one micro-batch at a time: normalise nothing over the batch"
                part = Made(whole.weights[one], whole.keep[one])
                self._same(alone, part, given, f"completion {row} is weighed otherwise by itself", advice)

    def test_extreme_differences(self) -> None:
        """Differences of 20 either way, for every token of a completion, leave weights finite."""
        for tokens in (1, 64):
            old = torch.full((1, tokens), -30.0, dtype=torch.float64)
            for difference in (LARGEST, -LARGEST):
                given = Given(old, old - difference, torch.ones(1, tokens, dtype=torch.bool))
                self._sound(self._correct(given), given)

    def test_all_masked(self) -> None:
        """Takes a batch without one token to learn from."""
        for given in _examples():
            nothing = torch.zeros_like(given.mask)
            empty = Given(torch.zeros_like(given.old), torch.zeros_like(given.old), nothing)
            if not bool(self._correct(empty).weights.isfinite().all()):
                raise Violation("on a batch that is wholly masked its weights are not finite", str(empty))

    def _correct(self, given: Given) -> Made:
        return _made(self.build(), given)

    def _identity(self, given: Given) -> None:
        made = self._correct(given)
        weights = made.weights[given.mask]
        if not bool(made.keep[given.mask].all()) or not close(weights, torch.ones_like(weights)):
            advice = "R is pi_old / mu or a bounded form of it: 1 where they are equal"
            raise Violation("where sampler and trainer agree it does not weigh by 1", str(given), advice)

    def _sound(self, made: Made, given: Given) -> None:
        kept = made.weights[made.keep & given.mask]
        if not bool((kept.isfinite() & (kept >= 0)).all()):
            advice = "bound the log-ratio before exp(), or drop the token by `keep`"
            raise Violation("a kept token has a weight that is not finite and at least 0", str(given), advice)

    def _same(self, one: Made, other: Made, given: Given, what: str, advice: str) -> None:
        if not close(one.weights, other.weights) or not torch.equal(one.keep, other.keep):
            raise Violation(what, str(given), advice)


def _examples() -> list[Given]:
    made = [example(sequences, tokens, seed) for seed, (sequences, tokens) in enumerate(SHAPES)]
    return [Given(inputs.logprobs, inputs.old_logprobs, inputs.token_mask) for inputs in made]


def _made(correction: Any, given: Given) -> Made:
    try:
        made = apply_correction(correction, given.old, given.sampler, given.mask)
        weights = correction.correct(given.old, given.sampler, given.mask)[0]
    except RunFailed as error:
        raise Violation(str(error), str(given)) from error
    return Made(weights, made.keep)
