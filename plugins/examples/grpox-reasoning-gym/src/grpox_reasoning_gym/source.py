"""The dataset component: a config's rows as a `datasets.Dataset`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpox_reasoning_gym.rows import rows

if TYPE_CHECKING:
    import datasets

    from grpox_reasoning_gym.config import SourceConfig


class ReasoningGymSource:
    """Rows that are generated when the run starts, the same for one seed and one version of reasoning-gym."""

    def __init__(self, config: SourceConfig) -> None:
        self.config = config

    def load(self) -> datasets.Dataset:
        """Columns prompt, answer, task, settings and entry; see `grpox_reasoning_gym.rows`."""
        from datasets import Dataset

        return Dataset.from_list(rows(self.config))
