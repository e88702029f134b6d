"""Log-probabilities of a head with an adapter, without storing all logits or the merged weight.

The logits of a few tokens are ``h W^T + (scale * h A^T) B^T``; the inner size of the second product is the
rank. W and B are parameters of two layers. The forward of one layer calls the forward of the other, so ZeRO-3
gathers both before the logits are computed, and again before the backward pass recomputes them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from grpox.policy.logprobs import Wanted, chosen_logprobs
from grpox.policy.lora.layers import ADAPTER


@dataclass(frozen=True)
class HeadInputs:
    """Inputs that the base layer of an adapted head passes on to its adapter."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # W, [V, H]
    bias: Tensor | None  # [V]
    wanted: Wanted


def can_score(head: Any) -> bool:
    """Return True if the base layer of this adapted layer is a plain linear layer."""
    return type(head.base_layer) is nn.Linear and not getattr(head, "fan_in_fan_out", False)


def add_scoring(head: Any) -> None:
    """Make the forward of an adapted head accept `wanted`, like the forward of a plain head."""
    base, down, up = head.base_layer, head.lora_A[ADAPTER], head.lora_B[ADAPTER]
    whole, base_linear, up_linear = head.forward, base.forward, up.forward

    @functools.wraps(whole)
    def forward(input: Tensor, *args: Any, wanted: Wanted | None = None, **options: Any) -> Any:
        if wanted is None:
            return whole(input, *args, **options)
        if head.disable_adapters:
            return base(input, wanted=wanted)
        return base(input, wanted=wanted, low=down(input) * head.scaling[ADAPTER])

    @functools.wraps(base_linear)
    def base_forward(input: Tensor, wanted: Wanted | None = None, low: Tensor | None = None) -> Any:
        if wanted is None:
            return base_linear(input)
        if low is None:
            return chosen_logprobs(input, base.weight, base.bias, wanted)
        return up(low, of_head=HeadInputs(input, base.weight, base.bias, wanted))

    @functools.wraps(up_linear)
    def up_forward(input: Tensor, of_head: HeadInputs | None = None) -> Any:
        if of_head is None:
            return up_linear(input)
        return chosen_logprobs(of_head.hidden, of_head.weight, of_head.bias, of_head.wanted, input, up.weight)

    head.forward, base.forward, up.forward = forward, base_forward, up_forward


def layers_of(head: Any) -> tuple[nn.Module, ...]:
    """List the modules whose forward `add_scoring` replaced."""
    return head, head.base_layer, head.lora_B[ADAPTER]
