"""Installs a forward pass that returns chosen log-probabilities, if a trial shows that the model supports it.

The modes rely on common properties of causal language models: a body, a linear head on its last hidden state,
and attention that a mask can restrict. A trial on short sequences compares each mode with the model's own
forward pass; a model whose results differ keeps its own forward pass.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from grpox.errors import describe, plain
from grpox.policy.batch import RolloutBatch, Sample, collate
from grpox.policy.logprobs import (
    FULL_LOGITS,
    ForwardMode,
    LogitTransform,
    Wanted,
    chosen_logprobs,
    completion_logprobs,
)
from grpox.policy.lora import head as adapted_head
from grpox.policy.lora.layers import is_adapted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpox.config import TrainConfig

FAR = 1e-3
"""Largest difference between the log-probabilities of two modes, as a fraction of their spread over tokens."""
ROUNDINGS = 16
"""Largest difference in rounding steps, used if the model's precision is so low that they are larger."""


def install_scoring_forward(model: PreTrainedModel, train: TrainConfig) -> ForwardMode:
    """Install the fastest forward mode that the run allows and `model` supports, before the model is sharded.

    Returns:
        the mode; in a trial it gave the log-probabilities of the model's own forward pass.
    """
    if not train.chunked_logprobs or not _add_scoring(model):
        return FULL_LOGITS
    chunked = ForwardMode(chunked=True)
    allowed = [chunked]
    if train.packing and _attends_by_positions(model):
        allowed.insert(0, replace(chunked, packed=True))
    if train.prefix_sharing and _attends_as_masked(model):
        allowed.insert(0, replace(chunked, shared_width=int(model.config.get_text_config().hidden_size)))
    failures: list[str] = []
    for mode in allowed:
        try:
            if _agrees(model, mode):
                return replace(mode, failures=tuple(failures))
        except Exception as error:  # noqa: BLE001 - a model's code may raise anything for unusual inputs
            failures.append(f"the trial of {mode} raised {plain(describe(error))}")
    restore_forward(model)
    return replace(FULL_LOGITS, failures=tuple(failures))


def describe_unused_modes(model: PreTrainedModel, train: TrainConfig, mode: ForwardMode) -> str | None:
    """Name the modes that the run allows and the model does not support, with the errors of their trials."""
    message = _lost(model, train, mode) if train.chunked_logprobs else ""
    return "; ".join(each for each in (message, *mode.failures) if each) or None


def _lost(model: PreTrainedModel, train: TrainConfig, mode: ForwardMode) -> str:
    name = type(model).__name__
    if _attends_by_positions(model):
        installed = {"chunked_logprobs": mode.chunked, "packing": mode.packed, "prefix_sharing": False}
        lost = " and ".join(f"train.{key}" for key, used in installed.items() if getattr(train, key) > used)
        attention = model.config._attn_implementation
        return f"{name} cannot use {lost}: model.init.attn_implementation is {attention}" if lost else ""
    if mode.shared_width or mode.packed or (mode.chunked and not train.prefix_sharing):
        return ""
    if mode.chunked:
        return f"{name} cannot use train.prefix_sharing: it computes each prompt again for each completion"
    return f"{name} can use neither train.chunked_logprobs nor train.prefix_sharing: it computes all logits"


def restore_forward(model: PreTrainedModel) -> None:
    """Restore the forward passes that `install_scoring_forward` replaced."""
    head = model.get_output_embeddings()
    for module in (model, *(adapted_head.layers_of(head) if is_adapted(head) else (head,))):
        if module is not None:
            vars(module).pop("forward", None)


def _add_scoring(model: PreTrainedModel) -> bool:
    """Make the model's forward accept `scored`, the arguments of `logprobs`; return True if it can."""
    head, body = model.get_output_embeddings(), model.base_model
    if body is model:
        return False
    if is_adapted(head) and adapted_head.can_score(head):
        adapted_head.add_scoring(head)
    elif type(head) is nn.Linear:
        score_in_head(head)
    else:
        return False
    score_in_forward(model, body, head, _transform(model))
    return True


def _transform(model: PreTrainedModel) -> LogitTransform:
    """Read the transform of the logits from the model's configuration; a trial checks that it is complete."""
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    return LogitTransform(scale, getattr(config, "final_logit_softcapping", None))


def _attends_as_masked(model: PreTrainedModel) -> bool:
    """Return True if only a mask [R, 1, L, L] decides which positions attend to which, at every length."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    # Where not all layers are windowed, layer_types says which.
    windowed = getattr(config, "sliding_window", None) is not None and not getattr(config, "layer_types", None)
    return (
        model.config._attn_implementation == "sdpa"
        and kinds == {"full_attention"}
        and not windowed
        and isinstance(getattr(config, "hidden_size", None), int)
    )


def _attends_by_positions(model: PreTrainedModel) -> bool:
    """Return True if the attention kernel accepts sequences of any lengths in one row, separated by positions.

    https://huggingface.co/docs/transformers/attention_interface
    """
    return str(model.config._attn_implementation).startswith("flash_attention")


@torch.no_grad()
def _agrees(model: PreTrainedModel, mode: ForwardMode) -> bool:
    """Return True if `mode` gives the log-probabilities and entropies of the model's own forward pass."""
    batch = _trial(model)
    training = model.training
    model.eval()
    try:
        expected = completion_logprobs(model, batch, 0.7)
        actual = completion_logprobs(model, batch, 0.7, mode)
    finally:
        model.train(training)
    mask = batch.token_mask
    far = max(FAR, ROUNDINGS * torch.finfo(model.dtype).eps) * float(expected[0][mask].std())
    # A model with NaN agrees with nothing; the run reports it more clearly.
    return math.isfinite(far) and all(
        torch.allclose(one[mask], other[mask], rtol=0, atol=far)
        for one, other in zip(expected, actual, strict=True)
    )


def _trial(model: PreTrainedModel) -> RolloutBatch:
    """Build two sequences of one prompt, and one sequence of another prompt."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = [(7919 * (place + 1)) % vocabulary for place in range(20)]
    parts = [(tokens[:5], tokens[5:9]), (tokens[:5], tokens[9:12]), (tokens[12:15], tokens[15:20])]
    samples = [
        Sample(tuple(prompt), tuple(completion), np.ones(len(completion), bool), np.zeros(len(completion)), 0.0)
        for prompt, completion in parts
    ]
    return collate(samples, next(model.parameters()).device)


def score_in_forward(model: Any, body: nn.Module, head: nn.Module, transform: LogitTransform) -> None:
    """Make the forward of a whole `model` accept `scored`: (sources, targets, temperature, entropy_gradient).

    Args:
        body: returns the last hidden state.
        head: a head whose forward accepts `wanted`.
    """
    whole = model.forward

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


def score_in_head(head: nn.Linear) -> None:
    """Make the forward of a head accept `wanted` and return log-probabilities and entropies for it."""
    linear = head.forward

    # Within the head's own forward ZeRO-3 has gathered its weight, and gathers it for the backward pass.
    @functools.wraps(linear)
    def head_forward(input: Tensor, wanted: Wanted | None = None) -> Any:
        return linear(input) if wanted is None else chosen_logprobs(input, head.weight, head.bias, wanted)

    head.forward = head_forward  # type: ignore[method-assign]
