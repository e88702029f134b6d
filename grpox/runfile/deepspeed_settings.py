"""Checks of `deepspeed.settings` and the offload keys of a run file, without importing DeepSpeed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from grpox.config import DeepSpeedConfig
from grpox.errors import Problem, nearest
from grpox.runfile.yaml_lines import read_table


class DeepSpeedKeys(NamedTuple):
    """Tables of deepspeed_keys.yaml; the file explains them."""

    owned: dict[str, str]
    unsupported: dict[str, str]
    passed: list[str]
    zero_optimization: list[str]


@cache
def deepspeed_keys() -> DeepSpeedKeys:
    """Read the tables; only a run file with settings needs them."""
    return DeepSpeedKeys(**read_table("grpox.runfile", "deepspeed_keys.yaml"))


_KEY = "deepspeed.settings"


def deepspeed_problems(config: DeepSpeedConfig) -> Iterator[Problem]:
    """Find mistakes in offload keys and settings that can be found without DeepSpeed."""
    users = [key for key in ("offload_optimizer", "offload_param") if getattr(config, key) == "nvme"]
    if users and not config.nvme_path:
        what = f"a folder is required because {users[0]} is nvme"
        yield Problem(what, "deepspeed.nvme_path", allowed="a folder on a fast local disk")
    if config.nvme_path and not users:
        what = "has no effect, because neither offload_optimizer nor offload_param is nvme"
        yield Problem(what, "deepspeed.nvme_path", given=config.nvme_path)
    if settings := without_auto(config.settings):
        yield from _settings_problems(settings, config)


def without_auto(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Remove values ``auto`` from `settings`: in files for transformers they mean the trainer's own value."""
    return {
        name: without_auto(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if value != "auto"
    }


def _settings_problems(settings: Mapping[str, Any], config: DeepSpeedConfig) -> Iterator[Problem]:
    known = deepspeed_keys()
    yield from _unknown_keys(settings, _KEY, known.passed, {*known.owned, *known.unsupported})
    for name in ("zero_optimization", "bf16", "fp16", "data_types"):
        if name in settings and not isinstance(settings[name], Mapping):
            yield Problem("a mapping is expected", f"{_KEY}.{name}", given=repr(settings[name]))
    zero = settings.get("zero_optimization")
    if isinstance(zero, Mapping):
        yield from _unknown_keys(zero, f"{_KEY}.zero_optimization", known.zero_optimization)
    # A file may repeat the run's own values.
    same = {
        "fp16.enabled": False,
        "zero_optimization.stage": config.stage,
        "zero_optimization.offload_optimizer.device": config.offload_optimizer,
        "zero_optimization.offload_param.device": config.offload_param,
    }
    for key, value in _values(settings):
        if key in same and value == same[key]:
            continue
        shown = str(value) if len(str(value)) <= 60 else f"{str(value)[:57]}..."
        if key in known.owned:
            yield Problem(f"use {known.owned[key]} instead: grpox sets this key", f"{_KEY}.{key}", given=shown)
        if key in known.unsupported:
            yield Problem(known.unsupported[key], f"{_KEY}.{key}", given=shown)


def _unknown_keys(
    settings: Mapping[str, Any], key: str, known: Collection[str], others: Collection[str] = ()
) -> Iterator[Problem]:
    for name in settings:
        if name not in known and name not in others:
            yield Problem("DeepSpeed has no such key", f"{key}.{name}", nearest=nearest(name, known))


def _values(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every key at every depth."""
    for name, value in settings.items():
        yield prefix + name, value
        if isinstance(value, Mapping):
            yield from _values(value, f"{prefix}{name}.")
