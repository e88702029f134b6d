"""What a completion defines, as tests in another process see it: plain values are copied, the rest stays there.

A test that compares can so be decided by no code of the completion's: it holds a copy of a plain value, or a
`Remote`, which equals nothing but itself.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import io
import pickle
import socket
import struct
import sys
from typing import Any

MOST_BYTES = 16 << 20
"""Of one message."""
BASES = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range)
VALUES = {
    *((kind.__module__, kind.__name__) for kind in BASES),
    *(("collections", name) for name in ("OrderedDict", "Counter", "deque")),
    *(("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")),
    *(("decimal", "Decimal"), ("fractions", "Fraction")),
}
PLAIN = {
    *BASES,
    type(None),
    *(collections.OrderedDict, collections.Counter, collections.deque),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction),
}
"""What is copied; an object of a subclass of `BASES` is copied as one of the base."""
HIDDEN = {*dir(builtins), *sys.stdlib_module_names}
"""Names that mean in a test what they mean in Python, whatever the completion defines."""
FORWARDED = ("__len__", "__getitem__", "__setitem__", "__str__")
"""Not what compares or says yes or no: the completion would be told what a test is after."""


class Closed(Exception):
    """The other process is gone, or sent what is no message."""


class Channel:
    """Messages over a socket; `pickler` and `unpickler` say what becomes of what is not plain."""

    def __init__(self, end: socket.socket, pickler: Any, unpickler: Any) -> None:
        self._end = end
        self._pickler = pickler
        self._unpickler = unpickler

    def send(self, message: Any) -> None:
        """Send; raises what pickling raises, and Closed."""
        buffer = io.BytesIO()
        self._pickler(buffer).dump(message)
        data = buffer.getvalue()
        try:
            self._end.sendall(struct.pack("=I", len(data)) + data)
        except OSError as error:
            raise Closed from error

    def receive(self) -> Any:
        """The next message; raises Closed."""
        (length,) = struct.unpack("=I", self._exactly(4))
        if length > MOST_BYTES:
            raise Closed("too long")
        try:
            return self._unpickler(io.BytesIO(self._exactly(length))).load()
        except Exception as error:
            raise Closed(str(error)) from error

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._end.recv(min(1 << 16, count - len(data)))
            if not part:
                raise Closed
            data += part
        return bytes(data)


# -- In the process of the completion --------------------------------------------------------------------


def serve(end: socket.socket, namespace: dict[str, Any]) -> None:
    """Send what `namespace` holds, then do what is asked with it, until nobody asks."""
    kept: list[Any] = []

    class Sending(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if type(value) in PLAIN or isinstance(value, BASES):
                return None
            kept.append(value)
            return len(kept) - 1

        def reducer_override(self, value: Any) -> Any:
            base = next((kind for kind in BASES if isinstance(value, kind)), None)
            return NotImplemented if base is None or type(value) in PLAIN else (base, (base(value),))

    class Taking(pickle.Unpickler):
        def persistent_load(self, handle: Any) -> Any:
            return kept[handle]

    channel = Channel(end, Sending, Taking)
    channel.send({name: value for name, value in namespace.items() if name not in HIDDEN and name[:2] != "__"})
    while True:
        what, target, name, positional, named = channel.receive()
        answer: tuple[bool, Any, list[Any]]
        try:
            if what == "get":
                value = getattr(target, name)
            elif what == "list":
                value = list(target)
            else:
                value = (getattr(target, name) if name else target)(*positional, **named)
            answer = (True, value, [x if isinstance(x, list | dict | set) else None for x in positional])
        except Exception as error:  # noqa: BLE001 - for the test, which may expect it
            answer = (False, type(error).__name__, [str(error)])
        channel.send(answer)


# -- In the process of the tests -------------------------------------------------------------------------


class Remote:
    """An object of the completion's: it can be called, its attributes and items read, and gone through."""

    __slots__ = ("_asked", "_handle")

    def __init__(self, asked: Asked, handle: int) -> None:
        self._asked = asked
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        return self._asked.ask("get", self, name)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._asked.ask("call", self, "", positional, named)

    def __iter__(self) -> Any:
        return iter(self._asked.ask("list", self))

    def __bool__(self) -> bool:
        raise TypeError("an object of the completion's is neither true nor false")


def _forwarded(name: str) -> Any:
    def method(self: Remote, *positional: Any) -> Any:
        try:
            return self._asked.ask("call", self, name, positional)
        except AttributeError as error:  # what Python raises of an object without the method
            raise TypeError(str(error)) from error

    return method


for _name in FORWARDED:
    setattr(Remote, _name, _forwarded(_name))


class Asked:
    """The process of a completion, as that of its tests asks it."""

    def __init__(self, end: socket.socket) -> None:
        asked = self

        class Sending(pickle.Pickler):
            def persistent_id(self, value: Any) -> Any:
                return value._handle if type(value) is Remote else None

        class Taking(pickle.Unpickler):
            def persistent_load(self, handle: Any) -> Any:
                return Remote(asked, int(handle))

            def find_class(self, module: str, name: str) -> Any:
                if (module, name) not in VALUES:
                    raise pickle.UnpicklingError(f"{module}.{name} is no plain value")
                return super().find_class(module, name)

        self._channel = Channel(end, Sending, Taking)

    def names(self) -> dict[str, Any]:
        """What the completion defined, once it has run."""
        names = self._channel.receive()
        if not isinstance(names, dict):
            raise Closed
        return {n: v for n, v in names.items() if isinstance(n, str) and n not in HIDDEN and n[:2] != "__"}

    def ask(self, what: str, target: Remote, name: str = "", positional: Any = (), named: Any = None) -> Any:
        """Its answer; raises what it raised, where that is an exception of Python's."""
        self._channel.send((what, target, name, positional, named or {}))
        answer = self._channel.receive()
        if not (isinstance(answer, tuple) and len(answer) == 3):
            raise Closed
        good, value, after = answer
        if good is not True:
            kind = getattr(builtins, value, None) if isinstance(value, str) else None
            raised = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if raised else RuntimeError)(*after)  # type: ignore[misc]
        for before, now in zip(positional, after, strict=False):
            _take_over(before, now)
        return value


def _take_over(before: Any, now: Any) -> None:
    """What a function changed in its argument, changed in the test's own."""
    if type(before) is not type(now):
        return
    if isinstance(before, list):
        before[:] = now
    elif isinstance(before, dict | set):
        before.clear()
        before.update(now)
