"""Calls of tools in the text of a turn. They are JSON, and nothing in them is evaluated.

`call_reader` renders a call by the run's chat template, and chooses the reader that finds it.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpox.contracts import Message, ToolCall
from grpox.data.chat import ChatTemplate, Schema
from grpox.errors import ConfigError, RunFailed
from grpox.runtime.workers import Child, ChildFailed, Restarted, connect_to_parent

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')
_JSON_CALL = re.compile(r'\s*+(?:<\|python_tag\|>\s*+)?(?=\{\s*"(?:name"|type"\s*:\s*"function")\s*[:,])')

_BETWEEN = re.compile(r"[\s;,]*")
_QUESTION: Message = {"role": "user", "content": "a"}
EXACT = {"clean_up_tokenization_spaces": False}
"""Argument of a tokenizer's `decode` that keeps each space."""
_PARAMETER = r"<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>"
_QWEN_XML: Mapping[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"close": "<|im_end|>", "content": "text", "repeats": True, "join": "\n"},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*+<function=(?P<name>[^<>\n]+)>",
            "close_pattern": r"</function>\s*+</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": _PARAMETER},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
"""transformers' response template for the calls of Qwen3-Coder and Qwen3.5, with patterns of linear time."""
PIECE = 4096
"""Characters that its parser reads at a time: it searches for the end of a turn once a call."""
PARSE_SECONDS = 10.0
"""Time limit of reading a turn by the patterns of a tokenizer's own template."""
START_SECONDS = 120.0
READ = (
    "calls as <tool_call>{JSON}</tool_call> (Hermes), as JSON with name and parameters (Llama 3) or as "
    "<function=...> (Qwen3.5); a tokenizer with a response_template; or an environment with a method parse"
)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_no_constant)  # Python's would read NaN


