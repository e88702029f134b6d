"""Prompts of a run: rows of a dataset, as text for people and rewards, as tokens for the generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpox.contracts import Text
from grpox.errors import ConfigError, Problem, RunFailed, nearest

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def load_file(path: str) -> datasets.Dataset:
    """A .jsonl, .json, .csv or .parquet file as a dataset."""
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset(LOADERS[Path(path).suffix], data_files=path, split="train")


class PromptSet:
    """A dataset with a prompt column: strings, or role/content messages (conversational).

    Args:
        dataset: one row per prompt; the other columns go to the reward functions.
        prompt_column: name of the column with the prompt.
        tokenizer: renders and tokenises prompts.
        chat_template_kwargs: passed to the chat template.

    Raises:
        ConfigError: the dataset has no such column, or one that holds something else than prompts, or needs a
            chat template that the tokenizer lacks.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        prompt_column: str,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        columns = list(dataset.column_names)
        if prompt_column not in columns:
            raise ConfigError(
                Problem(
                    "no such column in the data",
                    key="data.prompt_column",
                    given=prompt_column,
                    allowed=", ".join(columns),
                    nearest=nearest(prompt_column, columns),
                )
            )
        self._dataset = dataset
        self._prompt_column = prompt_column
        self._tokenizer = tokenizer
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        _check_prompts(dataset, prompt_column)
        self.conversational = len(dataset) > 0 and not isinstance(dataset[0][prompt_column], str)
        if self.conversational and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                Problem(
                    "the prompts are messages, but the model's tokenizer has no chat template",
                    key="data.prompt_column",
                    allowed="plain strings, or a model with a chat template",
                )
            )

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def column_names(self) -> list[str]:
        """The columns that reward functions are given."""
        return [name for name in self._dataset.column_names if name != self._prompt_column]

    def prompt(self, index: int) -> Text:
        """The prompt as the dataset holds it, which is how reward functions see it."""
        prompt: Text = self._dataset[index][self._prompt_column]
        return prompt

    def text(self, index: int) -> str:
        """The prompt as one string, the chat template applied."""
        prompt = self.prompt(index)
        if isinstance(prompt, str):
            return prompt
        rendered = self._tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, tokenize=False, **self._chat_template_kwargs
        )
        return str(rendered)

    def token_ids(self, index: int) -> tuple[int, ...]:
        """The prompt as tokens; a chat template writes its own special tokens."""
        ids = self._tokenizer(self.text(index), add_special_tokens=not self.conversational)["input_ids"]
        if not ids:
            raise RunFailed(f"prompt {index} of the data is empty: there is nothing to complete")
        return tuple(ids)

    def columns(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """Every column but the prompt, one entry per index (an index may occur several times)."""
        rows = [self._dataset[index] for index in indices]
        return {name: [row[name] for row in rows] for name in self.column_names}

    def completion_text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def completion(self, token_ids: Sequence[int]) -> Text:
        """A completion as reward functions see it: a string, or one message of the assistant."""
        text = self.completion_text(token_ids)
        return [{"role": "assistant", "content": text}] if self.conversational else text


def _check_prompts(dataset: datasets.Dataset, column: str) -> None:
    """Refuse a column of anything but strings or lists of messages, and the first row without a prompt.

    A column of a dataset has one type, so one value tells it; only nulls and empty prompts hide among others.
    """
    for row, value in enumerate(dataset[column]):
        messages = isinstance(value, list) and all(isinstance(part, dict) for part in value)
        if not value or not (isinstance(value, str) or messages):
            raise ConfigError(
                Problem(
                    f"row {row} (from 0) holds no prompt",
                    key="data.prompt_column",
                    given=f"{column}: {value!r}"[:200],
                    allowed="a string, or a list of role/content messages; not empty",
                )
            )
