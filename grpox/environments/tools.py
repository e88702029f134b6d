"""Tools of environments: marked functions, called with JSON that fits their signature, answered with text."""

from __future__ import annotations

import functools
import inspect
import json
import math
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_json

from grpox.contracts import CallFailure, ToolCall, ToolResult
from grpox.environments.calling import Settled, TimeLimit, Work, begin_call
from grpox.environments.contract import attribute_of, is_method
from grpox.errors import describe, nearest, shorten

MOST_CHARACTERS = 1_000_000
"""Longest text for the model; any model's context is shorter."""
MOST_ERRORS = 3
"""Wrong arguments that an error text names at most."""


class ToolProblem(Exception):
    """Raised if a function cannot be a tool; the text continues a message after its name."""


class Tool:
    """A function that the model may call by name with arguments as JSON.

    Args:
        name: name for the model.
        function: the function, or the function of a method.
        is_method: True if its first parameter is the environment.

    Raises:
        ToolProblem: a parameter has a type that cannot be read from JSON.
    """

    def __init__(self, name: str, function: Callable[..., Any], is_method: bool = False) -> None:
        self.name = name
        self.function = function
        self.is_method = is_method
        self.is_async = inspect.iscoroutinefunction(inspect.unwrap(function))
        self._arguments = _argument_adapter(function, is_method)

    def arguments(self, text: str) -> dict[str, Any]:
        """Read arguments from JSON text and convert them to the types of the signature; nothing is evaluated.

        Raises:
            ValueError: they do not fit; the text is for the model.
        """
        text = text.strip()
        if text in ("", "null"):  # models leave the arguments out where there are none
            text = "{}"
        try:
            read: Any = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        except json.JSONDecodeError as error:
            raise ValueError(f"the arguments are not JSON: {error.msg} at character {error.pos}") from error
        except RecursionError as error:
            raise ValueError("the arguments are nested too deeply") from error
        if not isinstance(read, dict):
            raise ValueError("the arguments must be a JSON object")
        try:
            arguments: dict[str, Any] = self._arguments.validate_json(text)
        except ValidationError as error:
            raise ValueError(_described(error)) from error
        return arguments


def _no_constant(name: str) -> None:
    raise ValueError(f"the arguments are not JSON: {name} is no number of JSON")


def _finite(text: str) -> float:
    if math.isfinite(value := float(text)):
        return value
    raise ValueError(f"the arguments hold {shorten(text, 100)}, which is too large for a number")


