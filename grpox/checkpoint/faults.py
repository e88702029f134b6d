"""The batch of a step that was not taken: saved in ``faults/step-00000012``, read back, and computed again.

The replay in one process shows the numbers that are not finite.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from grpox.checkpoint.folders import (
    MANIFEST,
    publish,
    rank_file,
    read_whole,
    unfinished_of,
    write_manifest,
    write_text,
)
from grpox.checkpoint.rank_state import read_state, reading, samples_of_state, samples_state, write_state
from grpox.checkpoint.save_model import weights_on_main
from grpox.config import RunConfig
from grpox.errors import ConfigError, Problem, describe, nearest, text_of
from grpox.errors.redaction import redact, redacted
from grpox.errors.validation import problems_of
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry
from grpox.policy.batch import RolloutBatch, Sample, collate
from grpox.policy.forward_trial import ForwardTrial
from grpox.policy.models import load_model, load_tokenizer
from grpox.policy.routers import RouterBalance
from grpox.policy.saved_whole import save_whole
from grpox.runfile.overrides import COMMAND_LINE, apply_overrides
from grpox.runfile.paths import resolve_paths
from grpox.runfile.secrets import restore_secrets
from grpox.runtime.files import parse_json, read_small
from grpox.runtime.world import World
from grpox.update.nonfinite import NonFinite, find, in_order
from grpox.update.objective import StepLoss
from grpox.update.packing import StepTotals, count_masks
from grpox.update.policy_update import forward_pass

if TYPE_CHECKING:
    from grpox.policy.engine import Engine

FOLDER = "faults"
FAULT = "fault.json"
MODEL = "model"
MOST_DUMPS = 3
"""Dumps of a run; each holds the weights. Later faults are often consequences of the first ones."""

REPLAYED = (
    "loss",
    "correction",
    "train.beta",
    "train.kl",
    "train.entropy_coef",
    "train.router_aux_loss_coef",
    "train.off_policy_mask_threshold",
    "sampling.temperature",
    "model.dtype",
    "model.init",
)
"""Keys that change what a replay computes. The dump holds the tokens with the highest entropy."""


class Fault(BaseModel):
    """Description of the step in a dump."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    step: int = Field(ge=0)
    what: str
    """One line that names the values that were not finite."""
    world_size: int = Field(ge=1, le=1 << 16)
    found: list[NonFinite]
    """On all ranks, causes first."""
    config: dict[str, object]
    """Config of the run, with the weights of the terms in this step's loss."""

    @classmethod
    def read(cls, folder: Path) -> Fault:
        """Read the description in the dump `folder`.

        Raises:
            ValueError: it is missing or cannot be read.
        """
        try:
            return cls.model_validate(parse_json(read_small(folder / FAULT)))
        except (OSError, ValueError) as error:
            raise ValueError(f"{FAULT} cannot be read: {describe(error)}") from error


@dataclass
class FaultDumps:
    """Writes the dumps of a run. A failure to write one is reported and has no other effect."""

    engine: Engine
    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    world: World

    def dump(
        self,
        step: int,
        what: str,
        nonfinite: Sequence[NonFinite],
        micro_batches: Sequence[Sequence[Sample]],
        coefficients: Mapping[str, float],
    ) -> str:
        """Save the batch and the weights, which must be those before the step; a collective.

        Args:
            coefficients: keys of `train` -> the weights of the terms in the step's loss.

        Returns:
            a line with their folder, or the reason why they are not saved; on every rank.
        """
        folder = Path(self.config.output_dir) / FOLDER / f"step-{step:08d}"
        unfinished = unfinished_of(folder)
        others = [path for path in folder.parent.glob("step-*") if path != folder]
        if self.world.gather([len(others) >= MOST_DUMPS] if self.world.is_main else [])[0]:
            return f"its batch is not kept: {folder.parent} holds {MOST_DUMPS} already"
        config = redacted(self.config.model_dump(mode="json"))
        # A replay has the weights of this step, whatever moved them since the run began.
        config["train"] |= {**coefficients, "adaptive_entropy": None}
        fault = Fault(
            step=step,
            what=what,
            world_size=self.world.size,
            found=list(nonfinite),
            config=config,
        )

        def begin() -> None:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            write_text(unfinished / FAULT, fault.model_dump_json(indent=1))

        def write_samples() -> None:
            states = [samples_state(samples) for samples in micro_batches]
            write_state({"micro_batches": states}, rank_file(unfinished, self.world.rank))

        def complete() -> None:
            save_whole(self.engine.module, unfinished / MODEL, weights)
            self.tokenizer.save_pretrained(unfinished / MODEL)
            write_manifest(unfinished)
            publish(folder)

        failure = self._all(begin, main=True) or self._all(write_samples)
        if not failure:
            weights = weights_on_main(self.engine, self.world)
            failure = self._all(complete, main=True)
        if not failure:
            return f"its batch is kept: grpox replay {folder}"
        if self.world.is_main:
            shutil.rmtree(unfinished, ignore_errors=True)
        return f"its batch could not be kept in {folder}: {failure}"

    def _all(self, write: Callable[[], None], main: bool = False) -> str:
        """Write on every rank, or on rank 0 alone, and return the first failure to all."""
        failure = ""
        if self.world.is_main or not main:
            try:
                write()
            except Exception as error:  # noqa: BLE001 - libraries have their own for a full disk
                message = str(getattr(error, "strerror", None) or text_of(error))
                failure = redact(" ".join(message.split())) or type(error).__name__
        return next((each for each in self.world.gather([failure]) if each), "")


