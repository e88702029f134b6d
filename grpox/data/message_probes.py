"""Conversations as a chat template writes them, without the loss of a word.

For a role, key or type of content that it does not know, a template drops a message or prints it as Python.
So each shape of a conversation is tried with texts that no template writes, and then texts are looked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from grpox.contracts import Message
from grpox.data.chat import ChatTemplate, Schema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Form = Callable[[Sequence[Message]], list[Message]]

ALIASES = {"human": "user", "developer": "system"} | dict.fromkeys(("gpt", "model", "bot", "ai"), "assistant")
"""Role in data sets -> the role that templates know."""
_KEYS = {"from": "role", "value": "content", "text": "content"}
_LABELS = ("role", "from", "type", "name", "id", "tool_call_id", "tool_calls")
"""Keys of messages and parts whose texts are not the message's own."""


class LostMessage(ValueError):
    """Raised if a template leaves out a message or a part of it; the text names the message."""


class CheckedTemplate(ChatTemplate):
    """A chat template that refuses conversations if it would lose a word of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None) -> None:
        super().__init__(tokenizer, arguments)
        self._forms: dict[Hashable, Form] = {}
        self.examples: list[Sequence[Message]] = []
        """The first conversation of each shape."""

    def checked(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] | None = None,
        header: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return messages as `render` does, without keys that are null; parts are joined where it needs a text.

        Raises:
            LostMessage: the template leaves out a message, or prints it as Python does.
        """
        write = partial(self.render, tools=tools, header=header, arguments=arguments)
        messages = [without_nulls(message) for message in messages]
        shape = (*map(_shape, messages), bool(tools), header, repr(arguments))
        if shape not in self._forms:
            self._forms[shape] = _form(messages, write)
            self.examples.append(messages)
        written = self._forms[shape](messages)
        rendered = write(written)
        for number, message in enumerate(written):
            for text in texts_of(message.get("content")):
                if text.strip() not in rendered and not _is_written(text, number, written, rendered, write):
                    raise _lost(number, messages)
        return rendered

    @staticmethod
    def cure(messages: Sequence[Message]) -> str:
        """Name the known aliases of keys and roles in messages that a template does not write."""
        hints = []
        for message in messages:
            own = without_nulls({**message, "content": message.get("content") or None})
            hints += [
                f"{new} instead of {key}" for key, new in _KEYS.items() if key in own and not own.get(new)
            ]
            role = str(own.get("role", own.get("from")))
            known = ALIASES.get(role.lower(), role.lower())
            if known != role and known in ("user", "assistant", "system", "tool"):
                hints.append(f"the role {known} instead of {role}")
        hints.append("messages with a role that the template knows and a text as content")
        return "; ".join(dict.fromkeys([*hints, "or another model.chat_template_kwargs.chat_template"]))


def _form(messages: Sequence[Message], write: Callable[[Sequence[Message]], str]) -> Form:
    """Choose the form of messages that the template writes whole: as they are, or with plain texts.

    Raises:
        LostMessage: it writes neither.
        Exception: it fails on both.
    """
    failure: Exception | None = None
    for form in (list, _plain):
        written = form(messages)
        probed, wanted = _probed(written)
        try:
            try:
                rendered = write(probed)
            except Exception:
                if _plain(written) != written:
                    raise
                write(written)
                return form  # it reads what a text says, so only the texts themselves are looked for
        except Exception as error:  # noqa: BLE001
            failure = failure or error
            continue
        lost = [number for number, texts in wanted if not any(text in rendered for text in texts)]
        if "None" in rendered:
            lost += [number for number, each in enumerate(written) if each.get("content", "") is None]
        if not lost:
            return form
        failure = failure or _lost(lost[0], messages)
    assert failure is not None
    raise failure


def _lost(number: int, messages: Sequence[Message]) -> LostMessage:
    what = f"the chat template does not write message {number} (from 0) as plain text"
    return LostMessage(f"{what}: {messages[number]!r:.200}")


