"""Functions of grpox that plugins may call, beside the contracts; all of it is plugin API.

The built-in plugins use no others. A name is imported when it is first used: importing this module imports
nothing heavy.

| for | names |
|---|---|
| generators, and rewards with models | `stream_weights`, `stream_base`, `stream_adapters`, `write_adapter`, `adapted_layers`, `has_float32_head`, `base_parameters`, `base_buffers`, `persistent_buffers`, `is_own_memory`, `ADAPTER`, `CheckedTemplate`, `upload`, `hub_kernels`, `rope_choice`, `preserve_random_state`, `world_size` |
| advantages | `weighted_sum`, `ROUNDING` |
| trackers | `checkpoints_in`, `step_of`, `MetricsLine`, `read_samples`, `Curve`, `binned`, `describe_early_stop`, `alarms_in`, `describe_alarm`, `look_at`, `UnreadableData`, `LOCK_FILE`, `read_lock`, `parameter_defaults` |
| commands | `write_comparison`, `dtype_on`, `load_run`, `decide_longest`, `recipe_names`, `input_path`, `model_problems` |
| files and processes | `write_atomically`, `atomic_path`, `read_mapping`, `open_regular`, `read_small`, `flush_to_disk`, `hold`, `is_locked`, `raise_if_signalled`, `preserve_env` |
| messages | `pluralize`, `format_bytes`, `duration`, `some`, `text_of`, `describe`, `brief`, `escaped`, `chain`, `shorten`, `TEXT`, `MASK` |
"""  # noqa: E501 - a table

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpox.checkpoint.folders import checkpoints_in, step_of
    from grpox.checkpoint.rng import preserve_random_state
    from grpox.config.inputs import dtype_on
    from grpox.data.checked_messages import CheckedTemplate
    from grpox.data.json_rows import UnreadableData
    from grpox.errors import TEXT, brief, chain, describe, escaped, shorten, text_of
    from grpox.errors.formatting import duration, format_bytes, pluralize, some
    from grpox.errors.redaction import MASK
    from grpox.observing.alarms import alarms_in, describe_alarm
    from grpox.observing.early_stop import describe_early_stop
    from grpox.observing.page.data import Curve, binned, read_samples
    from grpox.observing.page.report import write_comparison
    from grpox.observing.record_files import MetricsLine
    from grpox.policy.adapter_folder import write_adapter
    from grpox.policy.float32_head import has_float32_head
    from grpox.policy.lora.layers import ADAPTER, adapted_layers, base_parameters
    from grpox.policy.models import hub_kernels
    from grpox.policy.rope import rope_choice
    from grpox.policy.weight_stream import (
        base_buffers,
        is_own_memory,
        persistent_buffers,
        stream_adapters,
        stream_base,
        stream_weights,
    )
    from grpox.rollout.rewards.scoring import ROUNDING, weighted_sum
    from grpox.runfile.data_files import look_at
    from grpox.runfile.load import load_run
    from grpox.runfile.lock.model import LOCK_FILE, read_lock
    from grpox.runfile.paths import input_path, model_problems
    from grpox.runfile.recipe_files import recipe_names
    from grpox.runfile.slots import parameter_defaults
    from grpox.runtime.files import atomic_path, open_regular, read_mapping, read_small, write_atomically
    from grpox.runtime.files import sync as flush_to_disk
    from grpox.runtime.launch import world_size
    from grpox.runtime.run_lock import hold, is_locked
    from grpox.runtime.setup import preserve_env
    from grpox.runtime.signals import raise_if_signalled
    from grpox.runtime.upload import upload
    from grpox.training.inputs import decide_longest