@dataclass(frozen=True)
class Dump:
    """A dump whose files match its manifest."""

    folder: Path
    fault: Fault

    @property
    def model(self) -> Path:
        """The weights before the step and the tokenizer, in Hugging Face format."""
        return self.folder / MODEL

    def micro_batches(self, device: torch.device) -> list[list[list[Sample]]]:
        """Read the samples of every rank, by micro-batch."""
        ranks = []
        for path in (rank_file(self.folder, rank) for rank in range(self.fault.world_size)):
            with reading(path):
                ranks.append([samples_of_state(each, device) for each in read_state(path)["micro_batches"]])
        return ranks


def open_dump(folder: Path) -> Dump:
    """Check the files of a dump and read its description.

    Raises:
        ConfigError: there is no such folder, it holds no dump, or one that is damaged.
    """
    if not (folder / FAULT).is_file() and not (folder / MANIFEST).is_file():
        raise ConfigError(_no_dump(folder))
    try:
        return Dump(folder, read_whole(folder, Fault.read))
    except ValueError as error:
        raise ConfigError(f"the dump is damaged: {error}", "DUMP", given=str(folder)) from error


def _no_dump(folder: Path) -> Problem:
    what = "holds no dump" if folder.is_dir() else "no such folder"
    around = (folder, folder / FOLDER, folder.parent)
    dumps = sorted({str(path.parent) for each in around for path in each.glob(f"step-*/{FAULT}")})
    allowed = f"a folder such as {dumps[0] if dumps else f'runs/mine/{FOLDER}/step-00000012'}"
    return Problem(what, "DUMP", given=str(folder), allowed=allowed, nearest=nearest(str(folder), dumps))


@dataclass(frozen=True)
class Replayed:
    """Result of a micro-batch, computed again."""

    rank: int
    place: int
    """Index among the micro-batches of its rank."""
    batch: RolloutBatch
    loss: float
    """Its share of the step's loss."""
    grad_norm: float
    terms: Mapping[str, Tensor]
    """Terms of its loss: name -> f32[B, T]."""
    parameters: Sequence[str]
    """Parameters whose gradient is not finite, in the order of the model."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Replay:
    """Result of a step, computed again."""

    micro_batches: Sequence[Replayed]
    nonfinite: Sequence[NonFinite]
    """Causes first, over all ranks."""
    grad_norm: float
    """Gradient norm of the whole step."""
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
        overrides: changes of the run's config such as ``loss.clip_high=0.2``, with keys in `REPLAYED`.

    Raises:
        ConfigError: an override is wrong, or a component is missing here.
    """
    config = _config(dump, overrides)
    registry = Registry(discover(config.plugins.disable))
    bound = registry.parse("loss", config.loss, "loss")
    correction = registry.build(registry.parse("correction", config.correction, "correction"))
    step_loss = StepLoss.of(registry.build(bound), correction, config.train, bound.needs)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = dump.micro_batches(device)
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
    replayed, nonfinite = [], []
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
            terms = result.detached().terms()
            replayed.append(Replayed(rank, place, batch, share, norm, terms, infinite))
            for total, parameter in zip(whole, model.parameters(), strict=True):
                total += 0 if parameter.grad is None else parameter.grad
        of_this = [each for each in replayed if each.rank == rank]
        nonfinite += find([each.batch.rows(each.terms) for each in of_this], rank)
    return Replay(replayed, in_order(nonfinite), _norm(whole), load_tokenizer(config.model))


def _config(dump: Dump, overrides: Sequence[str]) -> RunConfig:
    data: dict[str, Any] = copy.deepcopy(dict(dump.fault.config))
    # A model's own code is trusted when the user says so here, not because a file does.
    attention = {k: v for k, v in data["model"]["init"].items() if k == "attn_implementation"}
    # In the dump's model, adapters are merged.
    data["model"] |= {"path": str(dump.model.absolute()), "init": attention, "lora": None}
    keys = apply_overrides(data, overrides)
    allowed = ", ".join(REPLAYED)
    problems = [
        Problem("changes nothing of a replay", key, COMMAND_LINE, allowed=allowed)
        for key in keys
        if not any(f"{key}.".startswith(f"{each}.") for each in REPLAYED)
    ]
    # Rewards, trackers and the generator are not used, and so need no secrets.
    needed = {name: data[name] for name in ("loss", "correction", "model")}
    problems += restore_secrets(needed, dump.folder.absolute().parents[1])
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
