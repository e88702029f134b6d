"""A component bound to its checked parameters: what its mention in a run file becomes at first."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from grpox.config import ComponentRef
from grpox.errors import ConfigError, Problem
from grpox.plugins import Offer, described
from grpox.problems import problems_of


@dataclass(frozen=True)
class BoundComponent:
    """A component whose parameters are valid; nothing of it that is heavy has been imported."""

    kind: str
    label: str
    """What messages and metrics call it."""
    key: str
    """Where the run file names it, for example ``loss`` or ``rewards[0]``."""
    load: Callable[[], Any]
    """Imports the class, or for a reward the function."""
    config: BaseModel | None = None
    offer: Offer | None = None
    """Where it comes from; None for an object that was given by path or in Python."""
    needs: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()

    def __str__(self) -> str:
        origin = f" of {self.offer.distribution} {self.offer.version}" if self.offer else ""
        return f"{self.kind} '{self.label}'{origin}"


def bind_object(kind: str, target: Any, params: Mapping[str, Any], key: str, label: str) -> BoundComponent:
    """Bind a class or function that no plugin offers, from a file or from Python.

    A class may hold its parameters as a nested pydantic model `Config`, and its capabilities as class
    attributes `needs` and `provides`.

    Raises:
        ConfigError: the parameters do not fit, or `Config` is not a pydantic model.
    """
    model = getattr(target, "Config", None) if inspect.isclass(target) else None
    if model is not None and not is_model(model):
        what = f"{kind} '{label}': its Config is not a pydantic model"
        raise ConfigError(Problem(what, key, given=repr(model)))
    return BoundComponent(
        kind,
        label,
        key,
        load=lambda: target,
        config=check_params(model, params, key, f"{kind} '{label}'"),
        needs=_capabilities(target, "needs", key),
        provides=_capabilities(target, "provides", key),
    )


def _capabilities(target: Any, attribute: str, key: str) -> tuple[str, ...]:
    names = getattr(target, attribute, ())
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        what = f"{attribute} of {target.__name__} must be a tuple of strings, such as ('entropy',)"
        raise ConfigError(Problem(what, key, given=repr(names)))
    return tuple(names)


def is_model(candidate: object) -> bool:
    """Whether `candidate` is a pydantic model class."""
    return inspect.isclass(candidate) and issubclass(candidate, BaseModel)


def check_params(
    model: type[BaseModel] | None, params: Mapping[str, Any], key: str, owner: str, also: tuple[str, ...] = ()
) -> BaseModel | None:
    """Validate a component's parameters; unknown keys are refused whatever the model's own `extra` says.

    Args:
        model: the component's config; None when it has no parameters.
        params: as the run file has them.
        key: dotted key of the component.
        owner: how messages call the component.
        also: keys of the run file beside the parameters, offered as nearest names.

    Raises:
        ConfigError: with one problem for each key that is wrong.
    """
    if model is None:
        unknown = [Problem(f"{owner} has no parameters", f"{key}.{name}") for name in params]
        if unknown:
            raise ConfigError(unknown)
        return None
    try:
        return model.model_validate(dict(params), extra="forbid")
    except ValidationError as error:
        raise ConfigError(problems_of(error, model, key, also)) from error
    except Exception as error:
        raise ConfigError(Problem(f"{owner} failed on its parameters: {described(error)}", key)) from error


def own_keys(ref: ComponentRef) -> tuple[str, ...]:
    """Keys of a run file's mention that belong to the core, such as a reward's `weight`."""
    return tuple(name for name in type(ref).model_fields if name not in ("name", "path"))


def keyed(error: ConfigError, key: str) -> ConfigError:
    """The same error, with the place in the run file for the problems that do not know theirs."""
    placed = [dataclasses.replace(problem, key=problem.key or key) for problem in error.problems]
    return ConfigError(placed)
