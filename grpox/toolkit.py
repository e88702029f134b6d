"""Functions of grpox that plugins may call, beside the contracts; all of it is plugin API.

The built-in plugins use no others. Each name stands once, below, with the module that it comes from. It is
imported when it is first used: importing this module imports nothing heavy.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for generators, and rewards with models
    from grpox.checkpoint.rng import preserve_random_state as preserve_random_state
    from grpox.data.message_probes import CheckedTemplate as CheckedTemplate
    from grpox.policy.adapter_folder import write_adapter as write_adapter
    from grpox.policy.batch import upload as upload
    from grpox.policy.float32_head import has_float32_head as has_float32_head
    from grpox.policy.lora.layers import ADAPTER as ADAPTER
    from grpox.policy.lora.layers import adapted_layers as adapted_layers
    from grpox.policy.lora.layers import base_parameters as base_parameters
    from grpox.policy.models import hub_kernels as hub_kernels
    from grpox.policy.rope import rope_choice as rope_choice
    from grpox.policy.weight_stream import base_buffers as base_buffers
    from grpox.policy.weight_stream import is_own_memory as is_own_memory
    from grpox.policy.weight_stream import persistent_buffers as persistent_buffers
    from grpox.policy.weight_stream import stream_adapters as stream_adapters
    from grpox.policy.weight_stream import stream_base as stream_base
    from grpox.policy.weight_stream import stream_weights as stream_weights
    from grpox.runtime.launch import world_size as world_size

if TYPE_CHECKING:  # for advantages
    from grpox.rollout.rewards.scoring import ROUNDING as ROUNDING
    from grpox.rollout.rewards.scoring import weighted_sum as weighted_sum

if TYPE_CHECKING:  # for trackers
    from grpox.checkpoint.folders import checkpoints_in as checkpoints_in
    from grpox.checkpoint.folders import step_of as step_of
    from grpox.data.json_rows import UnreadableData as UnreadableData
    from grpox.observing.alarms import alarms_in as alarms_in
    from grpox.observing.alarms import describe_alarm as describe_alarm
    from grpox.observing.early_stop import describe_early_stop as describe_early_stop
    from grpox.observing.page.data import Curve as Curve
    from grpox.observing.page.data import binned as binned
    from grpox.observing.page.data import read_samples as read_samples
    from grpox.observing.record_files import MetricsLine as MetricsLine
    from grpox.runfile.data_files import look_at as look_at
    from grpox.runfile.lock.model import LOCK_FILE as LOCK_FILE
    from grpox.runfile.lock.model import read_lock as read_lock
    from grpox.runfile.slots import parameter_defaults as parameter_defaults

if TYPE_CHECKING:  # for commands
    from grpox.config.inputs import dtype_on as dtype_on
    from grpox.observing.page.report import write_comparison as write_comparison
    from grpox.runfile.load import load_run as load_run
    from grpox.runfile.paths import input_path as input_path
    from grpox.runfile.paths import model_problems as model_problems
    from grpox.runfile.recipe_files import recipe_names as recipe_names
    from grpox.training.inputs import decide_longest as decide_longest

if TYPE_CHECKING:  # for files and processes
    from grpox.runtime.files import atomic_path as atomic_path
    from grpox.runtime.files import open_regular as open_regular
    from grpox.runtime.files import read_mapping as read_mapping
    from grpox.runtime.files import read_small as read_small
    from grpox.runtime.files import sync as flush_to_disk
    from grpox.runtime.files import write_atomically as write_atomically
    from grpox.runtime.run_lock import hold as hold
    from grpox.runtime.run_lock import is_locked as is_locked
    from grpox.runtime.setup import preserve_env as preserve_env
    from grpox.runtime.signals import raise_if_signalled as raise_if_signalled

if TYPE_CHECKING:  # for messages
    from grpox.errors import TEXT as TEXT
    from grpox.errors import brief as brief
    from grpox.errors import chain as chain
    from grpox.errors import describe as describe
    from grpox.errors import escaped as escaped
    from grpox.errors import shorten as shorten
    from grpox.errors import text_of as text_of
    from grpox.errors.formatting import duration as duration
    from grpox.errors.formatting import format_bytes as format_bytes
    from grpox.errors.formatting import pluralize as pluralize
    from grpox.errors.formatting import some as some
    from grpox.errors.redaction import MASK as MASK

_HOMES = {
    str(name.asname): (str(node.module), name.name)
    for block in ast.parse(inspect.getsource(sys.modules[__name__])).body
    if isinstance(block, ast.If)
    for node in block.body
    if isinstance(node, ast.ImportFrom)
    for name in node.names
}
"""Name -> its module and its name there, read from the imports above, which only type checkers execute."""
__all__ = ["flush_to_disk"]  # type checkers know the other names by their imports
__all__ += [name for name in _HOMES if name not in __all__]


def __getattr__(name: str) -> Any:
    """Import a name on its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'grpox.toolkit' has no attribute {name!r}")
    module, own_name = _HOMES[name]
    return getattr(importlib.import_module(module), own_name)
