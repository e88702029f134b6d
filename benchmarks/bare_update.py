"""The policy update written out, without a framework: on DeepSpeed ZeRO-3, and on plain PyTorch.

What grpox is measured against. The same padded micro-batches, the same loss, nothing else: no metrics, no
checks, no entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from grpox.config import RunConfig
from grpox.policy.batch import PackedBatch
from grpox.policy.deepspeed_config import deepspeed_config
from grpox.policy.deepspeed_import import deepspeed
from grpox.policy.optimizers import AdamW
from grpox.runtime.world import World

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def plain_loss(
    model: Callable[..., Any], batch: PackedBatch, tokens: int, temperature: float, all_logits: bool = False
) -> Tensor:
    """A micro-batch's share of the dapo loss, by a log-softmax over logits of the vocabulary.

    Args:
        tokens: completion tokens of the step, over all ranks.
        all_logits: compute those of the prompts' positions too, as a forward pass does if nothing is said.
    """
    length = batch.token_mask.shape[1]
    logits = model(
        **batch.model_inputs(),
        use_cache=False,
        logits_to_keep=0 if all_logits else length + 1,
    ).logits[:, -length - 1 : -1]
    every = torch.log_softmax(logits.float() / temperature, dim=-1)  # f32[B, T, V]
    logprobs = every.gather(-1, batch.input_ids[:, -length:].unsqueeze(-1)).squeeze(-1)
    ratio, advantages = (logprobs - logprobs.detach()).exp(), batch.advantages.unsqueeze(1)
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    return (loss * batch.token_mask).sum() / tokens


class BareZero3:
    """A loop on DeepSpeed ZeRO-3, with the settings that grpox gives it."""

    def __init__(self, model: PreTrainedModel, config: RunConfig, world: World) -> None:
        self.world, self.temperature = world, config.sampling.temperature
        model.train()
        optimizer = AdamW(config.train).build(model.parameters(), config.train.learning_rate)
        settings = deepspeed_config(config, world.size)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(self, batches: Sequence[PackedBatch], tokens: int) -> float:
        """One optimizer step; returns the gradient's norm."""
        for place, batch in enumerate(batches, start=1):
            self.engine.set_gradient_accumulation_boundary(place == len(batches))
            loss = plain_loss(self.engine, batch, tokens, self.temperature)
            self.engine.backward(loss * self.world.size, scale_wrt_gas=False)
        self.engine.step()
        return float(self.engine.get_global_grad_norm())


class PlainTorch:
    """A loop on PyTorch alone, with DistributedDataParallel where there are several ranks."""

    def __init__(self, model: PreTrainedModel, config: RunConfig, world: World) -> None:
        self.world, self.temperature = world, config.sampling.temperature
        self.max_grad_norm = config.train.max_grad_norm
        self.model: Any = model.to(world.device).train()
        self.optimizer = AdamW(config.train).build(model.parameters(), config.train.learning_rate)
        if world.size > 1:
            self.model = DistributedDataParallel(self.model)

    def step(self, batches: Sequence[PackedBatch], tokens: int) -> float:
        """One optimizer step; returns the gradient's norm."""
        for place, batch in enumerate(batches, start=1):
            waits = self.world.size > 1 and place < len(batches)
            with self.model.no_sync() if waits else nullcontext():
                loss = plain_loss(self.model, batch, tokens, self.temperature)
                (loss * self.world.size).backward()  # type: ignore[no-untyped-call]
        norm = clip_grad_norm_(self.model.parameters(), self.max_grad_norm or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)
