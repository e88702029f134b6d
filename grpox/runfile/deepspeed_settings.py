"""Checks of `deepspeed.settings` and the offload keys of a run file, without importing DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from grpox.config import DeepSpeedConfig
from grpox.errors import Problem, nearest
from grpox.errors.validation import written
from grpox.runfile.yaml_lines import read_table

_KEY = "deepspeed.settings"


@cache
def deepspeed_keys() -> dict[str, Any]:
    """Read the tables of deepspeed_keys.yaml, which explains them; only a run file with settings needs them."""
    table: dict[str, Any] = read_table("grpox.runfile", "deepspeed_keys.yaml")
    return table


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
    known, zero = deepspeed_keys(), settings.get("zero_optimization")
    parts = [(settings, _KEY, known["passed"], {*known["owned"], *known["unsupported"]})]
    if isinstance(zero, Mapping):
        parts.append((zero, f"{_KEY}.zero_optimization", known["zero_optimization"], set()))
    for part, key, names, others in parts:
        for name in part:
            if name not in names and name not in others:
                yield Problem("DeepSpeed has no such key", f"{key}.{name}", nearest=nearest(name, names))
    for name in ("zero_optimization", "bf16", "fp16", "data_types"):
        if name in settings and not isinstance(settings[name], Mapping):
            yield Problem("a mapping is expected", f"{_KEY}.{name}", given=repr(settings[name]))
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
        if cure := known["owned"].get(key):
            yield Problem(f"use {cure} instead: grpox sets this key", f"{_KEY}.{key}", given=written(value))
        if reason := known["unsupported"].get(key):
            yield Problem(reason, f"{_KEY}.{key}", given=written(value))


def _values(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every key at every depth."""
    for name, value in settings.items():
        yield prefix + name, value
        if isinstance(value, Mapping):
            yield from _values(value, f"{prefix}{name}.")
