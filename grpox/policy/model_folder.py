"""Saves a model to a folder, and checks that loading it again would find every weight with its current shape.

transformers does not write the model's names in memory, but the names of the architecture's first checkpoints,
in which experts are separate. Therefore names are not compared directly. Instead, the files are loaded on the
meta device, which needs no memory and reads no tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from grpox.errors import RunFailed, describe
from grpox.errors.formatting import some
from grpox.policy.rope import fix_config

META = torch.device("meta")


def save_whole(model: PreTrainedModel, folder: Path, state: dict[str, Tensor] | None = None) -> None:
    """Write a model and its configs to `folder`.

    Args:
        state: the weights; default: the weights of `model`.

    Raises:
        RunFailed: loading the folder would lose a part of the model. The written files stay.
    """
    config, model.config = model.config, copy.deepcopy(model.config)
    fix_config(model.config, None)
    try:
        model.save_pretrained(folder, state_dict=state)
    finally:
        model.config = config
    if lost := lost_parts(model, folder):
        raise RunFailed(f"{folder} was written, but does not contain the whole model: {'; '.join(lost)}")


def lost_parts(model: PreTrainedModel, folder: Path) -> list[str]:
    """List the differences between a model loaded from `folder` and `model`, one per line."""
    try:
        empty = built_empty(model)
    except Exception as error:  # noqa: BLE001 - other ranks wait, and the error is reported with the folder
        return [f"no model can be built from its config.json: {describe(error)}"]
    stored = {}  # without data
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                stored[name] = torch.empty(weights.get_slice(name).get_shape(), device=META)
    mapping = get_model_conversion_mapping(empty)
    settings = LoadStateDictConfig(device_map={"": META}, dtype=model.dtype, weight_mapping=mapping)
    info, _ = convert_and_load_state_dict_in_model(empty, stored, settings, None)
    empty.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    empty._adjust_missing_and_unexpected_keys(info)
    shapes = [f"{name} is {list(there)}, not {list(here)}" for name, there, here in info.mismatched_keys]
    lost: dict[str, Collection[str]] = {
        "not in its files": info.missing_keys,
        "unknown to a model of its config.json": info.unexpected_keys,
        "with another shape": shapes,
        "that cannot be converted": info.conversion_errors,
    }
    return [f"weights {what}, {len(names)} in all: {some(names)}" for what, names in lost.items() if names]


def built_empty(model: PreTrainedModel) -> Any:
    """Build the model that the configuration of `model` describes, without data."""
    config = copy.deepcopy(model.config)
    config.dtype = model.dtype  # a save leaves its name there, which some classes cannot be built with
    with META:
        return type(model)(config)


def undescribed(model: PreTrainedModel) -> str:
    """Return the reason why a model could not be loaded from its saved files; empty if it could."""
    try:
        described = _weights_of(built_empty(model))
    except Exception as error:  # noqa: BLE001 - whatever a class of the user's does
        return f"cannot be built from its configuration: {describe(error)}"
    actual = _weights_of(model)
    others = [name for name in actual.keys() | described.keys() if actual.get(name) != described.get(name)]
    what = (
        "it differs from the model that its configuration describes, so it could not be copied or loaded again"
    )
    return f"{what}: other weights, {len(others)} in all: {some(others)}" if others else ""


def _weights_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return the shape of each weight and buffer, tied ones under their first name."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: (each.shape, first.setdefault(id(each), name)) for name, each in state.items()}
