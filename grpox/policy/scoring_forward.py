"""Installs a forward pass that returns chosen log-probabilities, if a trial shows that the model supports it.

The modes rely on common properties of causal language models: a body, a linear head on its last hidden state,
and attention that a mask or lengths can restrict. A trial on short sequences, on the device and with the model
sharded as in training, compares each mode with the model's own forward pass; a model whose results differ keeps
its own forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpox.policy.attention import (
    VARLEN,
    accept_placeholder,
    layers_beyond_lengths,
    prefers_varlen,
    set_attention,
    shares_by_default,
    takes_lengths,
)
from grpox.policy.batch import FULL_LOGITS, ForwardMode
from grpox.policy.float32_head import Float32Head
from grpox.policy.forward_trial import ForwardTrial
from grpox.policy.logprobs import LogitTransform, score_in_adapted_head, score_in_head, score_in_model
from grpox.policy.lora.layers import is_adapted
from grpox.runtime.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpox.config import TrainConfig


def install_scoring_forward(
    model: PreTrainedModel,
    train: TrainConfig,
    run: Callable[..., Any] | None = None,
    world: World | None = None,
    chooses_attention: bool = False,
    longest: int | None = None,
) -> ForwardMode:
    """Install the fastest forward mode that the run allows and `model` supports; a collective.

    Args:
        run: runs the forward pass of `model`, which may be sharded; default: `model`.
        world: the ranks, all of which take part; default: this process alone.
        chooses_attention: True if the run file names no attention, so a faster one may replace the default.
        longest: most tokens of a sequence that the run may have; default: the model's positions.

    Returns:
        the mode; in a trial on every rank it gave the log-probabilities of the model's own forward pass.

    Raises:
        ConfigError: the model is random in training mode.
    """
    world = world or World(0, 1, next(model.parameters()).device)
    trial = ForwardTrial(model, run or model, world, longest)
    trial.check_repeats()
    if train.chunked_logprobs and trial.is_possible and _add_scoring(model):
        default = str(model.config._attn_implementation)
        if chooses_attention and prefers_varlen(model, world.device):
            if trial.accepts_varlen() and (mode := _first_that_agrees(trial, model, train)):
                return mode
            set_attention(model, default)
        if mode := _first_that_agrees(trial, model, train):
            return mode
        restore_forward(model)
    if trial.is_possible:
        trial.agrees(FULL_LOGITS)  # adds a failure to `failures`
    return replace(FULL_LOGITS, failures=tuple(trial.failures))


def _first_that_agrees(trial: ForwardTrial, model: PreTrainedModel, train: TrainConfig) -> ForwardMode | None:
    """Try the modes that the run and the model's attention allow, the fastest first."""
    by_lengths = takes_lengths(model) and not layers_beyond_lengths(model)
    if by_lengths and model.config._attn_implementation != VARLEN:
        accept_placeholder(model.config._attn_implementation)
    chunked = ForwardMode(chunked=True, by_lengths=by_lengths)
    allowed = [chunked]
    if train.packing and by_lengths:
        allowed.insert(0, replace(chunked, packed=True))
    if _may_share(model, train, trial.world.device) and _attends_as_masked(model):
        allowed.insert(0, replace(chunked, shared_width=int(model.config.get_text_config().hidden_size)))
    for mode in allowed:
        if trial.agrees(mode):
            return replace(mode, failures=tuple(trial.failures))
    return None


def _may_share(model: PreTrainedModel, train: TrainConfig, device: torch.device) -> bool:
    """Return True if the run allows shared prompts; ``auto`` allows them where they are known to be faster."""
    return shares_by_default(model, device) if train.prefix_sharing == "auto" else train.prefix_sharing


def describe_unused_modes(
    model: PreTrainedModel, train: TrainConfig, mode: ForwardMode, device: torch.device | None = None
) -> str | None:
    """Name the modes that the run allows and the model does not support, with the reasons from their trials.

    Args:
        device: where the model runs; default: where its parameters are.
    """
    shares = _may_share(model, train, device or next(model.parameters()).device)
    allowed = {
        "chunked_logprobs": (True, mode.chunked),
        "packing": (train.packing and takes_lengths(model) and not mode.shared_width, mode.packed),
        "prefix_sharing": (shares, bool(mode.shared_width)),
    }
    lost = " and ".join(f"train.{key}" for key, (wanted, used) in allowed.items() if wanted > used)
    attention = f"model.init.attn_implementation is {model.config._attn_implementation}"
    attention += "".join(f", with layers of type {kind}" for kind in layers_beyond_lengths(model))
    reasons = (
        [f"{type(model).__name__} cannot use {lost}: {attention}"] if lost and train.chunked_logprobs else []
    )
    return "; ".join([*reasons, *mode.failures]) or None


def restore_forward(model: PreTrainedModel) -> None:
    """Restore the forward passes that `install_scoring_forward` replaced."""
    head = model.get_output_embeddings()
    for module in (model, *(() if head is None else head.modules())):
        vars(module).pop("forward", None)


def _add_scoring(model: Any) -> bool:
    """Make the model's forward accept `scored`, see `logprobs.score_in_model`; return True if it can."""
    head = model.get_output_embeddings()
    if model.base_model is model:
        return False
    if is_adapted(head) and type(head.base_layer) is nn.Linear:
        score_in_adapted_head(head)
    elif type(head) in (nn.Linear, Float32Head):
        score_in_head(head)
    else:
        return False
    # The transform of the logits by the model's configuration; a trial checks that it is complete.
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    score_in_model(model, LogitTransform(scale, getattr(config, "final_logit_softcapping", None)))
    return True


def _attends_as_masked(model: PreTrainedModel) -> bool:
    """Return True if only a mask [R, 1, L, L] decides which positions attend to which, at every length."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    # If only some layers are windowed, layer_types lists them.
    windowed = getattr(config, "sliding_window", None) is not None and not getattr(config, "layer_types", None)
    return (
        model.config._attn_implementation in ("sdpa", VARLEN)
        and kinds == {"full_attention"}
        and not windowed
        and isinstance(getattr(config, "hidden_size", None), int)
    )
