"""States of components as plain values, and hashes by which changes are seen. Torch need not be loaded."""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

PLAIN = (str, int, float, bool, type(None))
"""Types of single plain values; in a state, each value is exactly of one of them."""
LARGE = 2**20
"""Elements of a tensor or array above which its attribute is compared by place and version, not by content."""
DEEPEST = 20
"""Levels of nested containers of an attribute that are compared."""


class NotPlain(ValueError):
    """Raised for a value that is not plain, which no checkpoint holds; the text names its place and type."""


def odd_part(
    value: Any,
    path: str = "",
    types: tuple[type, ...] = PLAIN,
    keys: tuple[type, ...] = (str,),
    is_a: Callable[..., bool] = lambda part, types: type(part) in types,
) -> tuple[str, Any] | None:
    """Return path and value of the first part that is not plain, in lists and dicts; None if there is none.

    Checkpoints hold values of exactly these types; with `isinstance`, subclasses count too.
    """
    if is_a(value, types):
        return None
    if is_a(value, (list, tuple)):
        parts = [(path, each) for each in value]
    elif is_a(value, (dict,)) and all(is_a(key, keys) for key in value):
        parts = [(f"{path}.{key}", each) for key, each in value.items()]
    else:
        return path, value
    return next(filter(None, (odd_part(each, place, types, keys, is_a) for place, each in parts)), None)


def plain_state(state: Any) -> dict[str, Any]:
    """Copy the result of `state_dict`, tensors to the CPU.

    Raises:
        NotPlain: it is no mapping, or a value is neither plain nor a tensor.
    """
    if not isinstance(state, Mapping):
        raise NotPlain(f"state_dict returned a {_type_name(state)}, not a dict")
    try:
        copy: dict[str, Any] = _plain(state, "")
    except RecursionError as error:
        raise NotPlain("state_dict returned a dict that contains itself, or is nested too deeply") from error
    return copy


def _plain(value: Any, path: str) -> Any:
    if type(value) in PLAIN:
        return value
    if _is_tensor(value):
        if str(value.layout) != "torch.strided" or value.is_quantized:
            raise NotPlain(f"the state's value {path} is a sparse or quantized tensor, which is not compared")
        return value.detach().to("cpu", copy=True)
    if type(value) in (list, tuple):
        return type(value)(_plain(item, f"{path}[{place}]") for place, item in enumerate(value))
    if isinstance(value, Mapping):
        for name in value:
            if type(name) not in PLAIN:
                raise NotPlain(f"the state has a key of type {_type_name(name)} in {path or 'its first level'}")
        return {name: _plain(item, f"{path}[{name!r}]") for name, item in value.items()}
    advice = "a state holds numbers, strings, None, tensors, and lists, tuples and dicts of these"
    raise NotPlain(f"the state's value {path} is a {_type_name(value)}; {advice}")


def state_hashes(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the hash of each single value of a `plain_state`, by its path."""
    return dict(_hashes(state, ""))


def _hashes(value: Any, path: str) -> Iterator[tuple[str, str]]:
    # The empty containers themselves count, and their lengths.
    if isinstance(value, dict):
        yield f"{path} keys", _hash(repr(list(value)))
        for name, item in value.items():
            yield from _hashes(item, f"{path}[{name!r}]")
    elif isinstance(value, list | tuple):
        yield f"{path} length", _hash(f"{type(value).__name__} {len(value)}")
        for place, item in enumerate(value):
            yield from _hashes(item, f"{path}[{place}]")
    elif _is_tensor(value):
        yield path, _hash_of_tensor(value, sys.maxsize)
    else:
        yield path, _hash(f"{type(value).__name__} {value!r}")


def attribute_hashes(component: object) -> dict[str, str]:
    """Return the hash of each attribute of a component that holds plain values, tensors or arrays.

    So do generators of random numbers, settings, and objects of classes of the component's own module. Other
    objects count by their type alone, so that a model, a lock or a connection changes nothing.
    """
    # An observer's `Control` changes these, and checkpoints have them.
    steered = frozenset(getattr(component, "hyperparameters", ()))
    attributes = dict(getattr(component, "__dict__", {}))
    if steered and (settings := _settings(attributes.get("config"))) is not None:
        attributes["config"] = {name: value for name, value in settings.items() if name not in steered}
    return {name: _attribute_hash(value, type(component)) for name, value in attributes.items()}


def changed_attributes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """List the attributes whose hashes differ, in alphabetical order."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def _attribute_hash(value: Any, owner: type) -> str:
    digest = hashlib.sha256()
    for part in _parts(value, 0, owner):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _parts(value: Any, depth: int, owner: type | None) -> Iterator[str]:
    kind = type(value).__name__
    if type(value) in (*PLAIN, bytes, complex):
        yield f"{kind} {value!r}"
    elif depth > DEEPEST:
        yield kind
    elif _is_tensor(value) or _is_array(value):
        yield _hash_of_tensor(value, LARGE)
    elif isinstance(value, Mapping):
        yield f"{kind} {len(value)}"
        for name, item in list(value.items()):
            yield from _parts(name, depth + 1, owner)
            yield from _parts(item, depth + 1, owner)
    elif isinstance(value, list | tuple | deque):
        yield f"{kind} {len(value)}"
        for item in value:
            yield from _parts(item, depth + 1, owner)
    elif isinstance(value, set | frozenset):
        yield f"{kind} {len(value)}"
        yield from sorted(" ".join(_parts(item, depth + 1, owner)) for item in value)
    elif is_dataclass(value) and not isinstance(value, type):
        yield kind
        yield from _parts(dict(getattr(value, "__dict__", {})), depth + 1, owner)
    elif (state := _inner_state(value, owner)) is not None:
        yield kind
        # Objects may refer to each other: those within one are not looked into.
        yield from _parts(state, depth + 1, None)
    else:
        yield kind


def _inner_state(value: Any, owner: type | None) -> Any:
    """Return what decides how an object behaves, where that is known, else None."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, itertools.count):
        return repr(value)
    if (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(value, numpy.random.Generator):
            return value.bit_generator.state
        if isinstance(value, numpy.random.RandomState):
            return value.get_state(legacy=False)
    if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Generator):
        return value.get_state()
    if (settings := _settings(value)) is not None:
        return settings
    is_own = owner is not None and type(value).__module__ == owner.__module__ and type(value) is not owner
    return dict(getattr(value, "__dict__", {})) if is_own else None


def _settings(value: Any) -> dict[str, Any] | None:
    """Return the fields of a pydantic model; None for another object."""
    return dict(value.__dict__) if hasattr(type(value), "model_fields") else None


def _hash_of_tensor(value: Any, large: int) -> str:
    """Hash a tensor or an array: its content; of one with more than `large` elements place and version."""
    about = f"{type(value).__name__} {value.dtype} {tuple(value.shape)}"
    if _is_array(value):
        return _hash(about, b"" if value.size > large or value.dtype.hasobject else value.tobytes())
    tensor = value.detach()
    if tensor.numel() > large:
        return _hash(f"{about} {tensor.data_ptr()} {value._version}")
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized:
        return _hash(about)
    torch = sys.modules["torch"]
    whole = tensor.to("cpu").contiguous().reshape(-1)
    return _hash(about, whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b"")


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # where it is not loaded, nobody has a tensor
    return torch is not None and isinstance(value, torch.Tensor)


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _hash(text: str, content: bytes = b"") -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass") + b"\0" + content).hexdigest()


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
