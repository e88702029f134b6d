"""A head that computes float32 logits from half-precision hidden states and weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpox.errors import ConfigError
from grpox.policy.logprobs import as_factor, multiply
from grpox.policy.lora.layers import is_adapted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "model.cast_lm_head_to_fp32"


class Float32Head(nn.Linear):
    """Linear head whose logits are float32 (float64 for a float64 model), whatever the type of its weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute the logits: [..., H] -> f32[..., V]."""
        if self.weight.dtype in (torch.float32, torch.float64):
            return super().forward(input)
        rows: Tensor = _Float32Linear.apply(input.flatten(0, -2), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return rows.view(*input.shape[:-1], -1)


class _Float32Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        logits = multiply(as_factor(hidden), as_factor(weight).T)
        return logits if bias is None else logits.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients from the gradient of the logits, f32[N, V], as the chunked head does."""
        hidden, weight, bias = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad
        # Rounded to the weight's precision, because a product needs factors of one type.
        by_output = as_factor(gradients[0].to(weight.dtype))
        return (
            multiply(by_output, as_factor(weight)).to(hidden.dtype) if needs_hidden else None,
            multiply(by_output.T, as_factor(hidden)).to(weight.dtype) if needs_weight else None,
            gradients[0].sum(dim=0).to(bias.dtype) if needs_bias else None,
        )


def cast_head(model: PreTrainedModel) -> None:
    """Make the logits of `model` float32, also when all of them are computed; weights keep their type.

    Raises:
        ConfigError: the head is not a plain linear layer, or has an adapter.
    """
    head: Any = model.get_output_embeddings()
    if is_adapted(head):
        what, allowed = "the head has an adapter, whose products stay in model.dtype", "false, or another layer"
        raise ConfigError(
            f"{what}: leave it out of model.lora.target_modules", KEY, given="true", allowed=allowed
        )
    if type(head) not in (nn.Linear, Float32Head):
        what = f"the head of {type(model).__name__} is a {type(head).__name__}, not a plain linear layer"
        raise ConfigError(what, KEY, given="true", allowed="false")
    head.__class__ = Float32Head


def has_float32_head(model: PreTrainedModel) -> bool:
    """Return True if the logits of `model` are float32 by `cast_head`."""
    return isinstance(model.get_output_embeddings(), Float32Head)


def restore_head(model: PreTrainedModel) -> None:
    """Make the head the plain linear layer that it was before `cast_head`."""
    if has_float32_head(model):
        model.get_output_embeddings().__class__ = nn.Linear
