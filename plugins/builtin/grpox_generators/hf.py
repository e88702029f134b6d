"""Sampling with the model of transformers, on a full copy of the policy on every rank.

Each sync fills the copy from the ZeRO-3 shards. With `gather_weights: false` there is no copy: generation
gathers every layer of the shards once per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, GenerationConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpox.config import SamplingConfig
from grpox.contracts import Capability, GeneratorContext, Prompt, Rollout, WeightStream
from grpox.errors import ConfigError
from grpox.toolkit import is_own_memory, persistent_buffers, text_of
from grpox_generators.configs import HfConfig
from grpox_generators.continuous import complete
from grpox_generators.decoding import RunningRows, cut, generating, is_in_step, most_of_all_ranks
from grpox_generators.packed_linear import PackedLinear, pack
from grpox_generators.sampling import distribution_config, end_ids, longest_completions, refused_kwargs


class HfGenerator:
    """Generates one group per prompt; the group shares the prompt's keys and values, which are computed
    once."""

    stateless = True

    def __init__(self, config: HfConfig) -> None:
        self.config = config
        self.version = 0
        self._packed: list[PackedLinear] = []

    def start(self, context: GeneratorContext) -> None:
        implementation = self.config.cache_implementation
        if implementation.startswith("offloaded") and context.device.type != "cuda":
            what = "it moves keys and values between an accelerator and a CPU, but this run is on "
            key, allowed = "generator.cache_implementation", "dynamic, static"
            raise ConfigError(f"{what}{context.device}", key, given=implementation, allowed=allowed)
        self.context = context
        if not self.config.gather_weights:
            self.model: Any = context.policy
            return
        self.model = context.build_model().to(context.device).eval().requires_grad_(False)
        # A checkpoint's own defaults, such as a temperature, must not affect sampling.
        self.model.generation_config = GenerationConfig()
        if not self.config.continuous_batching:
            group_heads(self.model)
        self._packed = pack(self.model)
        self._weights = dict(self.model.named_parameters()) | dict(persistent_buffers(self.model))

    @torch.no_grad()
    def sync(self, weights: WeightStream, version: int) -> None:
        """Copy the weights, or use the policy's own memory. If the policy itself generates, the stream is not
        read."""
        if self.config.gather_weights:
            # A subclass that samples while the policy is updated needs a copy, which the update leaves alone.
            samples_ahead = Capability.AHEAD in getattr(self, "provides", ())
            policy = {} if samples_ahead else dict(self.context.policy.named_parameters())
            for name, tensor in weights:
                own = self._weights[name]
                if name in policy and is_own_memory(policy[name], tensor):
                    own.data = tensor  # follows the updates, after each of which a sync comes before sampling
                    continue
                # Loading keeps some buffers in float32, building a model does not.
                own.data = own.to(tensor.dtype).copy_(tensor)
            HfGenerator.sleep(self)  # a subclass may have a sleep of its own
        self.version = version

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> list[Rollout]:
        """Sample every prompt's group; a temperature of 0 decodes greedily."""
        model, config = self.model, self.model.config
        ends = end_ids(sampling, self.context.stop_token_ids, config.get_text_config().vocab_size)
        positions = getattr(config, "max_position_embeddings", None)
        limits = longest_completions(prompts, sampling, positions, "the model")
        devices = [self.context.device] if self.context.device.type == "cuda" else []
        own = nullcontext() if self.config.gather_weights else generating(model)
        with torch.random.fork_rng(devices=devices), own:
            torch.manual_seed(seed)
            if self.config.continuous_batching:
                how, size = distribution_config(sampling, ends), self.config.batch_size
                return list(complete(model, prompts, limits, how, size, seed, self.version))
            return self._decode(prompts, limits, sampling, ends)

    def _decode(
        self, prompts: Sequence[Prompt], limits: Sequence[int], sampling: SamplingConfig, ends: Sequence[int]
    ) -> list[Rollout]:
        """Sample batch after batch."""
        batches, rollouts = cut(prompts, self.config.batch_size), list[Rollout]()
        if is_in_step(self.config, self.context):  # as many on each rank: the missing ones are empty
            batches += [slice(0, 0)] * (most_of_all_ranks(len(batches)) - len(batches))
        try:
            for batch in batches:
                of = prompts[batch], limits[batch], sampling, ends
                rollouts += RunningRows(self.model, self.context, self.config, *of).decode(self.version)
        except ImportError as error:
            what = f"a required library is missing: {text_of(error)}"
            given = self.config.cache_implementation
            raise ConfigError(what, "generator.cache_implementation", given=given) from error
        except ValueError as error:
            if not sampling.generation_kwargs:
                raise
            raise refused_kwargs(sampling, error) from error
        return rollouts

    def sleep(self) -> None:
        """Release the blocks of packed layers, which are made again.

        For models of the sizes that hf suits, moving the copy itself costs more than its memory is worth.
        """
        for layer in self._packed:
            layer.product.release()

    def wake(self) -> None:
        """Do nothing, because layers make their blocks when they need them."""

    def close(self) -> None:
        del self.model
        self._weights, self._packed = {}, []


GROUPED = "grpox_grouped_sdpa"


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' sdpa attention, with the same arguments.

    For a single query [B, H, 1, D], the H / K heads that share one of the K heads of keys [B, K, L, D] are
    computed as positions of one head, because all of them see the same keys.
    """
    heads = key.shape[1]
    shared = query.shape[2] == 1 and query.shape[1] > heads and others.get("position_bias") is None
    if not shared or (attention_mask is not None and attention_mask.shape[1] != 1):
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    rows, _, _, width = query.shape
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, heads, -1, width), key, value, attn_mask=attention_mask, scale=scaling
    )
    return attended.reshape(rows, 1, -1, value.shape[-1]), None


def group_heads(model: Any) -> None:
    """Let a model that only generates use `grouped_attention` in place of transformers' sdpa, and of flash
    kernels.

    For each token, a flash kernel would read from the device in each layer where the padding of its row ends.
    It stays where sdpa computes something else.
    """
    config = model.config.get_text_config()
    is_flash = "flash" in config._attn_implementation and type(model)._supports_sdpa
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    if config._attn_implementation == "sdpa" or (is_flash and not is_capped):
        AttentionInterface.register(GROUPED, grouped_attention)
        AttentionMaskInterface.register(GROUPED, sdpa_mask)
        model.set_attn_implementation(GROUPED)
