"""Components of a run file, bound to their checked parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from grpox.contracts import Capability, Reduction
from grpox.environments import Environment
from grpox.environments.contract import environment_problem, overrides
from grpox.environments.from_factory import as_environment, written_as
from grpox.errors import ConfigError, Problem, describe
from grpox.errors.validation import problems_of, truths_for_numbers
from grpox.plugins.discovery import Offer
from grpox.plugins.optional_methods import methods_of, methods_problem
from grpox.runtime.signals import raise_if_signal


@dataclass(frozen=True)
class BoundComponent:
    """A component with valid parameters; its heavy modules are not imported yet."""

    kind: str
    label: str
    """Name in messages and metrics."""
    key: str
    """Dotted key in the run file, for example ``loss`` or ``rewards[0]``."""
    load: Callable[[], Any]
    """Function that imports the class, or the function of a reward."""
    config: BaseModel | None = None
    offer: Offer | None = None
    """Offer of the plugin; None for an object given by path or in Python."""
    needs: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()

    def __str__(self) -> str:
        origin = f" of {self.offer.origin}" if self.offer else ""
        return f"{self.kind} '{self.label}'{origin}"


def bind_object(kind: str, target: Any, params: Mapping[str, Any], key: str, label: str) -> BoundComponent:
    """Bind a class or function that no plugin offers, from a file or from Python.

    A class may define its parameters as a nested pydantic model `Config`, and its capabilities as class
    attributes `needs` and `provides`. An environment also provides the capabilities of its methods.

    Raises:
        ConfigError: the object is not a component of this kind, the parameters are wrong, or `Config` is not a
            pydantic model.
    """
    owner = f"{kind} '{label}'"
    if problem := contract_problem(kind, target):
        raise ConfigError(f"{owner} {problem}", key, given=repr(target))
    target = as_environment(target) if kind == "environment" else target
    model = getattr(target, "Config", None) if inspect.isclass(target) else None
    if model is not None and not is_model(model):
        raise ConfigError(f"{owner}: its Config is not a pydantic model", key, given=repr(model))
    return BoundComponent(
        kind,
        label,
        key,
        load=lambda: target,
        config=check_params(model, params, key, owner),
        needs=_capabilities(target, "needs", key),
        provides=_capabilities(target, "provides", key) + (implied(target) if kind == "environment" else ()),
    )


METHODS = {
    "generator": ("start", "generate", "sync", "sleep", "wake", "close"),
    "advantage": ("scale",),
    "loss": ("per_token",),
    "correction": ("correct",),
    "dataset": ("load",),
    "optimizer": ("build",),
    "scheduler": ("build",),
}
"""Methods that a component of each kind must have; an observer may leave out any hook, and an environment is a
subclass of `grpox.environments.Environment`, which has them all."""

BUILD_ARGUMENTS = {"optimizer": {"parameters", "learning_rate"}, "scheduler": {"optimizer", "total_steps"}}
"""Arguments of `build` that tell the two kinds with this method apart."""


def kind_of(target: Any) -> str:
    """Infer the kind of a class or function from its methods and parameters; empty if it could be none or
    several."""
    if not inspect.isclass(target):
        return "reward" if callable(target) else ""
    if issubclass(target, Environment):
        return "environment"
    if any(name.startswith("grpox_") for name in dir(target)):
        return "observer"
    kinds = [kind for kind, names in METHODS.items() if all(callable(getattr(target, n, None)) for n in names)]
    if kinds == ["optimizer", "scheduler"]:
        # Both build; they differ in the argument besides what they build on.
        build: Any = getattr(target, "build", None)
        names = set(inspect.signature(build).parameters)
        kinds = [kind for kind in kinds if BUILD_ARGUMENTS[kind] & names]
    is_reward = not kinds and "__call__" in dir(target)
    return "reward" if is_reward else kinds[0] if len(kinds) == 1 else ""


LEVELS = ("token", "sequence")
"""Values of the attribute `level` of losses and corrections."""
DECLARATIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "loss": {"scope": ("token", "group"), "level": LEVELS},
    "correction": {"level": LEVELS},
    "advantage": {"per": ("completion", "turn", "token")},
}
"""Kind -> each attribute that a component may declare, with its values."""


def contract_problem(kind: str, target: Any) -> str:
    """Return the reason why a class (or a reward function) is not a component of this kind; empty if it is."""
    if kind == "reward":
        return methods_problem(target) if callable(target) else "is not callable"
    if kind == "environment":
        if never := sorted(methods_of(target)):
            return f"has {never[0]}, which is never called: an instance lives for one episode"
        return environment_problem(target)
    if not inspect.isclass(target):
        return "is not a class"
    missing = [name for name in METHODS.get(kind, ()) if not callable(getattr(target, name, None))]
    if missing:
        return f"has no method {' and no method '.join(missing)} (see grpox.contracts)"
    return methods_problem(target) or declaration_problem(kind, target)


def declaration_problem(kind: str, component: Any) -> str:
    """Describe what is wrong with the attributes that a component declares, class or object; empty if nothing.

    The value of a property is known only once the object is built.
    """
    reduction = getattr(component, "reduction", None)
    if kind == "loss" and not isinstance(reduction, Reduction | property):
        allowed = ", ".join(member.name for member in Reduction)
        return f"has the reduction {reduction!r}; it must be a grpox.contracts.Reduction: {allowed}"
    for name, values in DECLARATIONS.get(kind, {}).items():
        value = getattr(component, name, values[0])
        is_unknown_level = name == "level" and value is None
        if value not in values and not is_unknown_level and not isinstance(value, property):
            return f"has the {name} {value!r}; it is {' or '.join(map(repr, values))}"
    if kind == "advantage":
        form, per = takes_inputs(component), getattr(component, "per", "completion")
        if form is None:
            signature = inspect.signature(component.scale)
            return f"has the method scale{signature}; it is scale(inputs) or scale(rewards, weights, group_ids)"
        if not form and per in ("turn", "token"):
            return f"has the per {per!r}, for which its method is scale(inputs)"
    return ""


def takes_inputs(scaler: Any) -> bool | None:
    """Tell the two forms of a scaler's method `scale` apart, of a class or an object.

    Returns:
        True for ``scale(inputs)``, False for ``scale(rewards, weights, group_ids)``, None for neither.
    """
    method = inspect.getattr_static(scaler, "scale", None)
    has_self = inspect.isclass(scaler) and not isinstance(method, staticmethod | classmethod)
    try:
        signature = inspect.signature(scaler.scale)
    except ValueError:  # of a function written in C Python may know no parameters
        return False
    for form, arguments in ((False, 3), (True, 1)):
        try:
            signature.bind(*[None] * (arguments + has_self))
        except TypeError:
            continue
        return form
    return None


def level_of(component: Any) -> str | None:
    """Return the level that a loss or correction declares, itself or in its config; None: it is unknown."""
    levels = (getattr(each, "level", None) for each in (component, getattr(component, "config", None)))
    return next((level for level in levels if level in LEVELS), None)


def implied(environment: type[Environment]) -> tuple[str, ...]:
    """Return the capabilities that an environment has by the methods that it overrides."""
    return tuple(capability for capability, method in _IMPLYING.items() if overrides(environment, method))


def missing_method(bound: BoundComponent, capability: str) -> str:
    """Return the method that an environment lacks for a capability; empty if none, or if a plugin offers it."""
    if bound.kind != "environment" or bound.offer is not None or capability not in _IMPLYING:
        return ""
    return written_as(bound.load(), _IMPLYING[capability])


_IMPLYING: dict[str, str] = {
    Capability.EPISODE_REWARD: "reward",
    Capability.TURN_REWARDS: "turn_rewards",
    Capability.STATE_KEYS: "state_key",
}
"""Capability -> the method of an environment that stands for it."""


def _capabilities(target: Any, attribute: str, key: str) -> tuple[str, ...]:
    names = getattr(target, attribute, ())
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        what = f"{attribute} of {target.__name__} must be a tuple of strings, such as ('entropy',)"
        raise ConfigError(what, key, given=repr(names))
    return tuple(names)


def is_model(candidate: object) -> bool:
    """Return True if `candidate` is a pydantic model class."""
    return inspect.isclass(candidate) and issubclass(candidate, BaseModel)


def check_params(
    model: type[BaseModel] | None, params: Mapping[str, Any], key: str, owner: str, also: tuple[str, ...] = ()
) -> BaseModel | None:
    """Validate a component's parameters; unknown keys are refused, even if the model's `extra` allows them.

    Args:
        model: the component's config; None if it has no parameters.
        params: parameters in the run file.
        key: dotted key of the component.
        owner: name of the component in messages.
        also: keys of the run file beside the parameters, also suggested as nearest names.

    Raises:
        ConfigError: a key is wrong; one problem for each.
    """
    if model is None:
        if params:
            raise ConfigError([Problem(f"{owner} has no parameters", f"{key}.{name}") for name in params])
        return None
    if truths := truths_for_numbers(params, model, key):
        raise ConfigError(truths)
    try:
        return model.model_validate(dict(params), extra="forbid")
    except ValidationError as error:
        raise ConfigError(problems_of(error, model, key, also)) from error
    except BaseException as error:
        raise_if_signal(error)
        raise ConfigError(f"{owner} failed on its parameters: {describe(error)}", key) from error
