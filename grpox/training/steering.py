"""Changes of a running run that observers ask for: hyperparameters, and its end; applied on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic import BaseModel, ValidationError

from grpox.config import RunConfig
from grpox.errors import ConfigError
from grpox.observing.control import ControlState, RunControl
from grpox.runtime.world import World
from grpox.update.policy_update import PolicyUpdate

_MOVED = "train.adaptive_entropy moves it after each step; train.adaptive_entropy=null lets observers set it"


@dataclass(frozen=True)
class Hyperparameter:
    """A setting that may change between two steps."""

    value: float
    """At the start of the run."""
    check: Callable[[float], object]
    """Raises ValueError for an impossible value."""
    apply: Callable[[float], None]


class Steering:
    """Applies the requests of observers between two steps.

    Args:
        components: kind -> the run's component.
        state: changes so far, in the form of checkpoints.
        in_use: an observer of rank 0 takes the control; the same on all ranks.
    """

    def __init__(
        self,
        world: World,
        policy: PolicyUpdate,
        components: Mapping[str, object],
        config: RunConfig,
        state: ControlState,
        in_use: bool,
    ) -> None:
        self.world = world
        self.state = state
        self.in_use = in_use
        self._settings = _settings_of_update(policy, config) | {
            f"{kind}.{name}": _setting_of_component(kind, component, name)
            for kind, component in components.items()
            for name in getattr(component, "hyperparameters", ())
            # A setting that is off stays off.
            if getattr(getattr(component, "config", None), name, name) is not None
        }
        values = {name: setting.value for name, setting in self._settings.items()}
        fixed = {"entropy_coef": _MOVED} if config.train.adaptive_entropy is not None else {}
        self.control = RunControl(values, {name: each.check for name, each in self._settings.items()}, fixed)

    def restore(self) -> None:
        """Apply the changes in a checkpoint.

        Raises:
            ConfigError: the run has no such hyperparameter, or it cannot have that value.
        """
        for name, value in self.state.changed.items():
            try:
                self.control.set(name, value)
            except ValueError as error:
                raise ConfigError(f"the checkpoint has a setting that cannot be changed: {error}") from error
            self._settings[name].apply(value)
        self.control.take()

    def apply(self) -> None:
        """Apply the requests since the last call on all ranks; a collective if `in_use`."""
        if not self.in_use:
            return
        [requests] = self.world.gather([self.control.take()] if self.world.is_main else [])
        for name, value in requests.changed.items():
            self._settings[name].apply(value)
        self.state.changed |= requests.changed
        self.state.stop_reason = self.state.stop_reason or requests.stop_reason


def _settings_of_update(policy: PolicyUpdate, config: RunConfig) -> dict[str, Hyperparameter]:
    def weigh(name: str, value: Any) -> None:
        policy.step_loss = replace(policy.step_loss, **{name: value})

    rate = Hyperparameter(1.0, _check_not_negative, policy.engine.scale_learning_rate)
    settings, is_adaptive = {"learning_rate_factor": rate}, config.train.adaptive_entropy is not None
    for name in ("beta", "entropy_coef"):
        # If it is 0, the run lacks what it would need: a reference, or the gradient of the entropy.
        if (value := getattr(config.train, name)) > 0 and not (name == "entropy_coef" and is_adaptive):
            settings[name] = Hyperparameter(value, _check_not_negative, partial(weigh, name))
    return settings


def _check_not_negative(value: float) -> None:
    if value < 0:
        raise ValueError(f"{value:g} is negative")


def _setting_of_component(kind: str, component: Any, name: str) -> Hyperparameter:
    """Make a field of a component's config a hyperparameter; raises ConfigError if it holds no number."""
    config, owner = getattr(component, "config", None), type(component).__name__
    if not isinstance(config, BaseModel) or name not in type(config).model_fields:
        what = f"{kind} '{owner}' declares the hyperparameter '{name}', which its attribute config lacks"
        raise ConfigError(what, kind)
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{kind} '{owner}': hyperparameter '{name}' is {value!r}, not a number", kind)

    def changed(to: float) -> BaseModel:
        try:
            return type(config).model_validate({**dict(component.config), name: to})
        except ValidationError as error:
            raise ValueError(error.errors(include_url=False)[0]["msg"]) from error

    return Hyperparameter(float(value), changed, lambda to: setattr(component, "config", changed(to)))
