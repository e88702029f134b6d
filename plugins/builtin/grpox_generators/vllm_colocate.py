"""Sampling with vLLM in the training process: one engine on each rank, sharing the rank's device.

The engine starts without weights (`load_format: dummy`): the first sync brings the policy's, as do later ones.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from grpox.config import SamplingConfig
from grpox.contracts import GeneratorContext, Prompt, Rollout, WeightStream
from grpox.errors import ConfigError, Problem, RunFailed
from grpox_generators.configs import VllmColocateConfig
from grpox_generators.limits import check_length, end_ids
from grpox_generators.vllm_sampling import request_params

ENVIRONMENT = {
    # The engine's core in this process: there its weights can be set without copying them to another.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Its warnings at each sync are about buffers that hold no weights.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # Its CPU build would bind every rank's threads to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Set before vLLM is imported, where the user has not."""


class VllmColocateGenerator:
    """One request per prompt for its whole group, so that the prompt is computed once."""

    def __init__(self, config: VllmColocateConfig) -> None:
        self.config = config
        self.version = 0

    def start(self, context: GeneratorContext) -> None:
        """Start the engine; after DeepSpeed, since vLLM would otherwise make a process group of its own."""
        self.context = context
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._sleeps = self.config.sleep and context.device.type == "cuda"
        policy = context.policy.config.get_text_config()
        self._tied = bool(getattr(policy, "tie_word_embeddings", False))
        self._vocabulary = policy.vocab_size
        with _own_random_numbers(), tempfile.TemporaryDirectory() as folder:
            # Without the weights: a hub id, a folder and an object given in Python all start alike.
            context.policy.config.save_pretrained(folder)
            context.tokenizer.save_pretrained(folder)
            self._engine = self._start_engine(folder)

    def sync(self, weights: WeightStream, version: int) -> None:
        """Take the weights bucket by bucket, as they are gathered."""
        if self._sleeps:
            self._engine.wake_up(tags=["weights"])
        with _own_random_numbers():
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": self._named(weights)})
        for _ in weights:  # a collective: whatever the engine left must be gathered on every rank
            pass
        if not self._engine.reset_prefix_cache():
            raise RunFailed("vLLM kept keys and values of the weights before: its prefix cache was in use")
        self.version = version

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterable[Rollout]:
        """Sample every prompt's group; a temperature of 0 decodes greedily."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError

        if not prompts:
            return
        ends = end_ids(sampling, self.context.stop_token_ids, self._vocabulary)
        # vLLM would cut a completion off at its context without a word.
        limit = self._engine.llm_engine.model_config.max_model_len
        check_length(prompts, sampling, limit, "vLLM's engine (generator.max_model_len)")
        requests = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts]
        try:
            params = [
                SamplingParams(
                    **_typed(request_params(sampling, ends, prompt.num_samples, _seed(seed, prompt.group_id)))
                )
                for prompt in prompts
            ]
            with _own_random_numbers():
                outputs = self._engine.generate(requests, params, use_tqdm=False)
        except VLLMValidationError as error:
            what = f"vLLM does not take these settings: {' '.join(str(error).split())}"
            raise ConfigError(Problem(what, "sampling", given=str(sampling.generation_kwargs))) from error
        for prompt, output in zip(prompts, outputs, strict=True):
            for completion in sorted(output.outputs, key=lambda completion: completion.index):
                yield self._rollout(prompt, completion)

    def sleep(self) -> None:
        """On CUDA give weights and cache back to the update; the next sync brings the weights anew."""
        if self._sleeps:
            self._engine.sleep(level=2)

    def wake(self) -> None:
        """On CUDA take memory again: for the cache now, for the weights at the sync before."""
        if self._sleeps:
            self._engine.wake_up(tags=["kv_cache"])

    def close(self) -> None:
        """Free what the engine holds, but not as it would itself: that destroys the run's process group."""
        client = self._engine.llm_engine.engine_core
        client._finalizer.detach()
        client.engine_core.model_executor.shutdown()
        del self._engine

    def _start_engine(self, folder: str) -> Any:
        from vllm import LLM

        own: dict[str, Any] = {
            "model": folder,
            "load_format": "dummy",
            "dtype": str(self.context.policy.dtype).removeprefix("torch."),
            "seed": self.context.seed + self.context.rank,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "enforce_eager": self.context.device.type == "cpu",
            "enable_sleep_mode": self._sleeps,
            "max_model_len": self.config.max_model_len,
            "gpu_memory_utilization": self.config.gpu_memory_utilization,
        }
        gib = self.config.kv_cache_gib
        if gib is None and self.context.device.type == "cpu":
            gib = 1.0
        if gib is not None:
            own["kv_cache_memory_bytes"] = int(gib * 2**30)
        try:
            return LLM(**own | dict(self.config.engine))
        except (TypeError, ValueError) as error:
            what = f"vLLM does not start: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
            raise ConfigError(Problem(what, "generator.engine", given=str(self.config.engine))) from error

    def _named(self, weights: WeightStream) -> Iterator[tuple[str, torch.Tensor]]:
        """Tied embeddings under both names: the CPU build keeps a packed head of its own."""
        for name, tensor in weights:
            yield name, tensor
            if self._tied and name.endswith("embed_tokens.weight"):
                yield "lm_head.weight", tensor

    def _rollout(self, prompt: Prompt, completion: Any) -> Rollout:
        token_ids = tuple(completion.token_ids)
        chosen = zip(token_ids, completion.logprobs, strict=True)
        return Rollout(
            group_id=prompt.group_id,
            sample=completion.index,
            prompt_ids=prompt.token_ids,
            completion_ids=token_ids,
            finish_reason="stop" if completion.finish_reason == "stop" else "length",
            policy_version=self.version,
            sampler_logprobs=tuple(position[token].logprob for token, position in chosen),
        )


def _typed(params: dict[str, Any]) -> dict[str, Any]:
    """`structured_outputs` is a mapping in a run file and an object in vLLM."""
    if "structured_outputs" in params:
        from vllm.sampling_params import StructuredOutputsParams

        params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
    return params


def _seed(seed: int, group_id: int) -> int:
    """A seed of its own for each request, whatever else the batch holds."""
    return int(np.random.SeedSequence([seed, group_id]).generate_state(1)[0])


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """vLLM reseeds and draws from the global generators, which are the trainer's."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
