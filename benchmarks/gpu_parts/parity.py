"""The gradient of every built-in loss in every forward mode, against float64 on the CPU.

The reference passes padded sequences through all logits. Old log-probabilities lie around the current ones, so
that some tokens are clipped, and so far from the bounds that no rounding moves a token over them. Prompts are
shared, and one group teaches nothing.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gpu_parts.models import TINY, Shape, random_model
from gpu_parts.part import Part, flat, relative_error
from grpox.config import TrainConfig
from grpox.plugins.registry import bind, installed
from grpox.policy.batch import FULL_LOGITS, ForwardMode, PackedBatch, Sample, collate
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.scoring_forward import install_scoring_forward
from grpox.update.objective import StepLoss
from grpox.update.packing import StepTotals, count_masks
from grpox.update.policy_update import forward_pass
from grpox_losses.plugin import LOSSES

VARLEN = "grpox_varlen"
"""Attention by sequence lengths, which packing needs."""
MODES: dict[str, tuple[str, Mapping[str, bool]]] = {
    "all logits": ("sdpa", {"chunked_logprobs": False}),
    "chunked": ("sdpa", {"prefix_sharing": False, "packing": False}),
    "shared prompts": ("sdpa", {"prefix_sharing": True, "packing": False}),
    "chunked, varlen": (VARLEN, {"prefix_sharing": False, "packing": False}),
    "packed, varlen": (VARLEN, {"prefix_sharing": False, "packing": True}),
}
"""Name -> attn_implementation, and settings of the section train."""
SHAPE = Shape(256, 512, 3, 8, 2, vocabulary=2048)
FLOAT32_TOLERANCE = 1e-4
"""Largest relative error of a float32 gradient, without TF32."""
GROUPS, SIZE, LONGEST = 3, 4, 17
"""Groups of a batch, completions of a group, and tokens of the longest."""
DISTANCES = (-0.6, -0.1, 0.1, 0.6)
"""Old log-probabilities less current ones; the losses clip near -0.2 and 0.2, or far beyond."""
LEAST_COSINE = 0.99
"""Least cosine of a bfloat16 gradient with the float64 one."""


@dataclass(frozen=True)
class Loss:
    """A built-in loss, and what it needs."""

    name: str
    step: StepLoss


def measure(part: Part) -> None:
    """Record for each loss and mode the gradient's relative error in float32, and its cosine in bfloat16."""
    torch.set_float32_matmul_precision("highest")
    host, shape = torch.device("cpu"), TINY if part.small else SHAPE
    exact = random_model(shape, host, torch.float64)
    losses = [built(spec.name) for spec in LOSSES]
    current = torch.zeros(GROUPS * SIZE, LONGEST, dtype=torch.float64)
    exact_batch = batch_of(shape.vocabulary, host, torch.float64, current)
    with torch.no_grad():
        current, _ = completion_logprobs(exact, exact_batch, 1.0)
    exact_batch = batch_of(shape.vocabulary, host, torch.float64, current)
    references = {loss.name: gradient(exact, exact_batch, loss, FULL_LOGITS) for loss in losses}
    part.record("reference", {"loss": {name: value for name, (value, _) in references.items()}})
    for dtype in (torch.float32, torch.bfloat16):
        batch = batch_of(shape.vocabulary, part.device, torch.float32, current)
        for name, (attention, settings) in MODES.items():
            if attention == VARLEN and VARLEN not in ALL_ATTENTION_FUNCTIONS:
                continue
            model = copy.deepcopy(exact).to(part.device, dtype)
            model.set_attn_implementation(attention)
            place = f"{str(dtype).removeprefix('torch.')}, {name}"
            part.attempt(place, lambda m=model, s=settings, b=batch: compared(m, s, b, losses, references))
            check(part, place, dtype)


