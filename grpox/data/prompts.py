"""Prompts of a run: rows of a dataset, as text for people and rewards and as tokens for the generator."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

from grpox.contracts import Message, Text
from grpox.data.chat import Content, Schema, extended_prompt
from grpox.data.encoding import CUT
from grpox.data.message_probes import ALIASES, CheckedTemplate, LostMessage, texts_of, without_nulls
from grpox.data.row_stream import RowStream
from grpox.data.unusable_columns import CURE, OF_TEMPLATE, media_part, unusable_columns
from grpox.errors import ConfigError, Problem, RunFailed, describe, nearest
from grpox.runtime import launch
from grpox.runtime.logs import WarnOnce, get_logger

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from grpox.config import DataConfig, SamplingConfig


CACHED_TOKENS = 2**26
"""Number of prompt tokens kept in memory, 256 MiB; further prompts are tokenised again for each use."""

ToolsOfRow = Callable[[int], Sequence[Schema] | None]
"""Row -> schemas of the tools that the model may call there."""

logger = get_logger(__name__)
_BATCH = 1000
_SHOW_PROGRESS_FROM = 50_000


class PromptSet:
    """A dataset with a prompt column: strings, or role/content messages (conversational).

    Every prompt of a dataset is checked, rendered and tokenised here; `check` does it for a stream.

    Args:
        rows: one row per prompt; the other columns go to the reward functions.
        prompt_column: name of the column with the prompt.
        tokenizer: renders and tokenises prompts.
        chat_template_kwargs: arguments for the chat template.
        limit: largest length of a prompt, and the tokens that the model knows.
        data: name of the data in messages.
        tools_of: called once with this set, returns a function: row -> schemas of the tools that the model may
            call there. They are listed in the row's prompt if prompts are messages. None: no row has tools.
        has_episodes: True for a run with an environment or tools, whose data has fewer names for columns.
        day: `model.chat_date`.
        keys: `chat`, `allow_special_tokens` and `continue_final_message` of the run file's `data`.

    Raises:
        ConfigError: the data has no row or no such column; a row has no prompt, or a prompt that is too long,
            is not only text, or has tokens that the model lacks; or the tokenizer lacks the needed chat
            template.
    """

    def __init__(
        self,
        rows: datasets.Dataset | RowStream,
        prompt_column: str,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        limit: PromptLimit | None = None,
        data: str = "the data",
        tools_of: Callable[[PromptSet], ToolsOfRow] | None = None,
        has_episodes: bool = False,
        day: date | str = "",
        keys: DataConfig | None = None,
    ) -> None:
        self._rows = rows
        self.stream = rows if isinstance(rows, RowStream) else None
        """Rows of a stream; None for a dataset."""
        self._prompt_column = prompt_column
        self._tokenizer = tokenizer
        self.chat = CheckedTemplate(tokenizer, chat_template_kwargs)
        self.chat.set_day(day)
        self._makes_chat = keys is not None and keys.chat
        self._continues = keys is not None and keys.continue_final_message
        allows = keys is not None and keys.allow_special_tokens
        self._marked: Any = (lambda each: each) if allows else self.chat.encoding.marked
        self._warn = WarnOnce(logger)
        self._limit = limit or PromptLimit(None)
        self.data = data
        """Name of the data in messages."""
        self._ids, self._ends = array("i"), array("q", [0])
        if not isinstance(rows, RowStream) and len(rows) == 0:
            raise ConfigError(f"{data} has no row", key="data")
        columns = list(rows.column_names)
        if problems := unusable_columns(columns, prompt_column, data, "data", has_episodes):
            raise ConfigError(problems)
        if prompt_column not in columns:
            what, key, near = f"no such column in {data}", "data.prompt_column", nearest(prompt_column, columns)
            raise ConfigError(what, key, given=prompt_column, allowed=", ".join(columns), nearest=near)
        self.column_names = [name for name in columns if name != prompt_column]
        """Columns that reward functions receive."""
        self.conversational = self._makes_chat or not isinstance(rows[0][prompt_column], str)
        names = self.column_names if self.conversational else ()
        self._of_template = [name for name in OF_TEMPLATE if name in names]
        """Columns whose values the chat template is given."""
        if problem := self._no_prompt(0, self.prompt(0)):
            raise ConfigError(problem)
        if self.conversational and not self.chat.exists:
            what = "the prompts are messages, but the model's tokenizer has no chat template"
            allowed = "plain strings, or a model with a chat template"
            raise ConfigError(what, key="data.prompt_column", allowed=allowed)
        self._tools_of = None if tools_of is None else tools_of(self)
        if not isinstance(rows, RowStream):
            self._read(rows)

    def __len__(self) -> int:
        """Number of prompts; a stream has none."""
        return len(self._rows)  # type: ignore[arg-type]

    def prompt(self, index: int) -> Text:
        """Return the prompt as in the dataset, the form that reward functions receive."""
        return self._prompt_of(self._rows[index])

    def row(self, index: int) -> dict[str, Any]:
        """Return a row with all its columns, the prompt too."""
        return dict(self._rows[index])

    def text(self, index: int) -> str:
        """Return the prompt as one string, after the chat template."""
        return self._rendered(index, self._rows[index]).replace(CUT, "")

    def token_ids(self, index: int) -> tuple[int, ...]:
        """Return the prompt as tokens; a chat template writes its own special tokens."""
        if index + 1 < len(self._ends):
            return tuple(self._ids[self._ends[index] : self._ends[index + 1]])
        (ids,) = self._tokenised([self._rendered(index, self._rows[index])])
        return self._shortened(ids)

    def extended_ids(self, index: int, content: Content) -> tuple[int, ...]:
        """Return the tokens of a prompt with the answer of `reset`, marked by `Encoding`, behind it.

        Raises:
            RunFailed: the answer does not fit the prompt or the chat template, or together they are too long.
        """
        if not content:
            return self.token_ids(index)
        reset = f"with what the environment's reset answered, the prompt of {self.place(index)}"
        try:
            text = self._rendered(index, self._rows[index], content)
        except ConfigError as error:
            raise RunFailed(f"{reset} cannot be written: {error}") from error
        (ids,) = self._tokenised([text])
        if problem := self._unusable(index, ids):
            raise RunFailed(f"{reset} is not valid: {problem}")
        return self._shortened(ids)

    def tools(self, index: int) -> Sequence[Schema]:
        """Return the schemas of the tools that the model may call in a row."""
        return (self._tools_of(index) if self._tools_of else None) or ()

    def rows(self, indices: Sequence[int]) -> tuple[list[Text], dict[str, list[Any]]]:
        """Return the prompts and every other column, one entry per index.

        An index may occur several times, once for each completion of its group; its row is read once. A dataset
        reads many rows for little more than the cost of one.
        """
        place_of = {index: place for place, index in enumerate(dict.fromkeys(indices))}
        names = (self._prompt_column, *self.column_names)
        read: Mapping[str, Sequence[Any]]
        if isinstance(self._rows, RowStream):
            rows = [self._rows[index] for index in place_of]
            read = {name: [row.get(name) for row in rows] for name in names}
        else:
            read = self._rows[list(place_of)]
        places, nothing = list(map(place_of.__getitem__, indices)), [None] * len(place_of)
        columns = {}
        for name in names:
            values = read.get(name, nothing)
            columns[name] = [values[place] for place in places]
        prompts = columns.pop(self._prompt_column)
        return list(map(self._as_chat, prompts)) if self._makes_chat else prompts, columns

    def columns_of(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return for each index the columns of its row other than the prompt."""
        _, columns = self.rows(indices)
        return [{name: values[place] for name, values in columns.items()} for place in range(len(indices))]

    def questions(self, indices: Sequence[int]) -> list[str]:
        """Return for each index the user's last message of a prompt of messages, or the plain prompt."""
        questions, (prompts, _) = list[str](), self.rows(indices)
        for prompt in prompts:
            if isinstance(prompt, str):
                questions.append(prompt)
            else:
                of_user = [message.get("content") for message in prompt if message.get("role") == "user"]
                questions.append("".join(texts_of(of_user[-1] if of_user else "")))
        return questions

    def column(self, name: str) -> list[Any]:
        """Return a column of a dataset, in the order of its rows; a stream has none as a whole."""
        return list(self._rows[name])  # type: ignore[index]

    def prompt_texts(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Decode prompts as the model reads them, with special tokens."""
        ids = list(map(list, token_ids))
        texts: list[str] = self._tokenizer.batch_decode(ids, skip_special_tokens=False)
        return texts

    def completion_texts(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Decode completions for people, without special tokens."""
        ids = list(map(list, token_ids))
        texts: list[str] = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        return texts

    def check(self, indices: Sequence[int]) -> None:
        """Check the prompts at `indices` of a stream.

        Raises:
            RunFailed: a row has no prompt, an empty one or one that is too long; the message names the row.
        """
        for index in indices:
            row = self._rows[index]
            problem = self._no_prompt(index, self._prompt_of(row))
            if problem is None:
                (ids,) = self._tokenised([self._rendered(index, row)])
                problem = self._unusable(index, ids)
            if problem is not None:
                raise RunFailed(str(problem))

    def _read(self, rows: datasets.Dataset) -> None:
        """Check and tokenise all prompts, and store their tokens up to `CACHED_TOKENS`."""
        long: list[tuple[int, int]] = []
        for start, columns in _batches(rows.select_columns([self._prompt_column, *self._of_template])):
            by_row = zip(*columns.values(), strict=True)
            of_batch = [dict(zip(columns, values, strict=True)) for values in by_row]
            for index, row in enumerate(of_batch, start):
                if problem := self._no_prompt(index, self._prompt_of(row)):
                    raise ConfigError(problem)
            texts = [self._rendered(index, row) for index, row in enumerate(of_batch, start)]
            for index, ids in enumerate(self._tokenised(texts), start):
                if self._limit.refuses(len(ids)):
                    long.append((index, len(ids)))
                elif problem := self._unusable(index, ids):
                    raise ConfigError(problem)
                ids = self._shortened(ids)
                if index + 1 == len(self._ends) and len(self._ids) + len(ids) <= CACHED_TOKENS:
                    self._ids.extend(ids)
                    self._ends.append(len(self._ids))
        if long:
            index, length = long[0]
            most = max(length for _, length in long)
            further = f", and so are {len(long) - 1} more; the longest has {most} tokens" if long[1:] else ""
            raise ConfigError(self._limit.problem(self.place(index), length, further))

    def _tokenised(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        encoding = self.chat.encoding
        encoded = encoding.ids(texts)
        if self.conversational:
            return encoded
        opening, closing = encoding.added
        twice = opening if any(ids[: len(opening)] == opening for ids in encoded) else ()
        for added, what in ((closing, "get no {} at their end"), (twice, "have one {} at their beginning")):
            if added and launch.rank_or_zero() == 0:
                about = what.format(*self.prompt_texts([added]))
                self._warn(what, f"plain prompts of {self.data} {about}, though the tokenizer adds one")
        return [encoding.opened(ids) for ids in encoded]

    def _shortened(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        limit = self._limit.tokens if self._limit.cut else None
        return ids if limit is None or len(ids) <= limit else self.chat.encoding.shortened(ids, limit)

    def _prompt_of(self, row: Mapping[str, Any]) -> Text:
        prompt: Any = row.get(self._prompt_column)  # a missing one is refused
        return self._as_chat(prompt) if self._makes_chat else prompt

    def _as_chat(self, prompt: Text) -> Text:
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) and prompt else prompt

    def _rendered(self, index: int, row: Mapping[str, Any], content: Content = None) -> str:
        """Return the prompt of a row and the answer of `reset`, with the marks of `Encoding`."""
        prompt = self._prompt_of(row)
        # A plain prompt may be rendered already: its special tokens are meant.
        marked = prompt if isinstance(prompt, str) else self._marked(prompt)
        text = self._as_text(index, extended_prompt(marked, content), row)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"{self.place(index)} has half of a surrogate pair, which is not a character"
            raise ConfigError(what, key="data.prompt_column", given=ascii(prompt)[:200]) from error
        return text

    def _as_text(self, index: int, prompt: Text, row: Mapping[str, Any]) -> str:
        if isinstance(prompt, str):
            return prompt
        tools, own = (self._of_row(index, name, kind, row) or {} for name, kind in OF_TEMPLATE.items())
        # A row's own template writes special tokens, as the run's does.
        arguments = {key: each if key == "chat_template" else self._marked(each) for key, each in own.items()}
        if continues := self._continues and _is_of_model(prompt[-1]):
            arguments["continue_final_message"] = True
        try:
            tools = self._marked(tools or self.tools(index))
            return self.chat.checked(prompt, tools, not continues, arguments)
        except Exception as error:
            what = f"the chat template fails on {self.place(index)}: {describe(error)}"
            if isinstance(error, LostMessage):
                what = f"{self.place(index)}: {error}"
            given = repr(prompt)[:200]
            raise ConfigError(
                what, "data.prompt_column", given=given, allowed=self.chat.cure(prompt)
            ) from error

    def _of_row(self, index: int, name: str, kind: type, row: Mapping[str, Any]) -> Any:
        """Return the value of a row for the chat template, which may be written as JSON."""
        value = row.get(name) if name in self._of_template else None
        with suppress(ValueError):
            value = json.loads(value) if isinstance(value, str) else value
        if value is None or isinstance(value, kind):
            return without_nulls(value)
        what = f"{self.place(index)} has a column {name} that is not for the chat template, which is given it"
        allowed = f"a {kind.__name__}, null, or another name for the column"
        raise ConfigError(what, "data.path", given=repr(value)[:200], allowed=allowed)

    def _unusable(self, index: int, ids: Sequence[int]) -> Problem | None:
        """Return a problem if a prompt has no token, too many, or one that the model lacks."""
        if not ids:
            what = f"the prompt of {self.place(index)} has no tokens, so there is nothing to complete"
            return Problem(what, key="data.prompt_column", given=repr(self.prompt(index))[:200])
        if self._limit.refuses(len(ids)):
            return self._limit.problem(self.place(index), len(ids))
        known = self._limit.vocabulary
        if known is None or max(ids) < known:
            return None
        what = f"the tokenizer gives {self.place(index)} a token that the model does not know"
        allowed = f"tokens below {known}, the model's vocabulary"
        return Problem(what, key="model.path", given=f"token {max(ids)}", allowed=allowed)

    def _no_prompt(self, index: int, value: Any) -> Problem | None:
        """Return a problem if a row's prompt is missing, empty, not only text, or not of the first row's
        kind."""
        if kind := media_part(value):
            what = f"{self.place(index)} has a part of type {kind}, but grpox reads only text"
            return Problem(what, key="data.prompt_column", given=self._prompt_column, allowed=CURE)
        messages = isinstance(value, list) and all(isinstance(part, dict) for part in value)
        if value and (messages if self.conversational else isinstance(value, str)):
            if self._continues or not messages or not _is_of_model(value[-1]):
                return None
            what = f"{self.place(index)} ends with a message of the model: its prompt has the answer"
            allowed = (
                "messages that end with the user's; or data.continue_final_message: true, if the last one is "
                "only a beginning with which the model goes on"
            )
            return Problem(what, "data.prompt_column", given=repr(value[-1])[:200], allowed=allowed)
        given = f"{self._prompt_column}: {value!r}"
        if isinstance(self._rows, RowStream):
            given = f"{given}, in {dict(self._rows[index])!r}"
        allowed = "a string, or a list of role/content messages; not empty, and the same kind in all rows"
        what = f"{self.place(index)} has no prompt"
        return Problem(what, key="data.prompt_column", given=given[:300], allowed=allowed)

    def place(self, index: int) -> str:
        """Name a row in messages."""
        if isinstance(self._rows, RowStream):
            return self._rows.place(index)
        return f"row {index} (from 0) of {self.data}"


def _is_of_model(message: Message) -> bool:
    role = str(message.get("role") or message.get("from")).lower()
    return ALIASES.get(role, role) == "assistant"


def _batches(rows: datasets.Dataset) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    """Yield (index of the first, values) of each batch of rows, with a progress bar if there are many."""
    starts: Iterable[int] = range(0, len(rows), _BATCH)
    if len(rows) >= _SHOW_PROGRESS_FROM and launch.rank() == 0:
        from rich.progress import track

        from grpox.errors.console import Console

        starts = track(starts, "tokenising prompts", console=Console(stderr=True), transient=True)
    for start in starts:
        yield start, rows[start : start + _BATCH]


@dataclass(frozen=True)
class PromptLimit:
    """Largest number of tokens in a prompt, the handling of longer prompts, and the model's vocabulary."""

    tokens: int | None
    """Largest number of tokens; None: prompts of any length are accepted."""
    origin: str = ""
    """Source of the number, for messages."""
    cut: bool = False
    """True: keep the last `tokens` tokens of a longer prompt; False: refuse it."""
    vocabulary: int | None = None
    """Number of tokens that the model knows; None: accept any token."""

    @classmethod
    def of_run(cls, data: DataConfig, sampling: SamplingConfig, model: PreTrainedConfig) -> PromptLimit:
        """Return the smaller of `data.max_prompt_length` and the model's positions minus a completion.

        Raises:
            ConfigError: a completion alone fills the model's positions.
        """
        positions = getattr(model.get_text_config(), "max_position_embeddings", None)
        completion, given = sampling.max_completion_length, data.max_prompt_length
        cut = data.long_prompts == "cut"
        if positions is None:
            return cls(given, "data.max_prompt_length", cut)
        if completion >= positions:
            what = f"leaves no room for a prompt: the model has {positions} positions"
            key = "sampling.max_completion_length"
            raise ConfigError(what, key, given=str(completion), allowed=f"less than {positions}")
        left = positions - completion
        if given is not None and given <= left:
            return cls(given, "data.max_prompt_length", cut)
        origin = f"{positions} positions of the model minus sampling.max_completion_length {completion}"
        return cls(left, origin, cut)

    def refuses(self, length: int) -> bool:
        """Return True if a prompt of `length` tokens is too long and is not cut."""
        return self.tokens is not None and length > self.tokens and not self.cut

    def problem(self, row: str, length: int, further: str = "") -> Problem:
        """Describe the prompt of `row` (as ``row 3 (from 0) of the data``) as too long."""
        return Problem(
            f"the prompt of {row} is too long{further}",
            key="data.max_prompt_length",
            given=f"{length} tokens",
            allowed=f"{self.tokens} ({self.origin}); or long_prompts: cut, which removes tokens from the start",
        )
