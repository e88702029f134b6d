"""The tokens of episodes: prompts with the answer of `reset`, turns as they are read, and bridges between them.

What the model sampled is never decoded and encoded again; tokens are only appended. A bridge is what the model
did not write between two of its turns.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from grpox.contracts import Message, ToolResult
from grpox.data.chat import NO_MESSAGES, Content, Schema, texts_only
from grpox.data.prompts import PromptSet
from grpox.errors import ConfigError, RunFailed, describe
from grpox.rollout.episodes.bridge import ANSWERING, Bridge
from grpox.rollout.episodes.calls import EXACT, CallReader, ReadCalls, call_reader, read_hermes, with_calls
from grpox.rollout.episodes.messages import Action

MARK = " [cut off]"
"""Stands at the end of an answer that was too long."""


class TurnTokens:
    """Tokens of the prompts of one dataset, and of the turns that follow them.

    Args:
        tools: schemas of all tools of the run.
        has_parse: True if every environment reads calls itself, so that the template's form need not be known.
        longest: `episodes.max_observation_tokens`.
        allow_special_tokens: `episodes.allow_special_tokens`.

    Raises:
        ConfigError: the chat template cannot be used for episodes, or writes calls in an unknown form.
    """

    def __init__(
        self,
        prompts: PromptSet,
        tools: Sequence[Schema] = (),
        has_parse: bool = False,
        longest: int | None = None,
        allow_special_tokens: bool = False,
    ) -> None:
        self._prompts = prompts
        self._tokenizer = prompts.chat.tokenizer
        self._tools = tools
        self._longest = longest
        self._marked: Any = (lambda each: each) if allow_special_tokens else prompts.chat.encoding.marked
        if prompts.conversational and "tools" in prompts.chat.arguments:
            what = "lists tools, but those of the run are listed by grpox"
            raise ConfigError(what, key="model.chat_template_kwargs.tools", allowed="the run file's key tools")
        self._bridge = Bridge(prompts.chat, tools) if prompts.conversational else None
        self._added = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        self._reader: CallReader | None = read_hermes if tools else None
        try:
            if tools and prompts.conversational:
                self._reader = call_reader(prompts.chat, tools)
        except ConfigError:
            if not has_parse:
                raise
            self._reader = None

    def check_stops(self, stop_token_ids: Collection[int], stop: Collection[str] = ()) -> None:
        """Check that the chat template's end of a turn ends a completion.

        Args:
            stop: texts that end a completion.

        Raises:
            ConfigError: the model would write on behind its turn, and answer itself.
        """
        if self._bridge is None:
            return
        ids = self._encode(self._bridge.text([{"role": "user", "content": "a"}]))
        first = next((token for token in ids if self._decode([token]).strip()), None)
        if first is None or first not in self._added or first in stop_token_ids:
            return
        if (text := self._decode([first])) not in stop:
            what = f"lacks {text}, with which the chat template ends a turn of the model"
            given = ", ".join(map(str, sorted(stop_token_ids))) or "none"
            raise ConfigError(what, "sampling.stop_token_ids", given=given, allowed=f"a list with {first}")

    def prompt(self, row: int, content: Content) -> tuple[int, ...]:
        """Return the tokens of a row's prompt with the answer of `reset` behind it.

        Raises:
            RunFailed: it is too long, is not only text, or does not fit the prompt or the template.
        """
        return self._prompts.extended_ids(row, self._marked(content))

    def read(self, token_ids: Sequence[int], row: int, is_whole: bool = True) -> tuple[Message, Action]:
        """Read a turn in an episode of `row`: as a message of the assistant, and for its environment.

        Args:
            is_whole: False for a turn that was cut off, in which no calls are read.
        """
        (text,) = self._prompts.completion_texts([token_ids])
        read, tools = ReadCalls(text, ()), self._prompts.tools(row)
        if is_whole and tools and self._reader is not None:
            read = self._reader(text, token_ids, tools)
        message = {"role": "assistant", "content": read.text, **read.fields}
        return with_calls(message, read.calls), Action(text, read.calls)

    def messages(self, content: Content, results: Sequence[ToolResult] = ()) -> list[Message]:
        """Return an environment's answer as messages: results of tools in the order of their calls, then its
        content.

        Raises:
            RunFailed: it is not only text; it is messages where prompts are strings; a message has another role
                than `ANSWERING`.
        """
        if content and not isinstance(content, str) and not self._prompts.conversational:
            raise RunFailed(NO_MESSAGES)
        written = (
            [{"role": "user", "content": str(content)}] if isinstance(content, str) else texts_only(content)
        )
        others = [each["role"] for each in written if each["role"] not in ANSWERING]
        if others:
            roles = ", ".join(ANSWERING)
            raise RunFailed(
                f"an environment answered a turn with a message of the role '{others[0]}'; "
                f"the roles that may answer are {roles}"
            )
        return [
            *({"role": "tool", "name": each.call.name, "content": each.content} for each in results),
            *written,
        ]

    def shortened(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        """Cut an answer to `longest` tokens; its shortest messages stay whole first.

        Returns:
            the messages, and the number of those that were cut.
        """
        shortened, count = list(messages), 0
        if self._longest is None:
            return shortened, count
        encoded, left = [self._ids_of(message["content"]) for message in messages], self._longest
        by_length = sorted(range(len(messages)), key=lambda place: len(encoded[place]))
        for number, place in enumerate(by_length):
            share, ids = left // (len(messages) - number), encoded[place]
            if len(ids) > share:
                text, ids = self._beginning(ids, share)
                shortened[place], count = {**messages[place], "content": text}, count + 1
            left -= len(ids)
        return shortened, count

    def _beginning(self, ids: list[int], most: int) -> tuple[str, list[int]]:
        """Return the beginning of a text in at most `most` tokens, `MARK` included where it fits, and these."""
        mark = MARK if len(self._ids_of(MARK)) < most else ""
        for count in range(most, -1, -1):
            # A character may consist of several tokens.
            text = self._decode(ids[:count]).rstrip("\ufffd") + mark
            shortened = self._ids_of(text)
            if len(shortened) <= most:
                return text, shortened
        return "", []

    def bridge(self, turn: Sequence[int], answer: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens between a turn and the next: the end of the turn as far as it is missing, the
        answer, and the header of the next turn.

        Raises:
            RunFailed: the chat template cannot write the answer.
        """
        if self._bridge is None:
            return tuple(self._ids_of("\n".join(message["content"] for message in answer)))
        try:
            text = self._bridge.text(self._marked(answer))
        except Exception as error:
            what = f"the chat template cannot write an environment's answer: {describe(error)}"
            raise RunFailed(f"{what}; the answer is {str(list(answer))[:300]}") from error
        return self._without_end(self._encode(text), turn)

    def _without_end(self, bridge: Sequence[int], turn: Sequence[int]) -> tuple[int, ...]:
        """Leave out the end token that the turn has already, and the space before it."""
        for place, token in enumerate(bridge):
            if turn and token == turn[-1] and token in self._added:
                return tuple(bridge[place + 1 :])
            if self._decode([token]).strip():
                break
        return tuple(bridge)

    def _encode(self, text: str) -> list[int]:
        return list(self._prompts.chat.encoding.ids([text])[0])

    def _ids_of(self, text: str) -> list[int]:
        """Return the tokens of a text from outside, without special tokens unless the run allows them."""
        return self._encode(self._marked(text))

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False, **EXACT))
