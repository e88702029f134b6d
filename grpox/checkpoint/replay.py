"""A step that was not taken, computed again in one process: which of its numbers are not finite."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from grpox.checkpoint.faults import Dump
from grpox.config import RunConfig
from grpox.errors import ConfigError, Problem
from grpox.errors.validation import problems_of
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry
from grpox.policy.batch import RolloutBatch, collate
from grpox.policy.engine import disable_dropout
from grpox.policy.models import load_model, load_tokenizer
from grpox.runfile.input_paths import resolve_paths
from grpox.runfile.masked import give_back_secrets
from grpox.runfile.overrides import COMMAND_LINE, apply_overrides
from grpox.update.nonfinite import Found, find, in_order
from grpox.update.policy_update import forward_pass
from grpox.update.step_loss import StepLoss, StepTotals, count_masks

REPLAYED = (
    "loss",
    "correction",
    "train.beta",
    "train.kl",
    "train.entropy_coef",
    "train.off_policy_mask_threshold",
    "sampling.temperature",
    "model.dtype",
    "model.init",
)
"""Keys that change what a replay computes. Which tokens have the highest entropy is kept in the dump."""


@dataclass(frozen=True)
class Replayed:
    """A micro-batch, computed again."""

    rank: int
    place: int
    """Among the micro-batches of its rank, from 0."""
    batch: RolloutBatch
    loss: float
    """Its share of the step's loss."""
    grad_norm: float
    terms: Mapping[str, Tensor]
    """What its loss is made of: name -> f32[B, T]."""
    parameters: Sequence[str]
    """Parameters whose gradient is not finite, in the order of the model."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Replay:
    """A step, computed again."""

    micro_batches: Sequence[Replayed]
    found: Sequence[Found]
    """Causes first, over all ranks."""
    grad_norm: float
    """Of the whole step."""
    tokenizer: PreTrainedTokenizerBase

    @property
    def loss(self) -> float:
        return sum(each.loss for each in self.micro_batches)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def replay(dump: Dump, overrides: Sequence[str] = ()) -> Replay:
    """Compute the step of a dump again, with the run's loss and correction or others.

    Args:
        overrides: ``loss.clip_high=0.2``: changes of the run's config, of keys among `REPLAYED`.

    Raises:
        ConfigError: an override is wrong, or a component is missing here.
    """
    config = _config(dump, overrides)
    registry = Registry(discover(config.plugins.disable))
    loss = registry.build(registry.parse("loss", config.loss, "loss"))
    correction = registry.build(registry.parse("correction", config.correction, "correction"))
    step_loss = StepLoss.of(loss, correction, config.train)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = dump.micro_batches(device)
    samples = [sample for of_rank in ranks for micro_batch in of_rank for sample in micro_batch]
    if config.train.beta > 0 and any(sample.reference_logprobs is None for sample in samples):
        what = "the run had no reference, so that the dump holds none of its log-probabilities"
        raise ConfigError(Problem(what, "train.beta", COMMAND_LINE, given=str(config.train.beta), allowed="0"))
    disable_progress_bar()
    model = load_model(config.model).to(device)
    disable_dropout(model)
    model.train()
    counts = count_masks([s.token_mask for s in each] for of_rank in ranks for each in of_rank)
    totals = StepTotals(*counts, config.sampling.max_completion_length)
    whole = [torch.zeros_like(parameter) for parameter in model.parameters()]
    made, found = [], []
    for rank, of_rank in enumerate(ranks):
        for place, micro_batch in enumerate(of_rank):
            batch = collate(micro_batch, device)
            model.zero_grad(set_to_none=True)
            result = forward_pass(model, batch, step_loss, totals, config.sampling.temperature)
            result.loss.backward()  # type: ignore[no-untyped-call]
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            infinite = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
            share, norm = float(result.loss.detach()), _norm(gradients.values())
            terms = result.detached().terms()
            made.append(Replayed(rank, place, batch, share, norm, terms, infinite))
            for total, parameter in zip(whole, model.parameters(), strict=True):
                total += 0 if parameter.grad is None else parameter.grad
        of_this = [each for each in made if each.rank == rank]
        found += find([each.batch.rows(each.terms) for each in of_this], rank)
    return Replay(made, in_order(found), _norm(whole), load_tokenizer(config.model))


def _config(dump: Dump, overrides: Sequence[str]) -> RunConfig:
    data: dict[str, Any] = copy.deepcopy(dict(dump.fault.config))
    # Code that came with a model is trusted when the user says so here, not because a file does.
    attention = {k: v for k, v in data["model"]["init"].items() if k == "attn_implementation"}
    # Of a run that trained adapters the dump holds the model with them merged in.
    data["model"] |= {"path": str(dump.model.absolute()), "init": attention, "lora": None}
    keys = apply_overrides(data, overrides)
    allowed = ", ".join(REPLAYED)
    problems = [
        Problem("changes nothing of a replay", key, COMMAND_LINE, allowed=allowed)
        for key in keys
        if not any(f"{key}.".startswith(f"{each}.") for each in REPLAYED)
    ]
    # Rewards, trackers and the generator are not asked, and so need none of theirs.
    needed = {name: data[name] for name in ("loss", "correction", "model")}
    problems += give_back_secrets(needed, dump.folder.absolute().parents[1])
    if problems:
        raise ConfigError(problems)
    data |= needed
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(problems_of(error, RunConfig, "")) from error
    resolve_paths(config, lambda key: Path.cwd())
    return config


def _norm(gradients: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
