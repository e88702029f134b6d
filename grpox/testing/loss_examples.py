"""Inputs for losses, from the smallest up and neutral where masked, and measurements of a loss on them.

Losses and gradients are measured by themselves, and through the core that trains.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from grpox.contracts import Capability, LossInputs, PolicyLoss
from grpox.update.objective import build_inputs, objective, per_token_loss
from grpox.update.packing import LossTraits, StepTotals, count_masks, token_weights

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Tensors = TypeVar("Tensors", bound="DataclassInstance")
SHAPES = ((1, 1), (1, 2), (2, 1), (2, 3), (4, 6))
"""(sequences, tokens): a violation is shown on the first shape that has it."""
SPREAD = 0.3
"""Standard deviation of the log-ratios: some are clipped by the usual bounds, most are not."""
BY_SEQUENCE = ("rewards", "group_ids", "sequence_ids")
"""Inputs of a loss that have no position of a token."""
GROUP = 2
"""Sequences of a group."""
LONGEST = 8
"""Longest completion that a run would allow, for `Reduction.SEQUENCE_SUM_BY_MAX_LENGTH`."""
COLUMNS: Mapping[str, Sequence[Any]] = {"answer": ("yes", "no")}
"""Column of a dataset -> values, for a loss that names none of its own in `example_columns`."""
close = partial(torch.allclose, rtol=1e-9, atol=1e-12)
"""True for two float64 tensors that differ by the order of sums alone."""


def example(
    sequences: int,
    tokens: int,
    seed: int = 0,
    needs: Sequence[str] = (),
    folds_correction: bool = False,
    dtype: torch.dtype = torch.float64,
    columns: Mapping[str, Sequence[Any]] = COLUMNS,
) -> LossInputs:
    """Build sequences of several lengths with advantages of both signs; a long one has a masked token inside.

    Two after the other are a group.

    Args:
        needs: capabilities that the loss declares; the inputs are None for others.
        folds_correction: give it correction weights.
        columns: column of the dataset -> values, which the sequences take in turn.
    """
    generator, shape = torch.Generator().manual_seed(seed), (sequences, tokens)
    uniform = partial(torch.rand, generator=generator, dtype=torch.float64)
    old = -0.5 - 3 * uniform(shape)
    logprobs = (old + SPREAD * torch.randn(shape, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
    row = torch.arange(sequences)
    advantages = (1.0 - 2.0 * (row % 2)) * (0.5 + uniform(sequences))
    mask = torch.arange(tokens) < (tokens - row).clamp(min=1).unsqueeze(1)
    if tokens > 3:
        mask[0, 1] = False
    given = LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=advantages.unsqueeze(1).expand(shape),
        token_mask=mask,
        entropy=2 * uniform(shape) if {Capability.ENTROPY, Capability.ENTROPY_GRADIENT} & set(needs) else None,
        correction_weights=2 * uniform(shape) if folds_correction else None,
    )
    further = {
        Capability.REFERENCE_LOGPROBS: (old + SPREAD * (uniform(shape) - 0.5)).clamp(max=-0.01),
        Capability.SAMPLER_LOGPROBS: (old + SPREAD * (uniform(shape) - 0.5)).clamp(max=-0.01),
        Capability.REWARDS: uniform((sequences, 2)),
        Capability.GROUP_IDS: row // GROUP + 3,
        Capability.SEQUENCE_IDS: row + 100,
        Capability.COLUMNS: {name: [values[n % len(values)] for n in row] for name, values in columns.items()},
    }
    needed: dict[str, Any] = {str(name): values for name, values in further.items() if name in needs}
    inputs = filled(to_dtype(replace(given, **needed), dtype), 0.0)
    if inputs.entropy is not None and Capability.ENTROPY_GRADIENT in needs:
        inputs.entropy.requires_grad_()
    return inputs


def is_of_groups(loss: Any) -> bool:
    """Tell whether the loss is given whole groups."""
    return getattr(loss, "scope", "token") == "group"


def tensors_of(inputs: DataclassInstance) -> dict[str, Tensor]:
    """Name the tensors of a dataclass, without the fields that are None."""
    named = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}


def mapped(inputs: Tensors, function: Callable[[Tensor], Tensor]) -> Tensors:
    """Apply `function` to every tensor."""
    return replace(inputs, **{name: function(tensor) for name, tensor in tensors_of(inputs).items()})


def mapped_tokens(inputs: Tensors, function: Callable[[Tensor], Tensor]) -> Tensors:
    """Apply `function` to every tensor that has positions of tokens, [B, T]."""
    named = tensors_of(inputs).items()
    return replace(inputs, **{name: function(tensor) for name, tensor in named if name not in BY_SEQUENCE})


def to_dtype(inputs: LossInputs, dtype: torch.dtype) -> LossInputs:
    """Convert every tensor but the mask."""
    return mapped(inputs, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def filled(inputs: LossInputs, value: float) -> LossInputs:
    """Put `value` where masked: 0 as `grpox.update.objective` does, or any number that a model may return."""
    changed = mapped_tokens(inputs, lambda tensor: torch.where(inputs.token_mask, tensor, value))
    return replace(changed, token_mask=inputs.token_mask)


def rows(inputs: Tensors, places: Any) -> Tensors:
    """Select sequences, in this order."""
    selected, columns = mapped(inputs, lambda tensor: tensor[places]), getattr(inputs, "columns", None)
    if columns is None:
        return selected
    count = len(next(iter(tensors_of(inputs).values())))
    numbers = torch.arange(count)[places].tolist()
    of_rows = {name: [values[number] for number in numbers] for name, values in columns.items()}
    return replace(selected, columns=of_rows)


def padded(inputs: Tensors, tokens: int) -> Tensors:
    """Append positions, all masked."""
    return mapped_tokens(inputs, lambda tensor: torch.nn.functional.pad(tensor, (0, tokens)))


def shown(inputs: DataclassInstance, **further: Tensor) -> str:
    """Write the inputs as text, a line for each sequence of each tensor."""
    named = tensors_of(inputs) | further
    columns: Mapping[str, Sequence[Any]] = getattr(inputs, "columns", None) or {}
    width = max(map(len, (*named, *columns)))
    lines = [
        f"{name:{width}} [{row}]  " + "  ".join(f"{float(value):.4g}" for value in values)
        for name, tensor in named.items()
        for row, values in enumerate(tensor.reshape(len(tensor), -1).tolist())
    ]
    lines += [
        f"{name:{width}} [{row}]  {cell!r}" for name, cells in columns.items() for row, cell in enumerate(cells)
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Measured:
    """A loss and its gradient by the log-probabilities, and by the entropies where these have a gradient."""

    loss: Tensor  # f64[B, T], zero where masked
    gradient: Tensor  # f64[B, T]
    by_entropy: Tensor  # f64[B, T], zero where the entropies have no gradient
    diagnostics: Mapping[str, Tensor]  # name -> f64[B, T], zero where masked


def measured_on(loss: PolicyLoss, inputs: LossInputs) -> Measured:
    """Compute the loss by itself; its gradient is that of the sum over tokens that are not masked.

    Raises:
        RunFailed: it raised, or its result is no loss.
    """
    given = inputs if inputs.logprobs.requires_grad else leaf(inputs)
    output = per_token_loss(loss, given)
    values = torch.where(inputs.token_mask, output.loss, 0.0)
    gradient, by_entropy = gradients_of(values.sum(), given)
    named = ((name, each.detach().reshape(len(each), -1)) for name, each in output.diagnostics.items())
    diagnostics = {name: torch.where(inputs.token_mask, each, 0.0) for name, each in named}
    return Measured(values.detach(), gradient, by_entropy, diagnostics)


def gradients_of(total: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Compute the gradients f64[B, T] of `total` by log-probabilities and entropies, 0 by what has none."""
    entropy = inputs.entropy
    if entropy is None or not entropy.requires_grad:
        [gradient] = torch.autograd.grad(total, [inputs.logprobs])
        return gradient, torch.zeros_like(gradient)
    both = torch.autograd.grad(total, [inputs.logprobs, entropy], allow_unused=True, materialize_grads=True)
    return both[0], both[1]


