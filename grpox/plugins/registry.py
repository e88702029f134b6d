"""Finds components by kind and name; a conflict or error matters only if the component is selected."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from pydantic import BaseModel, ValidationError

from grpox.config import ComponentRef
from grpox.environments.from_factory import as_environment
from grpox.errors import ConfigError, GrpoxError, Problem, describe, nearest
from grpox.errors.algorithm_names import nearest_algorithm
from grpox.errors.formatting import with_article
from grpox.errors.validation import problems_of
from grpox.plugins.component import (
    BoundComponent,
    bind_object,
    check_params,
    contract_problem,
    declaration_problem,
    implied,
    is_model,
    missing_method,
)
from grpox.plugins.discovery import Offer, PluginSet, discover
from grpox.plugins.hookspecs import KINDS
from grpox.runtime.signals import raise_if_signal

_IN_FILE = re.compile(r".+\.py:\w+")
"""An object in a file, which a run file names by `path`."""


class Registry:
    """Finds, checks and builds the components that a run selects."""

    def __init__(self, plugins: PluginSet) -> None:
        self.plugins = plugins

    def find(self, kind: str, name: str) -> Offer:
        """Find the one component of `kind` called `name`; ``dist:name`` selects the distribution.

        Raises:
            ConfigError: no plugin or more than one offers it, or the component cannot be used here.
        """
        offers = self.plugins.offers_called(f"{kind}/{name}")
        if not offers:
            raise self._unknown(kind, name)
        if len(offers) > 1:
            allowed = " or ".join(sorted({offer.qualified_name for offer in offers}))
            origins = " and ".join(sorted(offer.origin for offer in offers))
            what = f"{origins} offer {with_article(kind)} '{offers[0].spec.name}'"
            raise ConfigError(what, given=name, allowed=allowed)
        if offers[0].status != "ok":
            raise ConfigError(f"{offers[0]} cannot be used: {offers[0].reason}", given=name)
        return offers[0]

    def config_model(self, offer: Offer) -> type[BaseModel] | None:
        """Import the component's config class; None if the component has no parameters.

        Raises:
            ConfigError: the class cannot be imported or is not a pydantic model, which is the plugin's fault.
        """
        if not offer.spec.config:
            return None
        try:
            model = pkgutil.resolve_name(offer.spec.config)
        except BaseException as error:
            raise_if_signal(error)
            problem = f"cannot be imported: {describe(error)}"
            raise ConfigError(f"{offer}: config {offer.spec.config} {problem}") from error
        if not is_model(model):
            raise ConfigError(f"{offer}: {offer.spec.config} is not a pydantic model")
        return model  # type: ignore[no-any-return]

    def parse(self, kind: str, ref: ComponentRef, key: str) -> BoundComponent:
        """Bind a component that a run file names under `key` to its checked parameters.

        Raises:
            ConfigError: lists every problem of the component; the caller adds `Problem.where`.
        """
        try:
            if ref.path is not None:
                # Imported late, because most runs select every component by name.
                from grpox.plugins.load_object import load_object

                bound = bind_object(kind, load_object(ref.path), ref.params, key, ref.label)
                _refuse_own_keys(None if bound.config is None else type(bound.config), ref, str(bound))
                return bound
            name = str(ref.name)
            offer = self.find(kind, name)
            model = self.config_model(offer)
            own = _refuse_own_keys(model, ref, str(offer))
            config = check_params(model, ref.params, key, f"{kind} '{name}'", own)
        except ConfigError as error:
            raise _keyed(error, key) from error.__cause__
        load: Any = partial(pkgutil.resolve_name, offer.spec.target)
        needs, provides = tuple(offer.spec.needs), tuple(offer.spec.provides)
        if kind == "environment":
            # One in TRL's form is adapted. Environments import nothing heavy.
            load = lambda: as_environment(pkgutil.resolve_name(offer.spec.target))  # noqa: E731
            try:
                provides = tuple(dict.fromkeys((*provides, *implied(load()))))
            except BaseException as error:  # noqa: BLE001 - building it reports the failure
                raise_if_signal(error)
        return BoundComponent(kind, name, key, load, config, offer, needs, provides)

    def build(self, bound: BoundComponent) -> Any:
        """Build the component: ``Class(config)``, ``Class()`` without a config, or a reward's function.

        Raises:
            ConfigError: the component cannot be imported or constructed; the original error is the cause.
        """
        try:
            target: Any = bound.load()
            if inspect.isclass(target):
                component: Any = target
                if not (problem := contract_problem(bound.kind, target)):
                    component = component() if bound.config is None else component(bound.config)
                    problem = declaration_problem(bound.kind, component)
                if problem:
                    raise ConfigError(f"{bound} {problem}", given=repr(target))
                return component
        except ConfigError as error:
            raise _keyed(error, bound.key) from error
        except GrpoxError:
            raise
        except BaseException as error:
            raise_if_signal(error)
            raise ConfigError(f"{bound} cannot be built: {describe(error)}", bound.key) from error
        if bound.kind == "reward" and callable(target) and bound.config is None:
            return target
        wanted = "a class, or a function without parameters" if bound.kind == "reward" else "a class"
        raise ConfigError(f"{bound} is not {wanted}", bound.key, given=repr(target))

    def negotiate(self, bounds: Sequence[BoundComponent], core_provides: Iterable[str]) -> list[Problem]:
        """List a problem for each capability that a selected component needs and the run does not provide."""
        provided = sorted({*core_provides, *(capability for bound in bounds for capability in bound.provides)})
        return [
            Problem(
                f"{bound} needs '{need}', which nothing in this run provides; {self._remedy(need, bounds)}",
                bound.key,
                allowed=f"provided are {', '.join(provided) or 'no capabilities'}",
                nearest=nearest(need, provided),
            )
            for bound in bounds
            for need in bound.needs
            if need not in provided
        ]

    def _remedy(self, need: str, bounds: Sequence[BoundComponent]) -> str:
        """Name the components that would provide a capability."""
        would = ", ".join(
            f"{offer.kind} '{offer.spec.name}'" + (f" ({offer.reason})" if offer.status != "ok" else "")
            for offer in self.plugins.offers
            if need in offer.spec.provides
        )
        methods = [(each, method) for each in bounds if (method := missing_method(each, need))]
        own = "".join(f"; {each} would, if its class had a method {method}" for each, method in methods)
        return (f"{would} would provide it" if would else "no installed component provides it") + own

    def _unknown(self, kind: str, name: str) -> ConfigError:
        distribution = name.rpartition(":")[0]
        offers = [offer for offer in self.plugins.offers if offer.kind == kind]
        known = sorted({offer.qualified_name if distribution else offer.spec.name for offer in offers})
        allowed = ", ".join(known) or f"no plugin offers {with_article(kind)}"
        near = nearest_algorithm(name, known, kind) if kind in ("loss", "advantage") else nearest(name, known)
        if _IN_FILE.fullmatch(name):
            near = f"{{path: {name}}}"
        elif kind == "reward" and "/" in name:  # a folder or a hub id, which no component has as its name
            allowed, near = f"{{name: reward_model, model: {name}}} for a reward model; or {allowed}", ""
        problem = Problem(f"no {kind} called '{name}' is installed", given=name, allowed=allowed, nearest=near)
        suspects = self.plugins.suspects(distribution)
        error = ConfigError([problem, *(record.suspicion for record in suspects)])
        error.__cause__ = next((record.error for record in suspects if record.error), None)
        return error


def _refuse_own_keys(model: type[BaseModel] | None, ref: ComponentRef, owner: str) -> tuple[str, ...]:
    """Refuse parameters that a run file cannot give, and return the core's own keys, such as `weight`."""
    own = tuple(field for field in type(ref).model_fields if field not in ("name", "path"))
    if hidden := sorted({"name", "path", *own} & set(model.model_fields if model else ())):
        raise ConfigError(f"{owner}: its config may not use the run file's own keys {', '.join(hidden)}")
    return own


