"""The step of a dump computed again in one process, which shows the numbers that are not finite."""

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

from grpox.checkpoint.faults import FAULT, FOLDER, MODEL, Fault
from grpox.checkpoint.folders import MANIFEST, rank_file, read_whole
from grpox.checkpoint.rank_state import read_state, reading, samples_of_state
from grpox.config import RunConfig
from grpox.errors import ConfigError, Problem, nearest
from grpox.errors.validation import problems_of
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry
from grpox.policy.batch import PackedBatch, collate
from grpox.policy.forward_trial import ForwardTrial
from grpox.policy.models import load_model, load_tokenizer
from grpox.policy.routers import RouterBalance
from grpox.runfile.overrides import COMMAND_LINE, apply_overrides
from grpox.runfile.paths import resolve_paths
from grpox.runfile.secrets import restore_secrets
from grpox.runtime.world import World
from grpox.update.nonfinite import NonFinite, find, in_order
from grpox.update.objective import StepLoss
from grpox.update.packing import StepTotals, count_masks
from grpox.update.policy_update import forward_pass

REPLAYED = (
    *("loss", "correction", "train.beta", "train.kl", "train.entropy_coef", "train.router_aux_loss_coef"),
    *("train.off_policy_mask_threshold", "sampling.temperature", "model.dtype", "model.init"),
)
"""Keys that change what a replay computes. The dump holds the tokens with the highest entropy."""


def open_dump(folder: Path) -> Fault:
    """Check the files of a dump and read its description.

    Raises:
        ConfigError: there is no such folder, or it holds no dump or a damaged one.
    """
    if not (folder / FAULT).is_file() and not (folder / MANIFEST).is_file():
        what = "holds no dump" if folder.is_dir() else "no such folder"
        around = (folder, folder / FOLDER, folder.parent)
        dumps = sorted({str(path.parent) for each in around for path in each.glob(f"step-*/{FAULT}")})
        allowed = f"a folder such as {dumps[0] if dumps else f'runs/mine/{FOLDER}/step-00000012'}"
        near = nearest(str(folder), dumps)
        raise ConfigError(what, "DUMP", given=str(folder), allowed=allowed, nearest=near)
    try:
        return read_whole(folder, Fault.read)
    except ValueError as error:
        raise ConfigError(f"the dump is damaged: {error}", "DUMP", given=str(folder)) from error


@dataclass(frozen=True)
class Result:
    """Loss and gradient norm of a micro-batch or of a step, computed again."""

    loss: float
    """Share of a micro-batch in the step's loss, or the whole."""
    grad_norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Replayed(Result):
    """Result of a micro-batch."""

    rank: int
    place: int
    """Index among the micro-batches of its rank."""
    batch: PackedBatch
    terms: Mapping[str, Tensor]
    """Terms of its loss: name -> f32[B, T]."""
    parameters: Sequence[str]
    """Parameters whose gradient is not finite, in the order of the model."""


@dataclass(frozen=True)
class Replay(Result):
    """Result of a step."""

    micro_batches: Sequence[Replayed]
    nonfinite: Sequence[NonFinite]
    """Numbers that are not finite over all ranks, causes first."""
    tokenizer: PreTrainedTokenizerBase


def replay(folder: Path, fault: Fault, overrides: Sequence[str] = ()) -> Replay:
    """Compute the step of a dump again, with the run's loss and correction or others.

    Args:
        overrides: changes of the run's config such as ``loss.clip_high=0.2``, with keys in `REPLAYED`.

    Raises:
        ConfigError: an override is wrong, or a component is missing here.
    """
    config = _config(folder, fault, overrides)
    registry = Registry(discover(config.plugins.disable))
    bound = registry.parse("loss", config.loss, "loss")
    correction = registry.build(registry.parse("correction", config.correction, "correction"))
    step_loss = StepLoss.of(registry.build(bound), correction, config.train, bound.needs)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = []
    for rank in range(fault.world_size):
        with reading(path := rank_file(folder, rank)):
            ranks.append([samples_of_state(each, device) for each in read_state(path)["micro_batches"]])
    samples = [sample for of_rank in ranks for micro_batch in of_rank for sample in micro_batch]
    if step_loss.needs_reference and any(sample.reference_logprobs is None for sample in samples):
        what = "the run had no reference, so that the dump holds none of its log-probabilities"
        if config.train.beta == 0:
            raise ConfigError(what, "loss", COMMAND_LINE, given=str(bound), allowed="one without a reference")
        raise ConfigError(what, "train.beta", COMMAND_LINE, given=str(config.train.beta), allowed="0")
    disable_progress_bar()
    model = load_model(config.model).to(device)
    coefficient = config.train.router_aux_loss_coef
    routers = RouterBalance(model, coefficient) if coefficient else None
    ForwardTrial(model, model, World(0, 1, device)).check_repeats()
    model.train()
    counts = count_masks([s.token_mask for s in each] for of_rank in ranks for each in of_rank)
    totals = StepTotals(*counts, config.sampling.max_completion_length)
    whole = [torch.zeros_like(parameter) for parameter in model.parameters()]
    replayed, nonfinite = list[Replayed](), list[NonFinite]()
    for rank, of_rank in enumerate(ranks):
        for place, micro_batch in enumerate(of_rank):
            batch = collate(micro_batch, device)
            model.zero_grad(set_to_none=True)
            temperature = config.sampling.temperature
            result = forward_pass(model, batch, step_loss, totals, temperature, routers=routers)
            result.loss.backward()  # type: ignore[no-untyped-call]
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            infinite = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
            share, norm = float(result.loss.detach()), _norm(gradients.values())
            replayed.append(Replayed(share, norm, rank, place, batch, result.detached().terms(), infinite))
            for total, parameter in zip(whole, model.parameters(), strict=True):
                total += 0 if parameter.grad is None else parameter.grad
        nonfinite += find([each.batch.rows(each.terms) for each in replayed if each.rank == rank], rank)
    loss, tokenizer = sum(each.loss for each in replayed), load_tokenizer(config.model)
    return Replay(loss, _norm(whole), replayed, in_order(nonfinite), tokenizer)


def _config(folder: Path, fault: Fault, overrides: Sequence[str]) -> RunConfig:
    data: dict[str, Any] = copy.deepcopy(dict(fault.config))
    # A model's own code is trusted when the user says so here, not because a file does.
    attention = {k: v for k, v in data["model"]["init"].items() if k == "attn_implementation"}
    # In the dump's model, adapters are merged.
    data["model"] |= {"path": str((folder / MODEL).absolute()), "init": attention, "lora": None}
    problems = [
        Problem("changes nothing of a replay", key, COMMAND_LINE, allowed=", ".join(REPLAYED))
        for key in apply_overrides(data, overrides)
        if not any(f"{key}.".startswith(f"{each}.") for each in REPLAYED)
    ]
    # Rewards, trackers and the generator are not used, and so need no secrets.
    needed = {name: data[name] for name in ("loss", "correction", "model")}
    problems += restore_secrets(needed, folder.absolute().parents[1])
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
