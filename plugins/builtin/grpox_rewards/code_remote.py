"""Names that a completion defines, for tests in another process: plain values are copied, other objects stay.

So no code of the completion can decide a comparison in a test: the test has a copy of a plain value, or a
`Remote`,
which equals only itself.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import os
import struct
import sys
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from operator import getitem, setitem
from typing import Any

from grpox_rewards.code_values import decode, encode

MOST_BYTES = 16 << 20
"""Largest size of one message in bytes."""
HIDDEN = {*dir(builtins), *sys.stdlib_module_names}
"""Names that keep Python's own meaning in a test, even if the completion defines them."""
CHANGEABLE = (list, dict, set, deque, bytearray)
"""Types of a test's arguments that a function may change."""
SCALARS = (str, bytes, int, float, bool, type(None))


class Closed(BaseException):
    """The other process has ended, or sent an invalid message; a test cannot expect this exception."""


class Channel:
    """Messages from one file descriptor and to another, in the format of `grpox.runtime.child`.

    Args:
        most: largest size in bytes of a received message.
    """

    def __init__(self, source: int, sink: int, most: int = MOST_BYTES) -> None:
        self._source = source
        self._sink = sink
        self._most = most

    def send(self, data: bytes) -> None:
        """Send one message; raises Closed."""
        rest = memoryview(struct.pack("!I", len(data)) + data)
        try:
            while rest:
                rest = rest[os.write(self._sink, rest) :]
        except OSError as error:
            raise Closed from error

    def receive(self) -> bytes:
        """Return the next message; raises Closed."""
        (length,) = struct.unpack("!I", self._exactly(4))
        if length > self._most:
            raise Closed("too long")
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        data = bytearray()  # grows with the received data, not with the announced length
        while len(data) < count:
            try:
                part = os.read(self._source, min(1 << 16, count - len(data)))
            except OSError as error:
                raise Closed from error
            if not part:
                raise Closed
            data += part
        return bytes(data)


# -- In the process of the completion --------------------------------------------------------------------


def serve(channel: Channel, namespace: dict[str, Any]) -> None:
    """Send the names of `namespace`, then execute the requested calls until no more arrive."""
    objects: list[Any] = []

    def keep(value: Any) -> list[Any]:
        objects.append(value)
        return ["object", len(objects) - 1]

    def find(module: str, name: str) -> Any:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))

    take: dict[str, Callable[..., Any]] = {"object": objects.__getitem__, "name": find}
    channel.send(encode({name: value for name, value in namespace.items() if _is_shown(name)}, keep))
    while True:
        function, positional, named = decode(channel.receive(), take)
        try:
            value = function(*positional, **named)
            arguments = (*positional, *named.values())
            after = [x if isinstance(x, CHANGEABLE) else None for x in arguments]
            answer = encode((True, value, after), keep)
        except Exception as error:  # noqa: BLE001 - for the test, which may expect it
            # The nearest class among Python's own exceptions, by which a test may catch it.
            kind = next(each for each in type(error).__mro__ if each.__module__ == "builtins")
            answer = encode((False, kind.__name__, str(error), list(error.args)), keep)
        channel.send(answer)


def _is_shown(name: str) -> bool:
    return name not in HIDDEN and name[:2] != "__"


# -- In the process of the tests -------------------------------------------------------------------------


