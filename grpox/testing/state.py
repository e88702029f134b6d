"""The check of a component with state: a new instance that loads it goes on as the original does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from grpox.contracts import StepContext
from grpox.data.reward_signature import missing_columns
from grpox.errors import describe
from grpox.plugins.component_state import changed_attributes, plain_state, state_hashes
from grpox.plugins.optional_methods import has_method, has_state, methods_problem, statistics_of
from grpox.rollout.rewards.named import RewardCall
from grpox.testing.loss_examples import COLUMNS, example

NAN = float("nan")
CALLS = 3
"""Steps before the state is saved, and after it is loaded."""
ADVICE = "state_dict returns all that later calls depend on, and load_state_dict sets all of it"


def state_problems(
    kind: str, build: Callable[[], Any], needs: tuple[str, ...] = (), columns: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the state of a component, and advice; only the first says what to mend.

    Args:
        build: builds a new instance.
        needs: capabilities that the component declares.
        columns: columns of the dataset for a reward function -> a value.

    Raises:
        NotPlain: the state holds a value that a checkpoint cannot.
        Exception: what the component raised.
    """

    def call(component: Any, step: int, shape: tuple[int, int] = (4, 6)) -> object:
        return _call(kind, component, step, needs, columns or {}, shape)

    def take_steps(component: Any, first: int) -> dict[str, str]:
        torch.manual_seed(first)
        results: dict[str, object] = {}
        for step in range(first, first + CALLS):  # on inputs that depend on the step alone
            if has_method(component, "begin_step"):
                component.begin_step(StepContext(step, 2 * CALLS, step / 10))
            result = call(component, step)
            results[f"step {step}"] = list(result) if isinstance(result, tuple) else result
            if has_method(component, "end_step"):
                random = torch.Generator().manual_seed(step)
                statistics = {
                    name: 0.5 + torch.rand(12, generator=random) if reduction == "gather" else 0.5 + 0.1 * step
                    for name, reduction in statistics_of(component).items()
                }
                component.end_step(statistics)
        return state_hashes(results)

    def state_of(component: Any) -> dict[str, str]:
        return state_hashes(plain_state(component.state_dict()))

    def differ(one: dict[str, str], other: dict[str, str], what: str, advice: str) -> Iterator[tuple[str, str]]:
        if changed := changed_attributes(one, other):
            yield what.format(", ".join(changed[:3])), advice

    original = build()
    if problem := methods_problem(original):
        yield f"it {problem}", ""
    if not has_state(original):
        if has_method(original, "begin_step") or has_method(original, "end_step"):
            take_steps(original, 1)
            ends = take_steps(original, CALLS + 1), take_steps(build(), CALLS + 1)
            what = (
                f"an instance that begins at step {CALLS + 1}, as in a resumed run, differs from the original"
            )
            yield from differ(*ends, what, "take all from the step's context, or " + ADVICE)
        return
    take_steps(original, 1)
    saved, copy, new = plain_state(original.state_dict()), build(), "a new instance that loads its state"
    copy.load_state_dict(plain_state(saved))
    yield from differ(state_hashes(saved), state_of(copy), f"{new} returns another one, at {{}}", ADVICE)
    ends = take_steps(original, CALLS + 1), take_steps(copy, CALLS + 1)
    yield from differ(*ends, f"{new} goes on otherwise than the original", ADVICE)
    yield from differ(state_of(original), state_of(copy), f"{new} ends in another one, at {{}}", ADVICE)
    fresh = build()
    take_steps(fresh, 1)
    yield from _problems_of_a_skipped_step(fresh)
    if kind != "advantage":  # advantages alone are computed for the whole batch on every rank
        ranks = build(), build()
        for component, (step, shape) in zip(ranks, ((1, (4, 6)), (2, (2, 3))), strict=True):
            torch.manual_seed(1)
            call(component, step, shape)
        what = "calls on other rows leave another state, at {}: the ranks' states would differ"
        advice = "change the state in end_step, whose statistics are the same on all ranks"
        yield from differ(state_of(ranks[0]), state_of(ranks[1]), what, advice)


def _problems_of_a_skipped_step(component: Any) -> Iterator[tuple[str, str]]:
    """Yield what a step that was skipped does to a state: its statistics are NaN, or nothing."""
    statistics = statistics_of(component)
    if not statistics or not _is_finite(component.state_dict()):
        return
    for gathered in (torch.full((3,), NAN), torch.empty(0)):
        values = {name: gathered if kind == "gather" else NAN for name, kind in statistics.items()}
        advice = "return from end_step where a statistic is not finite, or is empty"
        try:
            component.end_step(values)
        except Exception as error:  # noqa: BLE001 - it is reported
            yield f"end_step raises for a step that was skipped: {describe(error)}", advice
        if not _is_finite(component.state_dict()):
            yield "a step that was skipped, whose statistics are NaN, makes its state NaN for ever", advice


def _is_finite(value: Any) -> bool:
    """Tell whether the tensors and floats of a state are finite."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float | torch.Tensor) or bool(torch.as_tensor(value).isfinite().all())


def _call(
    kind: str,
    component: Any,
    step: int,
    needs: tuple[str, ...],
    columns: Mapping[str, Any],
    shape: tuple[int, int],
) -> object:
    folds = getattr(component, "folds_correction", False)
    of_rows = getattr(component, "example_columns", COLUMNS)
    inputs = example(*shape, seed=step, needs=needs, folds_correction=folds, columns=of_rows)
    match kind:
        case "loss":
            return component.per_token(inputs).loss
        case "correction":
            # Far enough apart that a cap is reached.
            sampler = inputs.logprobs - 8 * (inputs.logprobs - inputs.old_logprobs)
            return component.correct(inputs.logprobs, sampler, inputs.token_mask)
        case "advantage" if has_method(component, "scale"):
            rewards = torch.tensor([[0.0], [1.0], [2.0], [2.5]]) * step
            return component.scale(rewards, torch.ones(1), torch.tensor([0, 0, 1, 1]))
        case "reward":
            completions = ["", "42", "x" * step]
            others = {**dict.fromkeys(missing_columns(component, columns), "42"), **columns}
            arguments = {
                "prompts": ["What is 6 x 7?"] * 3,
                "completions": completions,
                "completion_ids": [[1] * (1 + len(text)) for text in completions],
                **{name: [value] * 3 for name, value in others.items()},
            }
            call = RewardCall(component, arguments, 3)
            call.run()
            return call.scores.values if call.scores is not None else call.failure
    return None  # of other kinds only the steps are taken