def check(part: Part, place: str, dtype: torch.dtype) -> None:
    """Hold the figures of one mode to the tolerances; CUDA has no varlen kernel of float32."""
    found = part.figures[place]
    if dtype == torch.float32:
        for name, error in found.get("errors", {}).items():
            part.check(f"{place}, {name}: error of the gradient", error, FLOAT32_TOLERANCE)
    else:
        for name, cosine in found.get("cosines", {}).items():
            part.check(f"{place}, {name}: 1 - cosine", 1 - cosine, 1 - LEAST_COSINE)
    packs = place.endswith("packed, varlen") and (dtype == torch.bfloat16 or not part.on_cuda)
    if packs and found.get("installed", "train.packing") != "train.packing":
        part.fail(f"{place}: packing was not installed: {found['failures']}")


def built(name: str) -> Loss:
    """Build a loss without correction, KL and entropy bonus."""
    bound = bind("loss", name)
    correction = installed().build(bind("correction", "none"))
    return Loss(name, StepLoss(installed().build(bound), correction, needs=frozenset(bound.needs)))


def batch_of(vocabulary: int, device: torch.device, dtype: torch.dtype, current: Tensor) -> PackedBatch:
    """Make three groups of four completions of 3 to 17 tokens; the last group has advantages of 0.

    Args:
        current: f64[12, 17], log-probabilities of the tokens.
    """
    rng = random.Random(0)
    samples = []
    for group in range(GROUPS):
        prompt = tuple(rng.randrange(2, vocabulary) for _ in range(rng.randrange(4, 12)))
        for place in range(SIZE):
            length = rng.randrange(3, LONGEST + 1)
            completion = tuple(rng.randrange(2, vocabulary) for _ in range(length))
            distances = [rng.choice(DISTANCES) + rng.uniform(-0.05, 0.05) for _ in range(length)]
            old = current[SIZE * group + place, :length].numpy() + distances
            # dppo leaves a token out where the sampler's probability is far from the policy's.
            sampler = np.where(np.arange(length) % 5 == 4, -0.3, old)
            mask = np.array([rng.random() < 0.9 for _ in range(length - 1)] + [True])
            samples.append(
                Sample(
                    prompt,
                    completion,
                    mask,
                    sampler.astype(np.float32),
                    0.0 if group == 2 else (1.5, -0.5, 0.75, -1.75)[place],
                    old_logprobs=torch.tensor(old, dtype=dtype, device=device),
                    rewards=np.array([float(place % 2)], dtype=np.float32),
                    group_id=group,
                    sequence_id=SIZE * group + place,
                )
            )
    return collate(samples, device)


def compared(
    model: PreTrainedModel,
    settings: Mapping[str, bool],
    batch: PackedBatch,
    losses: Sequence[Loss],
    references: Mapping[str, tuple[float, Tensor]],
) -> dict[str, Any]:
    """Compare the gradients of all losses in the mode that `settings` give on this model."""
    mode = install_scoring_forward(model, TrainConfig.model_validate({"learning_rate": 1e-5, **settings}))
    errors, cosines = {}, {}
    for loss in losses:
        _, own = gradient(model, batch, loss, mode)
        reference = references[loss.name][1]
        errors[loss.name] = relative_error(own, reference)
        cosines[loss.name] = float(cosine_similarity(own, reference, dim=0))
    return {"installed": named(mode), "failures": list(mode.failures), "errors": errors, "cosines": cosines}


def named(mode: ForwardMode) -> str:
    """Name the key of the run file that enables the installed mode."""
    return "all logits" if mode == FULL_LOGITS else str(mode)


def gradient(model: PreTrainedModel, batch: PackedBatch, loss: Loss, mode: ForwardMode) -> tuple[float, Tensor]:
    """Return the loss, and its gradient by all weights f64[N] on the host."""
    model.zero_grad(set_to_none=True)
    totals = StepTotals(*count_masks([[sample.token_mask for sample in batch.samples]]), 32)
    own = collate(batch.samples, model.device, mode)
    result = forward_pass(model, own, loss.step, totals, 1.0)
    result.loss.backward()
    return float(result.loss.detach()), flat([p.grad for p in model.parameters() if p.grad is not None])
