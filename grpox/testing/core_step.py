"""The loss and gradient of one optimizer step over given tensors, through the core that trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from grpox.config import TrainConfig
from grpox.contracts import Capability
from grpox.errors import ConfigError, Problem, nearest
from grpox.errors.validation import problems_of
from grpox.plugins.registry import bind, installed
from grpox.runtime.world import World
from grpox.testing.loss_examples import BY_SEQUENCE
from grpox.update.objective import StepLoss, build_inputs
from grpox.update.packing import StepTotals, count_masks
from grpox.update.token_masks import choose

REQUIRED = ("logprobs", "advantages", "token_mask")
OPTIONAL = ("old_logprobs", "sampler_logprobs", "ref_logprobs", "entropy")
INPUT_NAMES = {
    Capability.REFERENCE_LOGPROBS: "ref_logprobs",
    Capability.ENTROPY_GRADIENT: "entropy",
    **{capability: capability.value for capability in Capability if capability.value in BY_SEQUENCE},
}
"""Capability that a loss may need -> the tensor that a micro-batch must have."""


class Settings(TrainConfig):
    """The numbers of a step, checked as those of a run file are."""

    max_completion_length: int = Field(ge=1)
    world_size: int = Field(ge=1)


def step_gradient(
    loss: str | Mapping[str, Any],
    micro_batches: Sequence[Mapping[str, Tensor]],
    *,
    correction: str | Mapping[str, Any] = "none",
    beta: float = 0.0,
    kl: str = "k3",
    entropy_coef: float = 0.0,
    top_entropy_quantile: float = 1.0,
    off_policy_mask_threshold: float | None = None,
    max_completion_length: int,
    world_size: int = 1,
) -> tuple[Tensor, list[Tensor]]:
    """Compute an optimizer step's loss, and its gradient by each micro-batch's log-probabilities.

    Everything is computed in float64, whatever the dtype of the tensors.

    Args:
        loss: as in a run file: ``"dapo"``, or ``{"name": "dapo", "clip_high": 0.28}``.
        micro_batches: of all ranks; micro-batch k belongs to rank k mod `world_size`, so ranks may have
            different numbers of them. Each is a mapping with `logprobs` f64[B, T], `advantages` f64[B] or
            f64[B, T], `token_mask` bool[B, T], and where there are any `old_logprobs` (default: equal to
            logprobs, as before the first update), `sampler_logprobs` (NaN: unknown), `ref_logprobs` and
            `entropy`, f64[B, T] each. For a loss that needs them `rewards` f64[B, K], `group_ids` and
            `sequence_ids` i64[B]. B and T may differ between micro-batches.
        correction: as in a run file.
        beta: weight of the KL to the reference; more than 0 needs `ref_logprobs`.
        kl: its estimator: k1, k2, k3 or unbiased.
        entropy_coef: weight of the entropy bonus, as in `train`; more than 0 needs `entropy`. The loss contains
            the bonus; its gradient is one with respect to the entropy, -entropy_coef / N_tok at each token.
        top_entropy_quantile: the part of the step's tokens, those of the highest entropy, that the policy loss
            is made of, as in `train`; less than 1 needs `entropy`.
        off_policy_mask_threshold: as in `train`.
        max_completion_length: the divisor of losses that are normalised by a constant length.
        world_size: ranks that share the step. Their shares add up, so it changes no gradient.

    Returns:
        the loss, a scalar f64, and one gradient f64[B, T] per micro-batch, in their order.

    Raises:
        ConfigError: a component, parameter, key, shape or number is wrong.
        RunFailed: the loss or the correction raised or returned what is none.
    """
    given = {
        "beta": beta,
        "kl": kl,
        "entropy_coef": entropy_coef,
        "top_entropy_quantile": top_entropy_quantile,
        "off_policy_mask_threshold": off_policy_mask_threshold,
        "max_completion_length": max_completion_length,
        "world_size": world_size,
    }
    try:
        settings = Settings.model_validate(given, strict=True)
    except ValidationError as error:
        raise ConfigError(problems_of(error, Settings)) from error
    bound, corrects = bind("loss", loss), installed().build(bind("correction", correction))
    if Capability.COLUMNS in bound.needs:
        raise ConfigError(f"{bound} needs columns, and no dataset is here", "loss", given=bound.label)
    needed = [*REQUIRED, *(["ref_logprobs"] if beta > 0 else [])]
    needed += ["entropy"] if entropy_coef > 0 or top_entropy_quantile < 1 else []
    needed += [name for capability, name in INPUT_NAMES.items() if capability in bound.needs]
    if isinstance(micro_batches, Mapping | str) or not isinstance(micro_batches, Sequence) or not micro_batches:
        what = "a step is a list of at least one micro-batch"
        raise ConfigError(what, "micro_batches", given=type(micro_batches).__name__)
    parts = [_tensors(place, micro_batch, needed) for place, micro_batch in enumerate(micro_batches)]
    masks = [part["token_mask"] for part in parts]
    keeps: list[Tensor | None] = [None] * len(parts)
    if top_entropy_quantile < 1:
        entropies, places = (
            [part["entropy"] for part in parts],
            [mask.flatten().nonzero()[:, 0] for mask in masks],
        )
        keeps[:], _ = choose(entropies, places, top_entropy_quantile, World(0, 1, torch.device("cpu")))
    step_loss = StepLoss.of(installed().build(bound), corrects, settings, bound.needs)
    # Each rank counts its own and the counts are added, as the all-reduce of a run does.
    counts = [count_masks(masks[rank::world_size]) for rank in range(world_size)]
    tokens, sequences, number = (sum(column) for column in zip(*counts, strict=True))
    totals = StepTotals(tokens, sequences, number, max_completion_length)
    shares = [
        step_loss.micro_batch(build_inputs(**part), totals, part.get("sampler_logprobs"), keep).loss
        for part, keep in zip(parts, keeps, strict=True)
    ]
    total = torch.stack(shares).sum()
    gradients = torch.autograd.grad(total, [part["logprobs"] for part in parts])
    return total.detach(), list(gradients)


def _tensors(place: int, given: Any, needed: Sequence[str]) -> dict[str, Tensor]:
    """Check a micro-batch, and name its tensors as `build_inputs` does."""
    key = f"micro_batches[{place}]"
    if not isinstance(given, Mapping):
        raise ConfigError("a micro-batch is a mapping of names to tensors", key, given=type(given).__name__)
    known = (*REQUIRED, *OPTIONAL, *BY_SEQUENCE)
    problems = [
        Problem("no such tensor", f"{key}.{name}", allowed=", ".join(known), nearest=nearest(name, known))
        for name in given
        if name not in known
    ]
    missing = (name for name in dict.fromkeys(needed) if given.get(name) is None)
    problems += [Problem("missing", f"{key}.{name}") for name in missing]
    if problems:
        raise ConfigError(problems)
    tensors = {name: torch.as_tensor(value) for name, value in given.items() if value is not None}
    shape = tuple(tensors["logprobs"].shape)
    if len(shape) != 2:
        raise ConfigError("must have the shape [B, T]", f"{key}.logprobs", given=str(shape))
    for name, tensor in tensors.items():
        shapes: list[tuple[int, ...]] = [shape[:1]] if name in BY_SEQUENCE else [shape]
        shapes += [shape[:1]] if name == "advantages" else []
        if name == "rewards":
            shapes = [(shape[0], *(tensor.shape[1:2] or (1,)))]
        if tuple(tensor.shape) not in shapes:
            allowed, other = " or ".join(map(str, shapes)), str(tuple(tensor.shape))
            problems.append(Problem("wrong shape", f"{key}.{name}", given=other, allowed=allowed))
    if not bool(((tensors["token_mask"] == 0) | (tensors["token_mask"] == 1)).all()):
        problems.append(Problem("holds something else than 0 and 1", f"{key}.token_mask"))
    if problems:
        raise ConfigError(problems)
    # Detached, so that a caller's own graph is neither needed nor changed.
    named = {
        name: tensor if name in ("group_ids", "sequence_ids") else tensor.detach().to(torch.float64)
        for name, tensor in tensors.items()
    }
    named["logprobs"] = named["logprobs"].clone().requires_grad_()
    named["token_mask"] = tensors["token_mask"].bool()
    if "ref_logprobs" in named:
        named["reference_logprobs"] = named.pop("ref_logprobs")
    return named
