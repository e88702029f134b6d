"""The text between two turns of the model, as the chat template writes it.

It is rendered from a short conversation whose only turn is a word, never from the history of an episode: a
template that leaves out earlier thinking would change what the model has already read. So a template must write
the same between two turns whatever stands before, which is tried at the start of a run.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpox.contracts import Message
from grpox.data.chat import ChatTemplate, Schema
from grpox.errors import ConfigError, Problem, describe

_TURN = "qzxturn"
"""Stands for the model's turn."""
_ANSWER = "qzxanswer"
ANSWERING = ("user", "tool")
"""Roles of the messages after a turn, as the trial of the template has them."""
_QUESTION: Message = {"role": "user", "content": "a"}
_TURNS = (_TURN, f"One, two.\n\n- three: {{4}}\n- five {_TURN}", f"<b>{_TURN}")
_HISTORIES: Sequence[Sequence[Message]] = (
    (),
    ({"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}),
    ({"role": "assistant", "content": "1 + 1"}, {"role": "user", "content": "d\n"}) * 2,
)
CURE = (
    "a template that writes the same after every turn, such as ChatML; "
    "give it as model.chat_template_kwargs.chat_template"
)


class Bridge:
    """Writes the text between two turns of the model.

    Args:
        tools: schemas of all tools of the run.

    Raises:
        ConfigError: the template cannot be used for episodes; the message says why.
    """

    def __init__(self, chat: ChatTemplate, tools: Sequence[Schema] = ()) -> None:
        self._chat = chat
        self._tools = tools
        self._has_tool_role = bool(tools) and chat.lists_tools
        self._names = [str(tool["function"]["name"]) for tool in tools]
        if problem := self._problem():
            key = "model.chat_template_kwargs" if chat.arguments.get("chat_template") else "model.path"
            what = f"the chat template cannot be used for episodes: {problem}"
            raise ConfigError(Problem(what, key=key, given=chat.name, allowed=CURE))

    def text(self, answer: Sequence[Message]) -> str:
        """Return the end of a turn, an environment's answer, and the beginning of the next turn."""
        return self._between(_TURN, answer)

    def _between(self, turn: str, answer: Sequence[Message], history: Sequence[Message] = ()) -> str:
        answer = answer if self._has_tool_role else _without_tool_role(answer)
        messages = [_QUESTION, *history, {"role": "assistant", "content": turn}, *answer]
        rendered = self._chat.render(messages, self._tools)
        _, mark, after = rendered.partition(_TURN)
        if not mark:
            raise ValueError("it leaves out the text of a turn")
        return after

    def _problem(self) -> str:
        """Describe why the template cannot be used; empty if it can."""
        for answer in self._answers():
            role = answer[0]["role"]
            texts = set()
            for turn in _TURNS:
                for history in _HISTORIES:
                    try:
                        texts.add(self._between(turn, answer, history))
                    except Exception as error:  # noqa: BLE001 - templates raise whatever they like
                        return f"it fails on a message with the role {role} after a turn: {describe(error)}"
            if len(texts) > 1:
                first, second, *_ = sorted(texts)
                return f"what it writes after a turn depends on what stands before: {first!r} or {second!r}"
            if texts.pop().count(_ANSWER) != len(answer):
                return f"it leaves out messages with the role {role}"
        return ""

    def _answers(self) -> list[list[Message]]:
        """List answers of each form that an environment can give."""
        user: Message = {"role": "user", "content": _ANSWER}
        if not self._tools:
            return [[user]]
        result: Message = {"role": "tool", "name": self._names[0], "content": _ANSWER}
        return [[user], [result], [result, result]]


def _without_tool_role(answer: Sequence[Message]) -> list[Message]:
    """Write the results of tools in Hermes' form in one message of the user, with what follows."""
    results = [message["content"] for message in answer if message.get("role") == "tool"]
    others = [message for message in answer if message.get("role") != "tool"]
    if not results:
        return others
    text = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
    if others and others[0].get("role") == "user":
        text, others = f"{text}\n{others[0]['content']}", others[1:]
    return [{"role": "user", "content": text}, *others]
