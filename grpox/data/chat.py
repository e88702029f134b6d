"""The chat template of a run: messages as text, with the tools that the model may call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import cached_property
from typing import TYPE_CHECKING, Any

from grpox.contracts import Message, Text
from grpox.data.encoding import Encoding
from grpox.environments import Appended
from grpox.errors import RunFailed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Schema = Mapping[str, Any]
"""Description of a tool for the model: ``{"type": "function", "function": {"name": ..., ...}}``."""
Content = str | Sequence[Message] | None
"""An environment's answer: text, messages, or nothing."""

NO_MESSAGES = "an environment answered with messages, but the prompts are strings: it must answer with text"
_SYSTEM = """\
You can call these tools. Each line describes one, in JSON:
<tools>
%s
</tools>
To call a tool, write its name and its arguments in JSON like this:
<tool_call>
{"name": "name of the tool", "arguments": {"name of an argument": "its value"}}
</tool_call>"""
_PROBE = "qzxprobe"
"""A word that no chat template writes itself, and that it does not change."""
_ARGUMENTS = {
    "type": "object",
    "properties": {"x": {"type": "string", "description": "A text."}},
    "required": ["x"],
}
_TOOL: Schema = {
    "type": "function",
    "function": {"name": _PROBE, "description": "Nothing.", "parameters": _ARGUMENTS},
}

PLAIN = (
    "the prompts are plain text, to which the model's chat template is not applied: data.chat: true makes each "
    "a message of the user, false says that this is meant (docs/data.md#plain-prompts)"
)


def is_unrendered(prompt: object, source: str) -> bool:
    """Return True for a plain prompt in which nothing such as ``<|im_end|>`` is of the template `source`."""
    if not isinstance(prompt, str) or not source:
        return False
    return not any(mark in source for mark in re.findall(r"<\S{1,40}?>|\[\S{1,40}?\]", prompt))


class ChatTemplate:
    """The chat template of a tokenizer, with the run's arguments for it.

    Args:
        arguments: `model.chat_template_kwargs` of the run file.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        own = getattr(tokenizer, "chat_template", None)
        named = None if isinstance(own, dict) else self.arguments.get("chat_template")
        self.source = str(named or own or "")
        """The template itself; empty if neither the run file nor the tokenizer has one."""
        self.encoding = Encoding(tokenizer, self._around)
        self.writes_today = "strftime_now" in self.source

    def set_day(self, day: date | str) -> None:
        """Make a date the template's present one, or the `date_string` of Llama 3.1; not with ``auto``."""
        if isinstance(day, date):
            name = "strftime_now" if self.writes_today else "date_string"
            self.arguments.setdefault(name, day.strftime if self.writes_today else f"{day:%d %b %Y}")

    def _around(self) -> tuple[str, str]:
        """Return what the template writes around a message, and before a turn of the model."""
        message: Message = {"role": "user", "content": _PROBE}
        with suppress(Exception):  # rows that the template cannot write are refused with their place
            body = self.render([message], header=False)
            return body, self.render([message])[len(body) :]
        return "", ""

    @property
    def exists(self) -> bool:
        """True if the run file or the tokenizer has a template."""
        return bool(self.source)

    @property
    def name(self) -> str:
        """The model's name, for messages."""
        return str(getattr(self.tokenizer, "name_or_path", "") or "the tokenizer's template")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] | None = None,
        header: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return messages as the model reads them.

        Args:
            tools: schemas of tools. A template that does not list tools gets them as text of the system.
            header: write the beginning of the model's next turn.
            arguments: further arguments for the template, which replace those of the run.
        """
        if tools and not self.lists_tools:
            messages, tools = self._with_list(messages, tools), None
        listed = {"tools": list(tools)} if tools else {}
        given = {**self.arguments, **(arguments or {}), **listed}
        rendered = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=header, tokenize=False, **given
        )
        return str(rendered)

    @cached_property
    def lists_tools(self) -> bool:
        """True if the template writes a list of the tools that it is given."""
        return self._shows([{"role": "user", "content": "a"}], tools=[_TOOL])

    @cached_property
    def _has_system(self) -> bool:
        return self._shows([{"role": "system", "content": _PROBE}, {"role": "user", "content": "a"}])

    def _shows(self, messages: Sequence[Message], **tools: Any) -> bool:
        try:
            rendered = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False, **{**self.arguments, **tools}
            )
        except Exception:  # noqa: BLE001 - templates raise where they do not know a role or a list
            return False
        return _PROBE in str(rendered)

    def _with_list(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[Message]:
        """Describe tools in the system's message, or in the first message of a template without one."""
        text = _SYSTEM % "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        first, *others = messages
        if first.get("role") == "system":
            return [extended_message(first, behind=f"\n\n{text}"), *others]
        if self._has_system:
            return [{"role": "system", "content": text}, *messages]
        return [extended_message(first, before=f"{text}\n\n"), *others]


def extended_message(message: Message, before: str = "", behind: str = "") -> Message:
    """Return a message with texts before and behind its own."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": before + content + behind}
    first, last = ([{"type": "text", "text": text}] if text else [] for text in (before, behind))
    return {**message, "content": [*first, *content, *last]}


def extended_prompt(prompt: Text, content: Content) -> Text:
    """Return a prompt with the answer of an environment's `reset` behind it.

    Raises:
        RunFailed: the answer is not only text, or it is messages and the prompt is a string.
    """
    if not content:
        return prompt
    if isinstance(prompt, str):
        if isinstance(content, str):
            return prompt + content
        raise RunFailed(NO_MESSAGES)
    if isinstance(content, Appended):
        return [*prompt[:-1], extended_message(prompt[-1], behind=str(content))]
    if isinstance(content, str):
        return [*prompt, {"role": "user", "content": content}]
    return [*prompt, *texts_only(content)]


def texts_only(content: Sequence[Message] | None) -> list[Message]:
    """Return messages of an environment with the parts of each joined to one text.

    Raises:
        RunFailed: a message has no role, or a part that is not text.
    """
    return [{**message, "content": _text_of(message)} for message in content or ()]


def _text_of(message: Message) -> str:
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(message.get("role"), str) or not isinstance(parts, list):
        raise RunFailed(
            f"an environment answered with {str(message)[:200]}; a message has a role and a content"
        )
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RunFailed(f"an environment answered with a part of type {kind}, but grpox reads only text")
    return "".join(part["text"] for part in parts)