def step_gradient_on(loss: PolicyLoss, inputs: LossInputs, weights: Tensor | None = None) -> Tensor:
    """Compute the gradient f64[B, T] through the core, which neutralises masked positions around the loss.

    Args:
        weights: f64[B, T] of the tokens; default: 1.

    Raises:
        RunFailed: it raised, or its result is no loss.
    """
    given = leaf(inputs)
    named = {name: values for name, values in vars(given).items() if name != "correction_weights"}
    # The capabilities for which a run would give these inputs.
    needs = {name for name in Capability if named.get(name) is not None}
    if given.entropy is not None and given.entropy.requires_grad:
        needs.add(Capability.ENTROPY_GRADIENT)
    share = objective(
        loss,
        build_inputs(**named),
        torch.ones_like(given.logprobs) if weights is None else weights,
        factor=given.correction_weights,
        folds_correction=LossTraits.of(loss).folds_correction,
        needs=needs,
    )
    return gradients_of(share.loss, given)[0]


def step_gradient_of(loss: PolicyLoss, parts: Sequence[LossInputs]) -> Tensor:
    """Compute the gradient of one optimizer step over `parts`, its micro-batches: f64[B, T] of all rows."""
    totals = StepTotals(*count_masks([part.token_mask for part in parts]), LONGEST)
    weights = [token_weights(loss.reduction, part.token_mask, totals, torch.float64) for part in parts]
    return torch.cat([step_gradient_on(loss, part, own) for part, own in zip(parts, weights, strict=True)])


