"""A dump read back: what was kept of a step that was not taken."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from grpox.checkpoint.faults.dump import FAULT, FOLDER, MODEL, Fault, rank_file
from grpox.checkpoint.manifest import MANIFEST, faults, read_manifest
from grpox.checkpoint.rank_state import read_state, samples_of_state
from grpox.errors import ConfigError, Problem, nearest
from grpox.policy.batch import Sample


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
        damage = faults(folder, read_manifest(folder))
        if not damage:
            return Dump(folder, Fault.read(folder))
    except ValueError as error:
        damage = [str(error)]
    raise ConfigError(Problem(f"the dump is damaged: {'; '.join(damage[:3])}", "DUMP", given=str(folder)))


def _no_dump(folder: Path) -> Problem:
    what = "holds no dump" if folder.is_dir() else "no such folder"
    around = (folder, folder / FOLDER, folder.parent)
    dumps = sorted({str(found.parent) for each in around for found in each.glob(f"step-*/{FAULT}")})
    allowed = f"a folder such as {dumps[0] if dumps else f'runs/mine/{FOLDER}/step-00000012'}"
    return Problem(what, "DUMP", given=str(folder), allowed=allowed, nearest=nearest(str(folder), dumps))
