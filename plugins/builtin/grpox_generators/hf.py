"""Sampling with transformers' generate, on a whole copy of the policy kept on every rank.

The copy is filled from the ZeRO-3 shards at each sync. Generating through the sharded model itself would
gather every layer once per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from grpox.config import SamplingConfig
from grpox.contracts import GeneratorContext, Prompt, Rollout, WeightStream
from grpox.errors import RunFailed
from grpox_generators.configs import HfConfig
from grpox_generators.sampling import SampledLogprobs, warpers


class HfGenerator:
    """Generates one group per prompt, the prompt's keys and values computed once and shared by its group."""

    def __init__(self, config: HfConfig) -> None:
        self.config = config
        self.version = 0

    def start(self, context: GeneratorContext) -> None:
        self.context = context
        self.model: Any = context.build_model().to(context.device).eval().requires_grad_(False)
        # Defaults shipped with a checkpoint (a temperature, say) must not leak into sampling.
        self.model.generation_config = GenerationConfig()
        self._weights = dict(self.model.named_parameters())

    @torch.no_grad()
    def sync(self, weights: WeightStream, version: int) -> None:
        for name, tensor in weights:
            self._weights[name].copy_(tensor)
        self.version = version

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterable[Rollout]:
        """Sample every prompt's group; a temperature of 0 decodes greedily."""
        devices = [self.context.device] if self.context.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            for batch in _batches(prompts, self.config.batch_size):
                yield from self._generate_batch(batch, sampling)

    def sleep(self) -> None:
        """The copy stays: moving it away and back would cost more than it frees on the sizes hf is for."""

    def wake(self) -> None:
        """Nothing to bring back, as nothing was given away."""

    def close(self) -> None:
        del self.model, self._weights

    def _generate_batch(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> Iterator[Rollout]:
        input_ids, attention_mask = self._pad(prompts)
        self._check_length(input_ids.shape[1], sampling.max_completion_length)
        repeats = torch.tensor([prompt.num_samples for prompt in prompts], device=input_ids.device)
        cache = self._prefill(input_ids, attention_mask, repeats)
        input_ids = input_ids.repeat_interleave(repeats, dim=0)
        attention_mask = attention_mask.repeat_interleave(repeats, dim=0)

        recorder = SampledLogprobs(prompt_length=input_ids.shape[1])
        try:
            sequences = self.model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                past_key_values=cache,
                logits_processor=LogitsProcessorList([*warpers(sampling), recorder]),
                generation_config=self._generation_config(sampling),
                synced_gpus=False,
            )
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            raise RunFailed(
                f"the policy of version {self.version} gives no finite probabilities: an update broke it "
                "(a smaller train.learning_rate may help)"
            ) from error
        completions = sequences[:, input_ids.shape[1] :]
        logprobs = recorder.finish(sequences)
        rows = iter(zip(completions.tolist(), logprobs.tolist(), strict=True))
        for prompt in prompts:
            for sample, (token_ids, row_logprobs) in enumerate(islice(rows, prompt.num_samples)):
                yield self._rollout(prompt, sample, token_ids, row_logprobs)

    def _prefill(self, input_ids: Tensor, attention_mask: Tensor, repeats: Tensor) -> Any:
        """Keys and values of all prompt tokens but the last, computed once a prompt, repeated for its group."""
        if input_ids.shape[1] == 1:
            return None
        mask = attention_mask[:, :-1]
        output = self.model(
            input_ids=input_ids[:, :-1],
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        index = torch.arange(len(repeats), device=repeats.device).repeat_interleave(repeats)
        cache.batch_select_indices(index)
        return cache

    def _pad(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
        length = max(len(prompt.token_ids) for prompt in prompts)
        input_ids = torch.full((len(prompts), length), self.context.tokenizer.pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, length - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            attention_mask[row, length - len(prompt.token_ids) :] = 1
        return input_ids.to(self.context.device), attention_mask.to(self.context.device)

    def _check_length(self, prompt_length: int, max_completion_length: int) -> None:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit is not None and prompt_length + max_completion_length > limit:
            raise RunFailed(
                f"a prompt of {prompt_length} tokens and sampling.max_completion_length "
                f"{max_completion_length} are more than the model's {limit} positions"
            )

    def _generation_config(self, sampling: SamplingConfig) -> GenerationConfig:
        # Temperature and the rest are applied by our own processors, so that the last of them, the recorder,
        # sees the very distribution that is sampled from.
        sampled = sampling.temperature > 0
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {}
        return GenerationConfig(
            **neutral,
            do_sample=sampled,
            max_new_tokens=sampling.max_completion_length,
            eos_token_id=list(self.context.stop_token_ids),
            pad_token_id=self.context.tokenizer.pad_token_id,
            use_cache=True,
        )

    def _rollout(self, prompt: Prompt, sample: int, token_ids: list[int], logprobs: list[float]) -> Rollout:
        stops = (place for place, token in enumerate(token_ids) if token in self.context.stop_token_ids)
        stop = next(stops, None)
        length = len(token_ids) if stop is None else stop + 1
        return Rollout(
            group_id=prompt.group_id,
            sample=sample,
            prompt_ids=prompt.token_ids,
            completion_ids=tuple(token_ids[:length]),
            finish_reason="length" if stop is None else "stop",
            policy_version=self.version,
            sampler_logprobs=tuple(logprobs[:length]),
        )


def _batches(prompts: Sequence[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
    """Cut into runs of at most `batch_size` completions, whole groups; a larger group is a run of its own."""
    batch: list[Prompt] = []
    size = 0
    for prompt in prompts:
        if batch and size + prompt.num_samples > batch_size:
            yield batch
            batch, size = [], 0
        batch.append(prompt)
        size += prompt.num_samples
    if batch:
        yield batch