__all__ = ["ADAPTER", "adapted_layers", "base_buffers", "base_parameters", "hub_kernels", "is_own_memory"]
__all__ += ["has_float32_head", "persistent_buffers", "preserve_random_state", "world_size"]
__all__ += ["stream_adapters", "stream_base", "stream_weights", "write_adapter"]
__all__ += ["CheckedTemplate", "decide_longest", "rope_choice", "upload"]
__all__ += ["ROUNDING", "weighted_sum"]
__all__ += ["Curve", "MetricsLine", "UnreadableData", "binned", "checkpoints_in"]
__all__ += ["alarms_in", "describe_alarm", "describe_early_stop", "look_at", "read_samples", "step_of"]
__all__ += ["LOCK_FILE", "parameter_defaults", "read_lock"]
__all__ += ["dtype_on", "input_path", "load_run", "model_problems", "recipe_names", "write_comparison"]
__all__ += [
    "atomic_path",
    "flush_to_disk",
    "hold",
    "is_locked",
    "open_regular",
    "preserve_env",
    "raise_if_signalled",
]
__all__ += ["read_mapping", "read_small", "write_atomically"]
__all__ += ["MASK", "TEXT", "brief", "chain", "describe", "escaped", "shorten", "text_of"]
__all__ += ["duration", "format_bytes", "pluralize", "some"]

_HOMES = {
    "grpox.checkpoint.folders": ("checkpoints_in", "step_of"),
    "grpox.checkpoint.rng": ("preserve_random_state",),
    "grpox.config.inputs": ("dtype_on",),
    "grpox.data.checked_messages": ("CheckedTemplate",),
    "grpox.data.json_rows": ("UnreadableData",),
    "grpox.errors": ("TEXT", "brief", "chain", "describe", "escaped", "shorten", "text_of"),
    "grpox.errors.formatting": ("format_bytes", "pluralize", "duration", "some"),
    "grpox.errors.redaction": ("MASK",),
    "grpox.observing.alarms": ("alarms_in", "describe_alarm"),
    "grpox.observing.early_stop": ("describe_early_stop",),
    "grpox.observing.page.data": ("Curve", "binned", "read_samples"),
    "grpox.observing.page.report": ("write_comparison",),
    "grpox.observing.record_files": ("MetricsLine",),
    "grpox.policy.adapter_folder": ("write_adapter",),
    "grpox.policy.float32_head": ("has_float32_head",),
    "grpox.policy.lora.layers": ("ADAPTER", "adapted_layers", "base_parameters"),
    "grpox.policy.models": ("hub_kernels",),
    "grpox.policy.rope": ("rope_choice",),
    "grpox.policy.weight_stream": (
        "base_buffers",
        "is_own_memory",
        "persistent_buffers",
        "stream_adapters",
        "stream_base",
        "stream_weights",
    ),
    "grpox.rollout.rewards.scoring": ("ROUNDING", "weighted_sum"),
    "grpox.runfile.data_files": ("look_at",),
    "grpox.runfile.slots": ("parameter_defaults",),
    "grpox.runfile.paths": ("input_path", "model_problems"),
    "grpox.runfile.load": ("load_run",),
    "grpox.runfile.lock.model": ("LOCK_FILE", "read_lock"),
    "grpox.runfile.recipe_files": ("recipe_names",),
    "grpox.runtime.setup": ("preserve_env",),
    "grpox.runtime.signals": ("raise_if_signalled",),
    "grpox.runtime.upload": ("upload",),
    "grpox.runtime.files": (
        "flush_to_disk",
        "atomic_path",
        "open_regular",
        "read_mapping",
        "read_small",
        "write_atomically",
    ),
    "grpox.runtime.launch": ("world_size",),
    "grpox.runtime.run_lock": ("hold", "is_locked"),
    "grpox.training.inputs": ("decide_longest",),
}
"""Module -> the names that it has."""
_RENAMED = {"flush_to_disk": "sync"}


def __getattr__(name: str) -> Any:
    """Import a name on its first use."""
    import importlib

    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), _RENAMED.get(name, name))
    raise AttributeError(f"module 'grpox.toolkit' has no attribute {name!r}")
