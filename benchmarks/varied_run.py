"""A run file's prompts, model and settings, with the rewards and lengths of `work` in place of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from work import is_informative

from grpox.runfile.load import ResolvedRun, load_run

if TYPE_CHECKING:
    from forced_lengths import Lengths

REWARD = Path(__file__).with_name("varied_reward.py")


def varied_overrides(source: str, overrides: Sequence[str], folder: Path) -> list[str]:
    """Overrides that make the run varied; its prompts are written to `folder`, each told whether it teaches."""
    data = load_run(source, overrides).config.data
    assert data.path is not None
    assert data.path.endswith(".jsonl"), data.path
    rows = [json.loads(line) for line in Path(data.path).read_text(encoding="utf-8").splitlines()]
    told = (json.dumps(row | {"informative": is_informative(number)}) for number, row in enumerate(rows))
    (folder / "varied.jsonl").write_text("\n".join(told) + "\n", encoding="utf-8")
    return [
        f"data.path={folder / 'varied.jsonl'}",
        f"rewards=[{{path: '{REWARD}:longer', isolation: thread}}]",
        # Prompt i is group i, whoever trains.
        "train.shuffle_dataset=false",
    ]


def is_varied(run: ResolvedRun) -> bool:
    return any(reward.path == f"{REWARD}:longer" for reward in run.config.rewards)


def lengths_of(run: ResolvedRun, rank: int = 0, world_size: int = 1) -> Lengths:
    """The lengths that this rank's completions have in a varied run."""
    from forced_lengths import Lengths

    train = run.config.train
    steps = train.steps_per_generation or train.gradient_accumulation_steps
    rows = train.per_device_train_batch_size * steps
    return Lengths(rows, run.config.sampling.max_completion_length, rank * rows, rows * world_size)