def _keyed(error: ConfigError, key: str) -> ConfigError:
    """Copy the error, adding `key` to problems without a key."""
    return ConfigError([replace(problem, key=problem.key or key) for problem in error.problems])


Mention = str | Mapping[str, Any]
"""A component as a run file has it: ``"dapo"``, or ``{"name": "dapo", "clip_high": 0.28}``."""


@cache
def installed() -> Registry:
    """Create a registry of all installed plugins, once."""
    return Registry(discover())


def bind(kind: str, mention: Mention) -> BoundComponent:
    """Bind an installed component to its checked parameters.

    Raises:
        ConfigError: no such component, or the parameters do not fit.
    """
    if kind not in KINDS:
        near = nearest(kind, KINDS)
        raise ConfigError("no such kind of component", given=kind, allowed=", ".join(KINDS), nearest=near)
    try:
        reference = ComponentRef.model_validate(dict(mention) if isinstance(mention, Mapping) else mention)
    except ValidationError as error:
        raise ConfigError(problems_of(error, ComponentRef, kind)) from error
    return installed().parse(kind, reference, kind)


def build(kind: str, name: str, params: Mapping[str, Any] | None = None) -> Any:
    """Build a component as a run file would, for use within another one or in a notebook.

    ``grpox.build("loss", "dapo", {"clip_high": 0.28})`` returns an instance of the loss; of a reward that is a
    function, the function itself.

    Args:
        kind: ``loss``, ``reward`` or another kind of component.
        name: name of an installed component (``dapo``, ``dist:dapo``), or its path (``my_loss.py:MyLoss``).
        params: its parameters, as in a run file.

    Raises:
        ConfigError: no such kind or component, the parameters do not fit, or it cannot be built.
    """
    is_path = name.partition(":")[0].endswith(".py")
    return installed().build(bind(kind, {"path" if is_path else "name": name, **(params or {})}))