def _is_written(
    text: str,
    number: int,
    messages: Sequence[Message],
    rendered: str,
    write: Callable[[Sequence[Message]], str],
) -> bool:
    """Return True if a template writes a text in another way, such as in JSON or without a thought before it.

    It then writes what stands before and behind the text; of an earlier turn of the model what stands behind.
    """
    is_turn = messages[number].get("role") == "assistant"
    if is_turn and (end := text.rpartition(">")[2].strip()) and end in rendered:
        return True
    marked = {**messages[number], "content": f"qzxfront {text} qzxend"}
    rendered = write([*messages[:number], marked, *messages[number + 1 :]])
    return "qzxend" in rendered and (is_turn or "qzxfront" in rendered)


def _probed(messages: Sequence[Message]) -> tuple[list[Message], list[tuple[int, list[str]]]]:
    """Replace texts and the names of called tools by probes, which differ from their JSON and Python's repr.

    Returns:
        the messages; for each probe the number of its message, and texts of which one has to be written. A
        message without role, or without text and calls, has no such text.
    """
    probed: list[Message] = []
    wanted: list[tuple[int, list[str]]] = []
    for number, message in enumerate(messages):
        marks: dict[str, list[str]] = {}
        own = ["content"] if "content" in message else [key for key in message if key not in _LABELS]
        texts = _marked({key: message[key] for key in own}, f"qzx\"'{number}probe", marks)
        if message.get("role") == "tool" and not isinstance(message.get("content"), list):
            marks = {probe: [probe, json.dumps(probe)[1:-1]] for probe in marks}  # templates may write JSON
        if calls := message.get("tool_calls"):
            name = f"qzxcall{number}x"
            marks[name] = [name]
            texts["tool_calls"] = [_renamed(call, name) for call in calls]
        has_role = isinstance(message.get("role", message.get("from")), str)
        has_text = bool(marks) or isinstance(message.get("content"), str)  # an empty one
        wanted += [(number, each) for each in marks.values()] if has_text and has_role else [(number, [])]
        probed.append({**message, **texts})
    return probed, wanted


def _marked(value: Any, probe: str, marks: dict[str, list[str]]) -> Any:
    """Replace texts by a probe, those of each part by another, and add it to `marks`."""
    if isinstance(value, str) and value.strip():
        marks[probe] = [probe]
        return probe
    if isinstance(value, list):
        return [_marked(each, f"{probe}{place}of", marks) for place, each in enumerate(value)]
    if isinstance(value, Mapping):
        return {key: each if key in _LABELS else _marked(each, probe, marks) for key, each in value.items()}
    return value


def _renamed(call: Any, name: str) -> Any:
    return (
        {**call, "function": _renamed(call["function"], name)} if "function" in call else {**call, "name": name}
    )


def _plain(messages: Sequence[Message]) -> list[Message]:
    """Join the parts of messages that are only text; null beside calls of tools becomes an empty text."""
    plain = list(messages)
    for number, message in enumerate(messages):
        content, texts = message.get("content"), [*texts_of(message.get("content"))]
        is_text = isinstance(content, list) and 0 < len(content) == len(texts)
        if is_text or (content is None and message.get("tool_calls")):
            plain[number] = {**message, "content": "".join(texts)}
    return plain


def texts_of(content: Any) -> Iterator[str]:
    """Yield a text, or the texts of parts; a part of another type has none."""
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) and "text" in part.get("type", "text") else part
        if isinstance(text, str):
            yield text


def without_nulls(value: Any) -> Any:
    """Leave out keys that are null, as Arrow adds them for keys of other rows; arguments of calls are data."""
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: each if key == "arguments" else without_nulls(each)
        for key, each in value.items()
        if each is not None or key in ("content", "arguments")
    }


def _shape(value: Any, key: str = "") -> Any:
    """Return roles, keys and types of a value; of a text whether it is empty."""
    if isinstance(value, Mapping) and key != "arguments":
        return tuple((name, _shape(each, name)) for name, each in value.items())
    if isinstance(value, list):
        return tuple(map(_shape, value))
    if isinstance(value, str):
        return value if key in ("role", "type") else not value.strip()
    return type(value)
