"""Checks of a loss that asks for more inputs than every loss is given: the entropy, whole groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpox.contracts import Capability, LossInputs
from grpox.errors import nearest
from grpox.plugins.optional_methods import statistics_of
from grpox.testing.conformance import require
from grpox.testing.loss_examples import leaf, mapped_tokens, measured_on, shown, slope
from grpox.update.objective import per_token_loss
from grpox.update.step_statistics import OF_COMPLETIONS, OF_TOKENS

OPTIONAL = {
    **{each.value: f"needs=('{each}',)" for each in Capability if each in LossInputs.__dataclass_fields__},
    "correction_weights": "folds_correction = True",
}
"""Inputs that are None unless the loss declares them, and the declaration."""


def is_of_groups(loss: Any) -> bool:
    """Tell whether the loss is given whole groups."""
    return getattr(loss, "scope", "token") == "group"


def check_scope(loss: Any, inputs: LossInputs) -> None:
    """Check that a loss of groups can tell them apart."""
    what = "it has scope 'group' and does not ask which sequences belong together"
    advice = "declare needs = ('group_ids',), in the ComponentSpec if it is a plugin's"
    require(not is_of_groups(loss) or inputs.group_ids is not None, what, shown(inputs), advice)


def depends_on_others(loss: Any, inputs: LossInputs) -> bool:
    """Tell whether the log-probability of a token changes the loss of other tokens of its sequence."""
    before = per_token_loss(loss, leaf(inputs)).loss.detach()
    for token in range(inputs.token_mask.shape[1]):
        others = inputs.token_mask.clone()
        others[:, token] = False
        moved = inputs.logprobs.clone()
        moved[:, token] -= torch.where(inputs.token_mask[:, token], 0.05, 0.0)
        after = per_token_loss(loss, leaf(replace(inputs, logprobs=moved))).loss.detach()
        if not torch.equal(before[others], after[others]):
            return True
    return False


def units_of(loss: Any, inputs: LossInputs) -> list[list[int]]:
    """List the sequences that a run never parts: those of each group for a loss of groups, else single ones."""
    if not is_of_groups(loss) or inputs.group_ids is None:
        return [[row] for row in range(len(inputs.logprobs))]
    groups = inputs.group_ids.tolist()
    return [[row for row, other in enumerate(groups) if other == group] for group in dict.fromkeys(groups)]


def without_gaps(inputs: LossInputs) -> tuple[LossInputs, tuple[Tensor, Tensor]]:
    """Move the tokens that are masked within a sequence to its end.

    Returns:
        the inputs, and the rows and the places i64[B, T] at which their positions were.
    """
    order = torch.argsort((~inputs.token_mask).long(), dim=1, stable=True)
    rows = torch.arange(len(order)).unsqueeze(1).expand_as(order)
    return mapped_tokens(inputs, lambda tensor: tensor.gather(1, order)), (rows, order)


def check_names(loss: Any, needs: Sequence[str], inputs: LossInputs) -> None:
    """Check that what the loss needs, and the statistics that it asks for, are names that a run knows."""
    capabilities = [str(each) for each in Capability]
    for name in needs:
        near, what = nearest(name, capabilities), f"it needs {name!r}, which is no capability"
        require(name in capabilities or not near, what, advice=f"did you mean {near!r}?")
    known = [*OF_TOKENS, *OF_COMPLETIONS, *per_token_loss(loss, leaf(inputs)).diagnostics]
    for name in statistics_of(loss):
        advice = f"there are {', '.join(known)}: those of a step, and its own diagnostics"
        require(name in known, f"it asks for the statistic {name!r}, which no step has", advice=advice)


def check_correction(loss: Any, inputs: LossInputs) -> None:
    """Check that a loss that folds the correction applies it: the core then does not."""
    weights = inputs.correction_weights
    if weights is None:
        return
    others = (replace(inputs, correction_weights=torch.full_like(weights, value)) for value in (1.0, 0.5))
    one, other = (measured_on(loss, each) for each in others)
    same = torch.equal(one.loss, other.loss) and torch.equal(one.gradient, other.gradient)
    what = "it declares folds_correction, and other correction weights change neither loss nor gradient"
    advice = "the core leaves the correction to it: apply inputs.correction_weights, or drop the declaration"
    require(not same, what, shown(inputs), advice)


def check_abstentions(loss: Any, inputs: LossInputs) -> None:
    """Check that a reward function that abstained from a sequence leaves the loss finite."""
    if inputs.rewards is None:
        return
    for places in ((..., 0), (0,)):
        rewards = inputs.rewards.clone()
        rewards[places] = float("nan")
        given = replace(inputs, rewards=rewards)
        measured = measured_on(loss, given)
        is_finite = bool(torch.stack([measured.loss, measured.gradient]).isfinite().all())
        what = "where a reward function abstained, its loss or gradient is not finite"
        advice = "rewards are NaN there: use nansum, nan_to_num, or mask by rewards.isnan()"
        require(is_finite, what, shown(given), advice)


def check_constant_entropy(loss: Any, inputs: LossInputs) -> None:
    """Check that a loss whose value depends on an entropy without gradient says so on purpose."""
    if inputs.entropy is None or inputs.entropy.requires_grad or getattr(loss, "entropy_as_constant", False):
        return
    entropy = inputs.entropy.clone().requires_grad_()
    gradient = measured_on(loss, replace(inputs, entropy=entropy)).by_entropy
    require(
        not bool((gradient != 0).any()),
        "its value depends on the entropy, and its gradient does not: the entropy that it is given has none",
        shown(inputs, gradient_by_entropy=gradient),
        "declare needs = ('entropy_gradient',) to train on the entropy, or entropy_as_constant = True if it is "
        "meant as a constant",
    )


def check_entropy_gradient(loss: Any, inputs: LossInputs) -> None:
    """Check that the gradient of a loss by its entropies is that of its value."""
    if inputs.entropy is None or not inputs.entropy.requires_grad:
        return
    gradient, expected = measured_on(loss, inputs).by_entropy, slope(loss, inputs, "entropy")
    place = divmod(int((gradient - expected).abs().argmax()), gradient.shape[1])
    require(
        torch.allclose(gradient, expected, rtol=1e-5, atol=1e-7),
        f"at token {place} autograd gives {gradient[place].item():.6g} by the entropy, and the slope of its "
        f"value is {expected[place].item():.6g}",
        shown(inputs, gradient=gradient, expected=expected),
        "a detach() hides a part of the value from autograd: use inputs.entropy as it is",
    )
