"""The batch of a step that was not taken, kept to be seen again and read back: ``faults/step-00000012``."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from transformers import PreTrainedTokenizerBase

from grpox.checkpoint.folders import (
    MANIFEST,
    publish,
    rank_file,
    read_whole,
    unfinished_of,
    write_manifest,
    write_text,
)
from grpox.checkpoint.rank_state import read_state, samples_of_state, samples_state, write_state
from grpox.checkpoint.save_model import weights_on_main
from grpox.config import RunConfig
from grpox.errors import ConfigError, Problem, nearest, text_of
from grpox.errors.redaction import redact, redacted
from grpox.policy.batch import Sample
from grpox.policy.saved_whole import save_whole
from grpox.runtime.world import World
from grpox.update.nonfinite import Found

if TYPE_CHECKING:
    from grpox.policy.batch import Sample
    from grpox.policy.engine import Engine


FOLDER = "faults"
FAULT = "fault.json"
MODEL = "model"
KEPT = 3
"""Dumps of a run; each holds the weights. The first ones tell most: what follows is often their consequence."""


class Fault(BaseModel):
    """What a dump says of the step."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    step: int
    what: str
    """One line: what was not finite."""
    world_size: int
    found: list[Found]
    """On all ranks, causes first."""
    config: dict[str, object]
    """The run's."""

    @classmethod
    def read(cls, folder: Path) -> Fault:
        """
        Raises:
            ValueError: it is missing, or is none.
        """
        try:
            return cls.model_validate_json((folder / FAULT).read_text(encoding="utf-8"))
        except (OSError, ValidationError, ValueError) as error:
            raise ValueError(f"{FAULT} cannot be read: {type(error).__name__}") from error


class FaultDumps:
    """Writes the dumps of a run. Whatever goes wrong with that is told and hurts nothing."""

    def __init__(
        self,
        engine: Engine,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        world: World,
    ) -> None:
        self.engine = engine
        self.config = config
        self.tokenizer = tokenizer
        self.world = world

    def dump(
        self, step: int, what: str, found: Sequence[Found], micro_batches: Sequence[Sequence[Sample]]
    ) -> str:
        """Keep the batch and the weights, which must be those before the step; a collective.

        Returns:
            a line that tells where they are, or why they are nowhere; on every rank.
        """
        folder = Path(self.config.output_dir) / FOLDER / f"step-{step:08d}"
        unfinished = unfinished_of(folder)
        others = [path for path in folder.parent.glob("step-*") if path != folder]
        if self.world.gather([len(others) >= KEPT] if self.world.is_main else [])[0]:
            return f"its batch is not kept: {folder.parent} holds {KEPT} already"
        fault = Fault(
            step=step,
            what=what,
            world_size=self.world.size,
            found=list(found),
            config=redacted(self.config.model_dump(mode="json")),
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
        """Have every rank write, or rank 0 alone; what went wrong on the first that failed, on every rank."""
        failure = ""
        if self.world.is_main or not main:
            try:
                write()
            except Exception as error:  # noqa: BLE001 - libraries have their own for a full disk
                told = str(getattr(error, "strerror", None) or text_of(error))
                failure = redact(" ".join(told.split())) or type(error).__name__
        return next((told for told in self.world.gather([failure]) if told), "")


@dataclass(frozen=True)
class Dump:
    """A dump whose files are as they were written."""

    folder: Path
    fault: Fault

    @property
    def model(self) -> Path:
        """The weights before the step and the tokenizer, in Hugging Face format."""
        return self.folder / MODEL

    def micro_batches(self, device: torch.device) -> list[list[list[Sample]]]:
        """Read the samples of every rank, by micro-batch."""
        held = (read_state(rank_file(self.folder, rank)) for rank in range(self.fault.world_size))
        return [[samples_of_state(each, device) for each in state["micro_batches"]] for state in held]


def open_dump(folder: Path) -> Dump:
    """
    Raises:
        ConfigError: there is no such folder, it holds no dump, or one that is damaged.
    """
    if not (folder / FAULT).is_file() and not (folder / MANIFEST).is_file():
        raise ConfigError(_no_dump(folder))
    try:
        return Dump(folder, read_whole(folder, Fault.read))
    except ValueError as error:
        raise ConfigError(Problem(f"the dump is damaged: {error}", "DUMP", given=str(folder))) from error


def _no_dump(folder: Path) -> Problem:
    what = "holds no dump" if folder.is_dir() else "no such folder"
    around = (folder, folder / FOLDER, folder.parent)
    dumps = sorted({str(found.parent) for each in around for found in each.glob(f"step-*/{FAULT}")})
    allowed = f"a folder such as {dumps[0] if dumps else f'runs/mine/{FOLDER}/step-00000012'}"
    return Problem(what, "DUMP", given=str(folder), allowed=allowed, nearest=nearest(str(folder), dumps))
