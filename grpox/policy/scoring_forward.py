"""Installs a forward pass that returns chosen log-probabilities, if a trial shows that the model supports it.

The modes rely on common properties of causal language models: a body, a linear head on its last hidden state,
and attention that a mask or lengths can restrict. A trial on short sequences, on the device and with the model
sharded as in training, compares each mode with the model's own forward pass; a model whose results differ keeps
its own forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

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
from grpox.policy.logprobs import LogitTransform, Wanted, chosen_logprobs
from grpox.policy.lora.layers import ADAPTER, is_adapted
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
        trial.agrees(FULL_LOGITS)  # a failure is among `failures`
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
    """Make the model's forward accept `scored`, the arguments of `logprobs`; return True if it can."""
    head, body, whole = model.get_output_embeddings(), model.base_model, model.forward
    if body is model:
        return False
    if is_adapted(head) and type(head.base_layer) is nn.Linear:
        _score_in_adapted_head(head)
    elif type(head) in (nn.Linear, Float32Head):
        _score_in_head(head)
    else:
        return False
    # The transform of the logits by the model's configuration; a trial checks that it is complete.
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    transform = LogitTransform(scale, getattr(config, "final_logit_softcapping", None))

    # The signature stays the model's, because transformers' generate reads it.
    @functools.wraps(whole)
    def forward(*args: Any, scored: tuple[Tensor, Tensor, float, bool] | None = None, **inputs: Any) -> Any:
        if scored is None:
            return whole(*args, **inputs)
        sources, targets, temperature, entropy_gradient = scored
        hidden = body(**inputs, use_cache=False).last_hidden_state
        rows = hidden.flatten(0, 1).index_select(0, sources)
        return head(rows, wanted=Wanted(targets, temperature, transform, entropy_gradient))

    model.forward = forward
    return True


def _score_in_head(head: Any) -> None:
    """Make the forward of a head accept `wanted` and return log-probabilities and entropies for it."""
    linear = head.forward

    # Within the head's own forward ZeRO-3 has gathered its weight, and gathers it for the backward pass.
    @functools.wraps(linear)
    def forward(input: Tensor, wanted: Wanted | None = None) -> Any:
        return linear(input) if wanted is None else chosen_logprobs(input, head.weight, head.bias, wanted)

    head.forward = forward


def _score_in_adapted_head(head: Any) -> None:
    """Do as `_score_in_head` for a head with an adapter, without storing the merged weight.

    The logits of a few tokens are ``h W^T + (scale * h A^T) B^T``; the inner size of the second product is the
    rank. W and B are parameters of two layers. The forward of one layer calls the forward of the other, so
    ZeRO-3 gathers both before the logits are computed, and again before the backward pass recomputes them.
    """
    base, down, up = head.base_layer, head.lora_A[ADAPTER], head.lora_B[ADAPTER]
    whole, base_linear, up_linear = head.forward, base.forward, up.forward

    @functools.wraps(whole)
    def forward(input: Tensor, *args: Any, wanted: Wanted | None = None, **options: Any) -> Any:
        if wanted is None:
            return whole(input, *args, **options)
        low = None if head.disable_adapters else down(input) * head.scaling[ADAPTER]
        return base(input, wanted=wanted, low=low)

    @functools.wraps(base_linear)
    def base_forward(input: Tensor, wanted: Wanted | None = None, low: Tensor | None = None) -> Any:
        if wanted is None:
            return base_linear(input)
        score = functools.partial(chosen_logprobs, input, base.weight, base.bias, wanted)
        return score() if low is None else up(low, score=score)

    @functools.wraps(up_linear)
    def up_forward(input: Tensor, score: Callable[..., Any] | None = None) -> Any:
        return up_linear(input) if score is None else score(input, up.weight)

    head.forward, base.forward, up.forward = forward, base_forward, up_forward


def _attends_as_masked(model: PreTrainedModel) -> bool:
    """Return True if only a mask [R, 1, L, L] decides which positions attend to which, at every length."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    # Where not all layers are windowed, layer_types says which.
    windowed = getattr(config, "sliding_window", None) is not None and not getattr(config, "layer_types", None)
    return (
        model.config._attn_implementation in ("sdpa", VARLEN)
        and kinds == {"full_attention"}
        and not windowed
        and isinstance(getattr(config, "hidden_size", None), int)
    )
