"""Runs the checks of a suite one after the other, and yields the outcome of each."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import SkipTest

from grpox.errors import ConfigError, GrpoxError, describe, nearest
from grpox.plugins.registry import Mention
from grpox.runtime.signals import raise_if_signal
from grpox.testing.advantages import AdvantageConformance
from grpox.testing.conformance import Check, Conformance, Violation
from grpox.testing.corrections import CorrectionConformance
from grpox.testing.environments import EnvironmentConformance
from grpox.testing.formula import Reference, StepReduction
from grpox.testing.generators import GeneratorConformance
from grpox.testing.losses import LossConformance
from grpox.testing.observers import ObserverConformance
from grpox.testing.rewards import RewardConformance
from grpox.testing.training_parts import DatasetConformance, OptimizerConformance, SchedulerConformance

SUITES: dict[str, type[Conformance]] = {
    suite.kind: suite
    for suite in (
        LossConformance,
        AdvantageConformance,
        CorrectionConformance,
        RewardConformance,
        GeneratorConformance,
        EnvironmentConformance,
        ObserverConformance,
        DatasetConformance,
        OptimizerConformance,
        SchedulerConformance,
    )
}
"""Component kind -> its conformance suite."""


def same_as(
    kind: str, component: Mention, reference: Reference, reduction: StepReduction | None = None
) -> None:
    """Check that a component computes what a plain Python function says.

    Args:
        kind: ``loss``, ``advantage`` or ``correction``.
        component: as in a run file: ``"mine"``, or ``{"name": "mine", "clip": 0.3}``.
        reference: the formula, called with keyword arguments, those that its parameters name.

            Of a loss, for one sequence: ``logprobs``, ``old_logprobs``, ``advantages``, and other fields of
            `grpox.contracts.LossInputs` that the loss needs, each a list of a number for each token; returns
            the loss of each token. Its gradient is compared too. Of a loss with ``gradient = "surrogate"`` the
            function returns the gradient of each token, d loss / d log pi, in place of the loss. Of one with
            ``scope = "group"`` or ``mixes_rows`` each argument is a list of sequences, and so is the result.

            Of a correction, for one completion: ``old`` and ``sampler``; returns (weight, keep) for each token.

            The function gets tokens that are not masked, unless it has a parameter ``mask``: then it gets all
            of them, and its results for masked tokens are ignored.

            Of an advantage, for a generation batch: ``rewards``, N lists of K numbers, None where a function
            abstained; ``weights``, K numbers; ``groups``, N numbers; returns N advantages.
        reduction: of a loss: how the losses of all tokens become the loss of a step, so that the declared
            `reduction` is compared too. It gets ``losses``, a list for each sequence with the losses of its
            tokens that are not masked, and ``max_length``, the longest length allowed. It returns a number that
            is linear in the losses. Default: the reduction is not compared. ``LOCAL_TOKEN_MEAN`` has no
            such function, as it depends on the micro-batches.

    Raises:
        Violation: the two differ; it shows the smallest input.
        ConfigError: no such component or kind, or a function has a parameter that is no input.
    """
    kinds = [name for name, suite in SUITES.items() if hasattr(suite, "reference")]
    if kind not in kinds:
        what = "there is no comparison with a function for this kind"
        raise ConfigError(what, "kind", given=kind, allowed=", ".join(kinds), nearest=nearest(kind, kinds))
    members: dict[str, Any] = {"component": component, "reference": staticmethod(reference)}
    if reduction is not None:
        if kind != "loss":
            raise ConfigError("only a loss has a reduction", "reduction", given=kind, allowed="kind loss")
        members["reduction"] = staticmethod(reduction)
    suite: Any = type("Suite", (SUITES[kind],), members)()
    suite.test_same_as_reference()


@dataclass(frozen=True)
class Outcome:
    """The outcome of one check."""

    check: str
    title: str
    status: Literal["passed", "failed", "skipped"]
    seconds: float
    what: str = ""
    """Reason why it failed or was skipped, or remarks on one that passed."""
    example: str = ""
    advice: str = ""


def outcomes(suite: Conformance) -> Iterator[Outcome]:
    """Yield each check's outcome; if the first fails, the component does not run, and it is the only one."""
    try:
        for place, check in enumerate(suite.checks()):
            outcome = _outcome(suite, check)
            yield outcome
            if place == 0 and outcome.status == "failed":
                return
    finally:
        suite.teardown_class()


def _outcome(suite: Conformance, check: Check) -> Outcome:
    suite.notes.clear()
    begin = time.perf_counter()
    status: Literal["passed", "failed", "skipped"] = "failed"
    try:
        check.run()
        status, texts = "passed", ["; ".join(suite.notes)]
    except Violation as violation:
        texts = [violation.what, violation.example, violation.advice]
    except SkipTest as reason:
        status, texts = "skipped", [str(reason)]
    except GrpoxError as error:
        texts = [str(error)]
    except BaseException as error:  # noqa: BLE001 - whatever a component raises is reported
        raise_if_signal(error)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        texts = [f"{describe(error)} ({Path(frame.filename).name}:{frame.lineno})"]
    return Outcome(check.name, check.title, status, time.perf_counter() - begin, *texts)
