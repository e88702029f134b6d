"""Turns randomness in training mode off, so that sampling and training have the same distribution.

A trial of the whole model then shows if anything random is left (`grpox.policy.forward_trial`).
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RANDOM = re.compile("drop|jitter|nois", re.IGNORECASE)
"""Part of the name of a class, an attribute or a field that is random in training mode."""


def disable_dropout(model: nn.Module) -> None:
    """Set dropout to 0, and let all other modules that may be random compute as in eval mode.

    The rest of the model stays in training mode, because gradient checkpointing needs it. The noise of a router
    is not set to 0, because some routers read its size in eval mode too.
    """
    for module in model.modules():
        fields = vars(module)
        for name, value in fields.items():
            is_dropout = "drop" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd))
            if is_dropout and isinstance(value, float):
                fields[name] = 0.0
        read = {**getattr(fields.get("config"), "__dict__", {}), **fields, type(module).__name__: True}
        # Some modules read the config in their forward pass, and draw for a layer that is never dropped too.
        is_random = any(RANDOM.search(n) and (v not in (None, 0) or "layer" in n) for n, v in read.items())
        if is_random and _enter_eval not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_enter_eval)
            module.register_forward_hook(_leave_eval, always_call=True)


def restore_training(model: nn.Module) -> None:
    """Let all modules compute in training mode again; dropout stays 0."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in (_enter_eval, _leave_eval)]:
                del hooks[key]


def _enter_eval(module: nn.Module, inputs: Any) -> None:
    vars(module).setdefault("_mode_outside", module.training)
    module.training = False


def _leave_eval(module: nn.Module, inputs: Any, output: Any) -> None:
    module.training = vars(module).pop("_mode_outside", module.training)


def random_fields(model: PreTrainedModel) -> list[str]:
    """List the fields of a model's config whose names mean randomness and whose values are not 0."""
    fields = re.findall(r'"(\w+)": ([^\s,]+)', model.config.to_json_string(use_diff=False))
    named = [(name, value) for name, value in fields if RANDOM.search(name)]
    return [f"{name} {value}" for name, value in named if value not in ("0", "0.0", "null", "false")]


def random_states(device: torch.device) -> list[object]:
    """Return the states of all generators that a model may draw from, comparable by ``==``."""
    gpu = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else []
    _, keys, *rest = np.random.get_state(legacy=True)
    return [random.getstate(), np.asarray(keys).tolist(), rest, torch.get_rng_state().tolist(), gpu]
