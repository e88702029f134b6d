"""Sampling with the model of transformers, on a full copy of the policy on every rank.

Each sync fills the copy from the ZeRO-3 shards. With `gather_weights: false` there is no copy: generation
gathers every layer of the shards once per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpox.config import SamplingConfig
from grpox.contracts import Capability, GeneratorContext, Prompt, Rollout, WeightStream
from grpox.errors import ConfigError, RunFailed
from grpox.toolkit import is_own_memory, persistent_buffers, text_of
from grpox_generators.configs import HfConfig
from grpox_generators.continuous import complete
from grpox_generators.decoding import (
    Batch,
    PaddedPrompts,
    cut,
    generating,
    most_of_all_ranks,
    pad_prompts,
)
from grpox_generators.limits import build_rollout, check_length, end_ids, longest_completion
from grpox_generators.packed_linear import PackedLinear, pack, release
from grpox_generators.sampling import (
    Distribution,
    Draw,
    NoProbabilities,
    StopTexts,
    distribution_config,
    keeps_rows,
    own_uniform,
    refused_kwargs,
    runtime_kwargs,
)


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
        self.in_step = not self.config.gather_weights and context.world_size > 1
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
            if self._packed:
                release(self._packed)
        self.version = version

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterable[Rollout]:
        """Sample every prompt's group; a temperature of 0 decodes greedily."""
        vocabulary = self.model.config.get_text_config().vocab_size
        ends = end_ids(sampling, self.context.stop_token_ids, vocabulary)
        limit = getattr(self.model.config, "max_position_embeddings", None)
        check_length(prompts, sampling, limit, "the model")
        devices = [self.context.device] if self.context.device.type == "cuda" else []
        own = nullcontext() if self.config.gather_weights else generating(self.model)
        with torch.random.fork_rng(devices=devices), own:
            torch.manual_seed(seed)
            if self.config.continuous_batching:
                yield from self._generate_continuously(prompts, sampling, ends, seed)
                return
            for batch in self._batches(prompts):
                yield from self._generate_batch(batch, sampling, ends)

    def sleep(self) -> None:
        """Release the blocks of packed layers, which are made again.

        For models of the sizes that hf suits, moving the copy itself costs more than its memory is worth.
        """
        if self._packed:
            release(self._packed)

    def wake(self) -> None:
        """Do nothing, because layers make their blocks when they need them."""

    def close(self) -> None:
        del self.model
        self._weights, self._packed = {}, []

    def _batches(self, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        """Return this rank's batches. If ranks generate in step, empty batches fill up to the largest number of
        a rank."""
        batches = list(cut(prompts, self.config.batch_size))
        idle = most_of_all_ranks(len(batches)) - len(batches) if self.in_step else 0
        return batches + [[]] * idle

    def _generate_batch(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig, end_ids: Sequence[int]
    ) -> Iterator[Rollout]:
        pad = self.context.tokenizer.pad_token_id
        padded = pad_prompts(prompts or [Prompt(-1, (pad,), 1)], pad, self.context.device)
        rows = padded.group_rows
        count, columns = len(rows), padded.input_ids.shape[1]
        limits = [longest_completion(prompt, sampling) for prompt in prompts] or [1]
        length = most_of_all_ranks(max(limits)) if self.in_step else max(limits)
        of_rows = torch.tensor(limits, device=self.context.device)[rows]
        prepared = padded.input_ids[rows], padded.lengths[rows], of_rows
        distribution = Distribution(self.model, sampling, end_ids, *prepared)
        greedy = sampling.temperature == 0
        uniform = own_uniform(prompts, self.context.device)
        draw = Draw(count, length, greedy, self.context.device, uniform)
        minimum = sampling.min_completion_length
        stops = StopTexts(sampling.stop, self.context.tokenizer, count, columns, minimum)
        if not prompts:  # the row of a rank without any, which only follows the others' forwards
            stops.ends = [0]
        own = of_rows if min(limits) < length else None
        sequences = self._run(Batch(padded, length, end_ids, distribution, draw, stops, own), sampling)
        completions, logprobs = sequences[:, columns:].tolist(), draw.logprobs.tolist()
        sampled = iter(zip(completions, logprobs, stops.ends, strict=True))
        for prompt in prompts:
            for sample, (token_ids, row_logprobs, end) in enumerate(islice(sampled, prompt.num_samples)):
                most = longest_completion(prompt, sampling)
                yield self._rollout(prompt, sample, token_ids[:most], row_logprobs, end_ids, end)

    def _run(self, batch: Batch, sampling: SamplingConfig) -> Tensor:
        """Return the sequences i64[N, P + T]."""
        try:
            if self.config.cache_implementation != "dynamic":
                return self._run_whole(batch, sampling)
            leave = not self.in_step and not keeps_rows(sampling)
            return batch.decode(self.model, self._prefill(batch.prompts), leave, self.in_step)
        except NoProbabilities as error:
            reason = "an update broke it (a smaller train.learning_rate may help)"
            if sampling.generation_kwargs:
                reason += ", or sampling.generation_kwargs forbids every token"
            what = f"the policy of version {self.version} gives NaN or infinite probabilities: {reason}"
            raise RunFailed(what) from error
        except ImportError as error:
            what = f"a required library is missing: {text_of(error)}"
            given = self.config.cache_implementation
            raise ConfigError(what, "generator.cache_implementation", given=given) from error
        except ValueError as error:
            if not sampling.generation_kwargs:
                raise
            raise refused_kwargs(sampling, error) from error

    def _prefill(self, padded: PaddedPrompts) -> Any:
        """Compute the keys and values of all prompt tokens but the last, once a prompt."""
        mask = padded.attention_mask[:, :-1]
        return self.model(
            input_ids=padded.input_ids[:, :-1],
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        ).past_key_values

    def _run_whole(self, batch: Batch, sampling: SamplingConfig) -> Tensor:
        """Sample by transformers' generate, which makes caches of the other types; no row leaves."""
        rows = batch.prompts.group_rows
        sequences: Tensor = self.model.generate(
            input_ids=batch.prompts.input_ids[rows],
            attention_mask=batch.prompts.attention_mask[rows],
            logits_processor=LogitsProcessorList([batch.distribution, batch.draw]),
            stopping_criteria=StoppingCriteriaList([batch.stop]),
            generation_config=self._generation_config(sampling, batch.end_ids, batch.length),
            synced_gpus=self.in_step,
        )
        return sequences

    def _generate_continuously(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig, end_ids: Sequence[int], seed: int
    ) -> Iterator[Rollout]:
        config = distribution_config(sampling, end_ids)
        for prompt, sample, token_ids, logprobs in complete(
            self.model, prompts, sampling, config, self.config.batch_size, seed
        ):
            yield self._rollout(prompt, sample, token_ids, logprobs, end_ids, None)

    def _generation_config(
        self, sampling: SamplingConfig, end_ids: Sequence[int], length: int
    ) -> GenerationConfig:
        # Temperature and the rest are applied by our own processors, of which the last draws the token and
        # raises its score above all others.
        settings = {"disable_compile": not self.config.gather_weights, **runtime_kwargs(sampling)}
        return GenerationConfig(
            **settings,
            do_sample=False,
            max_new_tokens=length,
            eos_token_id=list(end_ids),
            pad_token_id=self.context.tokenizer.pad_token_id,
            use_cache=True,
            cache_implementation=self.config.cache_implementation,
        )

    def _rollout(
        self,
        prompt: Prompt,
        sample: int,
        token_ids: list[int],
        logprobs: list[float],
        end_ids: Sequence[int],
        stop: int | None,
    ) -> Rollout:
        """Build the rollout of a completion up to its end.

        Its end is the first ending token, or the token number `stop` that completed a stop text.
        """
        ends = [place + 1 for place, token in enumerate(token_ids) if token in end_ids][:1]
        ends += [stop] if stop is not None and stop <= len(token_ids) else []
        length = min(ends, default=len(token_ids))
        reason = "stop" if ends else "length"
        return build_rollout(prompt, sample, token_ids[:length], logprobs[:length], reason, self.version)


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
