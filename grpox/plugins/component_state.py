"""States of components as plain values, and hashes that show changes. Torch need not be loaded."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any

PLAIN = (str, int, float, bool, type(None))
"""Types of single plain values; in a state, each value is exactly of one of them."""
LARGE = 2**20
"""Elements of a tensor or array above which its attribute is compared by place and version, not by content."""
COMPARED = ("builtins", "collections", "datetime", "decimal", "fractions", "numpy", "pathlib", "random")
"""Modules whose objects are compared by their content."""


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
    """Return the hash of each value of a `plain_state`, by its key as in ``['count']``."""
    return {f"[{name!r}]": _hash(value, object, sys.maxsize) for name, value in state.items()}


def attribute_hashes(component: object) -> dict[str, str]:
    """Return the hash of each attribute of a component that holds plain values, tensors or arrays.

    So do generators of random numbers, settings, and objects of classes of the component's own module. Other
    objects count by their type alone, so that a model, a lock or a connection changes nothing.
    """
    attributes = dict(getattr(component, "__dict__", {}))
    # An observer's `Control` changes these, and checkpoints have them.
    steered, config = getattr(component, "hyperparameters", ()), attributes.get("config")
    if steered and hasattr(type(config), "model_fields"):
        attributes["config"] = {name: value for name, value in vars(config).items() if name not in steered}
    return {name: _hash(value, type(component), LARGE) for name, value in attributes.items()}


def changed_attributes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """List the attributes whose hashes differ, in alphabetical order."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def _hash(value: Any, owner: type, large: int) -> str:
    try:
        return hashlib.sha256(repr(_content(value, owner, large, {})).encode()).hexdigest()
    except Exception:  # noqa: BLE001 - what cannot be read, or is nested too deeply, counts by its type
        return type(value).__qualname__


def _content(value: Any, owner: type, large: int, entered: dict[int, Any]) -> Any:
    """Return the compared parts of a value, each with a `repr`; for other objects the name of their type.

    Args:
        owner: class of the component; objects of other classes of its module are compared.
        large: elements of a tensor or array above which its content is not compared.
        entered: objects whose attributes have been read, as they may refer to each other.
    """
    kind, torch = type(value), sys.modules.get("torch")
    if kind in (*PLAIN, bytes, complex, itertools.count):
        return (kind, hex(value)) if kind is int else value  # Python writes no int of more than 4300 digits
    is_own = kind.__module__ == owner.__module__ and kind is not owner
    if isinstance(value, Mapping):
        parts = [part for item in value.items() for part in item]
    elif isinstance(value, set | frozenset | list | tuple | deque):
        parts = list(value)
    elif _is_tensor(value):
        return _tensor_content(value, large)
    elif torch is not None and isinstance(value, torch.Generator):
        return value.get_state().tolist()
    elif (is_own or hasattr(kind, "model_fields") or is_dataclass(kind)) and id(value) not in entered:
        entered[id(value)] = value
        parts = [getattr(value, "__dict__", {})]
    else:
        is_large = kind.__module__ == "numpy" and getattr(value, "size", 0) > large
        is_compared = kind.__module__.partition(".")[0] in COMPARED and not hasattr(value, "__qualname__")
        with suppress(Exception):  # a type may refuse to be pickled
            if is_compared and not is_large:
                return pickle.dumps(value)
        return getattr(value, "__qualname__", kind.__qualname__)
    content = [_content(part, owner, large, entered) for part in parts]
    return kind.__name__, sorted(map(repr, content)) if isinstance(value, set | frozenset) else content


def _tensor_content(tensor: Any, large: int) -> tuple[Any, ...]:
    """Return dtype, shape and content of a tensor; of one with more than `large` elements place and version."""
    about = type(tensor).__name__, str(tensor.dtype), tuple(tensor.shape)
    if tensor.numel() > large:
        return *about, tensor.data_ptr(), tensor._version
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized or not tensor.numel():
        return about
    whole = tensor.detach().to("cpu").contiguous().reshape(-1)
    return *about, whole.view(sys.modules["torch"].uint8).numpy().tobytes()


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # where it is not loaded, nobody has a tensor
    return torch is not None and isinstance(value, torch.Tensor)


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