def slope(
    loss: PolicyLoss, inputs: LossInputs, of: Literal["logprobs", "entropy"] = "logprobs", step: float = 1e-6
) -> Tensor:
    """Compute central differences of the summed loss by each token's log-probability or entropy: f64[B, T]."""

    def total(values: Tensor) -> Tensor:
        changed: dict[str, Any] = {of: values}
        return measured_on(loss, replace(inputs, **changed)).loss.sum()

    return differences(total, getattr(inputs, of), inputs.token_mask, step)


def differences(value: Callable[[Tensor], Any], at: Tensor, mask: Tensor, step: float) -> Tensor:
    """Compute central differences of `value`, a number of a tensor f64[B, T], by the places in `mask`."""
    slopes = torch.zeros_like(at)
    for row, column in mask.nonzero().tolist():
        moved = torch.zeros_like(at)
        moved[row, column] = step
        slopes[row, column] = (value(at + moved) - value(at - moved)) / (2 * step)
    return slopes


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
    row = torch.arange(len(order)).unsqueeze(1).expand_as(order)
    return mapped_tokens(inputs, lambda tensor: tensor.gather(1, order)), (row, order)


def leaf(inputs: LossInputs) -> LossInputs:
    """Replace the log-probabilities by a copy that takes a gradient, and so entropies that have one."""
    entropy = inputs.entropy
    if entropy is not None and entropy.requires_grad:
        entropy = entropy.detach().clone().requires_grad_()
    return replace(inputs, logprobs=inputs.logprobs.detach().clone().requires_grad_(), entropy=entropy)


def leaves(tensor: Tensor) -> list[Tensor]:
    """List the tensors on which a backward pass from `tensor` leaves a gradient."""
    variables: list[Tensor] = []
    seen, ahead = set(), [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            variables.append(node.variable)
        ahead += [after for after, _ in node.next_functions]
    return variables


def random_numbers() -> tuple[bytes, Any, bytes]:
    """Read the state of the global generators of torch, Python and numpy."""
    own: Any = np.random.get_state(legacy=False)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), own["state"]["key"].tobytes()
