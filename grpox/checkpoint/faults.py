"""The batch of a step that was not taken, with the weights before it, saved in ``faults/step-00000012``."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field
from transformers import PreTrainedTokenizerBase

from grpox.checkpoint.folders import publish, rank_file, unfinished_of, write_manifest, write_text
from grpox.checkpoint.rank_state import samples_state, write_state
from grpox.checkpoint.save_model import weights_on_main
from grpox.config import RunConfig
from grpox.errors import describe, text_of
from grpox.errors.redaction import redact, redacted
from grpox.policy.batch import Sample
from grpox.policy.model_folder import save_whole
from grpox.runtime.files import parse_json, read_small
from grpox.runtime.world import World
from grpox.update.nonfinite import NonFinite

if TYPE_CHECKING:
    from grpox.policy.engine import Engine

FOLDER = "faults"
FAULT = "fault.json"
MODEL = "model"
MOST_DUMPS = 3
"""Dumps of a run; each holds the weights. Later faults are often consequences of the first ones."""


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
        """Read the description in the dump `folder`; raises ValueError if it cannot be read."""
        try:
            return cls.model_validate(parse_json(read_small(folder / FAULT)))
        except (OSError, ValueError) as error:
            raise ValueError(f"{FAULT} cannot be read: {describe(error)}") from error


def dump_fault(
    engine: Engine,
    run: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    step: int,
    what: str,
    nonfinite: Sequence[NonFinite],
    micro_batches: Sequence[Sequence[Sample]],
    coefficients: Mapping[str, float],
) -> str:
    """Save the batch of a step and the weights, which must be those before it; a collective.

    Args:
        coefficients: keys of `train` -> the weights of the terms in the step's loss.

    Returns:
        a line with their folder, or the reason why they are not saved; on every rank. A failure to write has
        no other effect.
    """
    folder = Path(run.output_dir) / FOLDER / f"step-{step:08d}"
    unfinished = unfinished_of(folder)
    others = [path for path in folder.parent.glob("step-*") if path != folder]
    if world.gather([len(others) >= MOST_DUMPS] if world.is_main else [])[0]:
        return f"its batch is not kept: {folder.parent} holds {MOST_DUMPS} already"
    config = redacted(run.model_dump(mode="json"))
    # A replay has the weights of this step, whatever moved them since the run began.
    config["train"] |= {**coefficients, "adaptive_entropy": None}

    def begin() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        fault = Fault(step=step, what=what, world_size=world.size, found=list(nonfinite), config=config)
        write_text(unfinished / FAULT, fault.model_dump_json(indent=1))

    def write_samples() -> None:
        states = [samples_state(samples) for samples in micro_batches]
        write_state({"micro_batches": states}, rank_file(unfinished, world.rank))

    def complete() -> None:
        save_whole(engine.module, unfinished / MODEL, weights)
        tokenizer.save_pretrained(unfinished / MODEL)
        write_manifest(unfinished)
        publish(folder)

    failure = _first_failure(world, begin, world.is_main) or _first_failure(world, write_samples)
    if not failure:
        weights = weights_on_main(engine.weights(), world)
        failure = _first_failure(world, complete, world.is_main)
    if not failure:
        return f"its batch is kept: grpox replay {folder}"
    if world.is_main:
        shutil.rmtree(unfinished, ignore_errors=True)
    return f"its batch could not be kept in {folder}: {failure}"


def _first_failure(world: World, write: Callable[[], None], takes_part: bool = True) -> str:
    """Write on the ranks that take part, and return the first failure to all."""
    failure = ""
    if takes_part:
        try:
            write()
        except Exception as error:  # noqa: BLE001 - libraries have their own for a full disk
            message = str(getattr(error, "strerror", None) or text_of(error))
            failure = redact(" ".join(message.split())) or type(error).__name__
    return next((each for each in world.gather([failure]) if each), "")