@dataclass(frozen=True)
class ReadCalls:
    """A turn without its calls, and the calls."""

    text: str
    calls: tuple[ToolCall, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the message that the turn is, such as its thinking."""


CallReader = Callable[[str, Sequence[int], Sequence[Schema]], ReadCalls]
"""Reads the calls of tools in a turn: its text without special tokens, all its token ids, schemas of tools.

A call that cannot be read becomes a call whose arguments are its text, which fit no tool.
"""


def read_hermes(text: str, token_ids: Sequence[int] = (), tools: Sequence[Schema] = ()) -> ReadCalls:
    """Read ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them."""
    calls = tuple(_call_of(match[1]) for match in _HERMES.finditer(text))
    return ReadCalls(_HERMES.sub("", text).strip() if calls else text, calls)


def read_json(text: str, token_ids: Sequence[int] = (), tools: Sequence[Schema] = ()) -> ReadCalls:
    """Read a turn that is a call, as Llama 3 writes it: ``{"name": ..., "parameters": {...}}``.

    Several calls follow each other, with or without semicolons.
    """
    begin = _JSON_CALL.match(text)
    if not begin:
        return ReadCalls(text, ())
    calls, place = [], begin.end()
    while text.startswith("{", place):
        try:
            value, end = _JSON.raw_decode(text, place)
        except (ValueError, RecursionError):
            value, end = {"parameters": None}, len(text)
        if not {"parameters", "arguments"} & value.keys():  # an answer that is JSON
            break
        calls.append(_call_of(text[place:end]))
        between = _BETWEEN.match(text, end)
        place = between.end() if between else end
    return ReadCalls(text[place:].strip() if calls else text, tuple(calls))


class ResponseReader:
    """Reads turns by transformers' parser of responses; see `CallReader`.

    Args:
        template: the response template.
        before: text that ends with the header of a turn.
        child: process that parses; default: this one, for a template whose patterns take linear time.
    """

    def __init__(
        self,
        chat: ChatTemplate,
        template: Mapping[str, Any],
        before: str,
        child: Restarted[Child] | None = None,
    ) -> None:
        self._chat = chat
        self._template = dict(template)
        self._before = before
        self._child = child

    def __call__(self, text: str, token_ids: Sequence[int] = (), tools: Sequence[Schema] = ()) -> ReadCalls:
        """Read a turn."""
        written = str(self._chat.tokenizer.decode(list(token_ids), skip_special_tokens=False, **EXACT))
        request = written, self._template, self._before, list(tools)
        try:
            if self._child is None:
                message = _parsed(*request)
            else:
                with (child := self._child.get()).in_use:
                    child.send(json.dumps(request).encode())
                    message = json.loads(child.receive(time.monotonic() + PARSE_SECONDS))
            calls = tuple(
                _call(each.get("function", each)) or _broken(json.dumps(each, ensure_ascii=False))
                for each in message.get("tool_calls") or ()
            )
        except Exception as error:  # noqa: BLE001 - its parsers raise whatever they like on text that does not fit
            if self._child is not None and isinstance(error, ChildFailed):  # its patterns took too long
                self._child.stop()
            return ReadCalls("", (_broken(text),))
        fields = {
            name: value for name, value in message.items() if name not in ("role", "content", "tool_calls")
        }
        content = str(message.get("content") or "")
        return ReadCalls(content if self._child else content.strip(), calls, fields)


def _start() -> Child:
    child = Child(["-P", "-m", __name__], stall=PARSE_SECONDS)
    try:
        child.receive(time.monotonic() + START_SECONDS)
    except ChildFailed as error:
        child.kill()
        raise RunFailed(f"the process that reads calls of tools did not start: {child.printed}") from error
    return child


def _parsed(text: str, template: dict[str, Any], before: str, tools: list[Schema]) -> dict[str, Any]:
    from transformers.utils.chat_parsing import ResponseParser

    parser = ResponseParser(template, before, tools=list[Any](tools))
    for start in range(0, len(text), PIECE):
        parser.feed(text[start : start + PIECE])
    return dict(parser.finalize()[0])


def _call_of(text: str) -> ToolCall:
    """Read the JSON of one call."""
    with contextlib.suppress(ValueError, RecursionError):  # a text of many brackets nests too deep
        return _call(_JSON.decode(text)) or _broken(text)
    return _broken(text)


def _call(value: Any) -> ToolCall | None:
    """Return the call that JSON describes; None if it describes none."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:
        arguments = {}
    # OpenAI's form of arguments is JSON within JSON
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(_whole(name), _whole(written))


def _whole(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON can hold and files cannot."""
    return text.encode("utf-8", "replace").decode()


def _broken(text: str) -> ToolCall:
    """Return a call that cannot be read, with its name if it shows one."""
    name = _NAME.search(text)
    return ToolCall(name[1] if name else "", text.strip())


def with_calls(message: Message, calls: Sequence[ToolCall]) -> Message:
    """Return a message of the assistant with its calls of tools; arguments are objects where they are JSON."""
    written = []
    for call in calls:
        arguments: Any = call.arguments
        with contextlib.suppress(ValueError, RecursionError):
            read = _JSON.decode(arguments)
            arguments = read if isinstance(read, dict) else arguments
        written.append({"type": "function", "function": {"name": call.name, "arguments": arguments}})
    return {**message, "tool_calls": written} if written else message


def call_reader(chat: ChatTemplate, tools: Sequence[Schema]) -> CallReader:
    """Return the reader of calls in the form that the chat template asks the model for.

    Raises:
        ConfigError: grpox does not read the template's form.
    """
    if not (chat.exists and chat.lists_tools):
        return read_hermes
    before = chat.render([_QUESTION], tools)
    candidates: list[CallReader] = [read_hermes, read_json, ResponseReader(chat, _QWEN_XML, before)]
    if own := getattr(chat.tokenizer, "response_template", None):
        candidates.insert(0, ResponseReader(chat, own, before, Restarted(_start)))
    call = ToolCall(str(tools[0]["function"]["name"]), json.dumps({"x": "qzxvalue"}))
    for arguments in (json.loads(call.arguments), call.arguments):
        token_ids = _written(chat, tools, call.name, arguments, before)
        text = str(chat.tokenizer.decode(token_ids, skip_special_tokens=True, **EXACT))
        for reader in candidates:
            if reader(text, token_ids, tools).calls == (call,):
                return reader
    what = "the chat template writes calls of tools in a form that grpox does not read"
    raise ConfigError(what, key="model.path", given=chat.name, allowed=READ)


def _written(chat: ChatTemplate, tools: Sequence[Schema], name: str, arguments: Any, before: str) -> list[int]:
    """Return the tokens of a turn with one call, as the template writes it; none if it raises.

    Args:
        before: what the template writes up to the turn.
    """
    call = {"id": "callofone", "type": "function", "function": {"name": name, "arguments": arguments}}
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        rendered = chat.render([_QUESTION, turn], tools, header=False)
    except Exception:  # noqa: BLE001 - templates raise where a call is in another form than theirs
        return []
    places = (place for place, (one, other) in enumerate(zip(rendered, before, strict=False)) if one != other)
    written = rendered[next(places, len(before)) :]
    return list(chat.tokenizer(written, add_special_tokens=False)["input_ids"])


def main() -> None:
    """Parse turns until the parent ends; null answers a turn that does not fit its template."""
    parent = connect_to_parent()
    parent.send_bytes(b"ready")
    with contextlib.suppress(EOFError):
        while True:
            request, message = json.loads(parent.recv_bytes()), None
            with contextlib.suppress(Exception):  # its parsers raise whatever they like
                message = _parsed(*request)
            parent.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main()