class Remote:
    """An object of the completion, which a test can call, iterate, and read attributes and items of.

    It has no comparison and no truth value: these would show the completion what the test expects.
    """

    __slots__ = ("_handle", "_remote_process")

    def __init__(self, process: RemoteProcess, handle: int) -> None:
        self._remote_process = process
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        return self._remote_process.ask(getattr, self, name)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._remote_process.ask(self, *positional, **named)

    def __iter__(self) -> Any:
        values = self._remote_process.ask(list, self)
        if type(values) is not list:
            self._remote_process.is_open = False
            raise Closed
        return iter(values)

    def __len__(self) -> Any:
        return self._remote_process.ask(len, self)

    def __getitem__(self, key: Any) -> Any:
        return self._remote_process.ask(getitem, self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._remote_process.ask(setitem, self, key, value)

    def __str__(self) -> Any:
        return self._remote_process.ask(str, self)

    def __bool__(self) -> bool:
        raise TypeError("an object of the completion's is neither true nor false")


class RemoteProcess:
    """The process of a completion, as the process of its tests sees it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._asking = allocate_lock()  # threads of a test send requests one after the other
        self.is_open = True
        """False after a missing or invalid answer."""

    def names(self) -> dict[str, Any]:
        """Return the names that the completion defined, once it has run."""
        names = self._receive()
        if type(names) is not dict:
            raise Closed
        return {name: value for name, value in names.items() if type(name) is str and _is_shown(name)}

    def ask(self, function: Any, /, *positional: Any, **named: Any) -> Any:
        """Call a function in the completion's process and return its result.

        Args:
            function: function of the completion, or one of Python's own.

        Raises:
            Exception: the function raised it, here as the nearest of Python's own exceptions.
            Closed: the process has ended, or its answer is invalid.
        """
        question = encode((function, positional, named), _refer)
        with self._asking:
            if not self.is_open:
                raise Closed
            self.is_open = False  # until the whole answer is here, so that no other call reads it
            self._channel.send(question)
            match self._receive():
                case (True, value, list(after)):
                    self.is_open = True
                case (False, str(kind), str(text), list(arguments)):
                    self.is_open = True
                    raise _exception(kind, text, arguments)
                case _:
                    raise Closed
        for before, now in zip((*positional, *named.values()), after, strict=False):
            _take_over(before, now)
        return value

    def _receive(self) -> Any:
        data = self._channel.receive()
        try:
            return decode(data, {"object": functools.partial(Remote, self)})
        except Exception as error:
            raise Closed(str(error)) from error


def _refer(value: Any) -> list[Any]:
    """Return the node of a value that is not plain: an object of the completion, or a name of Python's own.

    Raises:
        TypeError: the value is neither.
    """
    if type(value) is Remote:
        return ["object", value._handle]
    owner = getattr(value, "__objclass__", value)  # str.upper names its type, not its module
    module, name = str(getattr(owner, "__module__", None)), getattr(value, "__qualname__", None)
    if isinstance(name, str) and module.partition(".")[0] in sys.stdlib_module_names:
        current: Any = sys.modules.get(module)
        for part in name.split("."):
            current = getattr(current, part, None)
        if current is value:
            return ["name", module, name]
    raise TypeError(f"a test can hand over plain values and names of Python's, not {value!r}"[:300])


def _exception(name: str, text: str, arguments: list[Any]) -> Exception:
    """Return the exception that the completion raised, from the description of its process."""
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(text)
    if issubclass(kind, StopIteration | StopAsyncIteration):  # both would end a loop of the test silently
        return RuntimeError(f"{name}: {text}")
    if all(type(argument) in SCALARS for argument in arguments):
        with suppress(TypeError, ValueError, OverflowError):  # the exception's own class had other arguments
            exception = kind(*arguments)
            if str(exception) == text:
                return exception
    for base in kind.__mro__:
        with suppress(TypeError):  # a class that needs more than a text
            exception = base(text)
            if isinstance(exception, Exception):
                return exception
    return Exception(text)


def _take_over(before: Any, now: Any) -> None:
    """Apply the changes that a function made to its copy of a test's argument."""
    if any(isinstance(before, kind) and isinstance(now, kind) for kind in (list, bytearray)):
        before[:] = now
    elif any(isinstance(before, kind) and isinstance(now, kind) for kind in (dict, set)):
        before.clear()
        before.update(now)
    elif isinstance(before, deque) and isinstance(now, deque):
        before.clear()
        before.extend(now)