def _argument_adapter(function: Callable[..., Any], is_method: bool) -> TypeAdapter[Any]:
    """Return the check of arguments: pydantic calls a function of the same signature, which returns them."""
    try:
        signature = inspect.signature(function)
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise ToolProblem(f"has a signature that cannot be read: {describe(error)}") from error
    parameters = list(signature.parameters.values())[1 if is_method else 0 :]
    typed = [parameter.replace(annotation=hints.get(parameter.name, Any)) for parameter in parameters]

    def collect(*args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = signature_of_call.bind(*args, **kwargs)
        return dict(bound.arguments)

    signature_of_call = inspect.Signature(typed)
    collect.__signature__ = signature_of_call  # type: ignore[attr-defined]
    collect.__annotations__ = {parameter.name: parameter.annotation for parameter in typed}
    try:
        form: Any = collect  # pydantic's types know no functions
        # Numbers may be written as text, also "inf".
        config = ConfigDict(arbitrary_types_allowed=False, allow_inf_nan=False)
        return TypeAdapter[Any](form, config=config)
    except Exception as error:
        raise ToolProblem(f"has a parameter whose type cannot be read from JSON: {describe(error)}") from error


def _described(error: ValidationError) -> str:
    """Describe wrong arguments to the model, one after the other."""
    texts = []
    for each in error.errors(include_url=False, include_input=False)[:MOST_ERRORS]:
        place = ".".join(map(str, each["loc"]))
        texts.append(f"{place}: {each['msg']}" if place else each["msg"])
    more = error.error_count() - MOST_ERRORS
    return "; ".join([*texts, *([f"{more} more"] if more > 0 else [])])


def method_tool(owner: type, name: str) -> Tool:
    """Return the tool of a marked method.

    Raises:
        ToolProblem: it cannot be one.
    """
    return Tool(name, getattr(owner, attribute_of(owner, name)), is_method(owner, name))


# -- Calls -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toolbox:
    """The tools of one environment, and how they are called."""

    tools: Mapping[str, Tool]
    owner: object
    """The environment, whose methods some tools are."""
    max_calls: int
    """Most calls of one turn."""
    seconds: float
    """Time limit of a call, for the error text."""
    limit: TimeLimit

    def run(self, calls: Sequence[ToolCall]) -> Work[tuple[ToolResult, ...]]:
        """Answer the calls of one turn, in their order.

        Neighbouring calls of async tools run together. A sync tool runs alone, after those before it, because
        it may change the state of the environment.
        """
        results: dict[int, ToolResult] = {}
        together: dict[int, Settled] = {}
        for place, call in enumerate(calls):
            ready = self._bound(call, place)
            if isinstance(ready, ToolResult):
                results[place] = ready
                continue
            if not self.tools[call.name].is_async:
                yield from self._await(together, calls, results)
            settled = begin_call(ready, f"tool '{call.name}'", self.limit)
            if inspect.isawaitable(settled.value):
                together[place] = settled
            else:
                results[place] = self._answer(call, settled)
        yield from self._await(together, calls, results)
        return tuple(results[place] for place in range(len(calls)))

    def _await(
        self, together: dict[int, Settled], calls: Sequence[ToolCall], results: dict[int, ToolResult]
    ) -> Work[None]:
        """Run the calls that have begun, and add their answers."""
        if not together:
            return
        awaitables: list[Awaitable[Any]] = [settled.value for settled in together.values()]
        ends = yield awaitables
        for place, settled in zip(together, ends, strict=True):
            results[place] = self._answer(calls[place], settled)
        together.clear()

    def _bound(self, call: ToolCall, place: int) -> Callable[[], Any] | ToolResult:
        """Return the function with its arguments, or the answer to a call that is not run."""
        if not call.name:  # the reader of calls found no JSON with a name
            what = "a call is a JSON object with the name of a tool and its arguments; this one cannot be read"
            return failed(call, "arguments", what)
        if call.name not in self.tools:
            return failed(call, "unknown", unknown_tool(call.name, self.tools))
        if place >= self.max_calls:
            return failed(
                call, "limit", f"a turn may call at most {self.max_calls} tools; this call was not run"
            )
        tool = self.tools[call.name]
        try:
            arguments = tool.arguments(call.arguments)
        except ValueError as error:
            return failed(call, "arguments", f"{call.name}: {error}")
        except Exception as error:  # noqa: BLE001 - a type of the user's own, whose check fails
            return failed(call, "arguments", f"{call.name}: {describe(error)}")
        function = tool.function
        if tool.is_method:
            function = getattr(self.owner, attribute_of(type(self.owner), tool.name))
        return functools.partial(function, **arguments)

    def _answer(self, call: ToolCall, settled: Settled) -> ToolResult:
        if settled.is_late:
            result = failed(call, "timeout", f"{call.name} took longer than {self.seconds:g} s and was stopped")
        elif isinstance(settled.error, MemoryError):
            result = failed(call, "memory", f"{call.name} needed more memory than it may use")
        elif isinstance(settled.error, SystemExit | KeyboardInterrupt):
            raise settled.error  # meant for the process
        elif settled.error is not None:
            result = failed(call, "exception", f"{call.name} raised {describe(settled.error)}")
        else:
            try:
                result = ToolResult(call, result_text(settled.value))
            except MemoryError:
                result = failed(call, "memory", f"{call.name} returned more than fits its memory")
            except Exception as error:  # noqa: BLE001 - whatever a user's object raises
                what = f"{call.name} returned no text and no JSON: {describe(error)}"
                result = failed(call, "exception", what)
        return replace(result, seconds=settled.seconds)


def failed(call: ToolCall, failure: CallFailure, text: str) -> ToolResult:
    """Return the answer to a call that failed: an error text for the model."""
    return ToolResult(call, clean_text(f"Error: {text}"), failure)


def unknown_tool(name: str, tools: Iterable[str]) -> str:
    """Describe a name that no tool has, with the nearest that one has."""
    known = list(tools)
    near = nearest(name, known)
    hint = f"; did you mean {near}?" if near else f"; there are: {', '.join(known)}" if known else ""
    return f"there is no tool '{shorten(name, 100)}'{hint}"


def result_text(value: Any) -> str:
    """Return the result of a tool as text for the model: text as it is, anything else as JSON.

    Raises:
        ValueError: it cannot be written as JSON.
    """
    if isinstance(value, str):
        return clean_text(value)
    return clean_text(to_json(value, fallback=_from_array, inf_nan_mode="constants").decode())


def _from_array(value: Any) -> Any:
    """Return the values of an array or tensor, which know how to list themselves."""
    if callable(listed := getattr(value, "tolist", None)):
        return listed()
    raise ValueError(f"a {type(value).__name__} has no JSON")


def clean_text(text: str) -> str:
    """Return text that a tokenizer takes: without halves of surrogate pairs, and not without end."""
    dropped = len(text) - MOST_CHARACTERS
    if dropped > 0:
        text = f"{text[:MOST_CHARACTERS]}... ({dropped:,} further characters)"
    return text.encode("utf-8", "replace").decode()
