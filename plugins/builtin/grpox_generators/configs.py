"""Parameters of the built-in generators."""

from __future__ import annotations

from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from grpox.config import RunConfig, SamplingConfig
from grpox.contracts import GeneratorMemory, InputPath
from grpox.errors import Problem
from grpox_generators import vllm_sampling
from grpox_generators.generation_kwargs import unknown_kwargs


class Parameters(BaseModel):
    """Parameters that refuse unknown names, and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class HfConfig(Parameters):
    """transformers' own generate."""

    batch_size: int = Field(1024, ge=1)
    """Completions sampled together on one rank; fewer need less memory."""
    cache_implementation: Literal["dynamic", "static", "offloaded", "offloaded_static", "quantized"] = "dynamic"
    """Where keys and values are kept: transformers' name. Only dynamic shares a prompt's within its group."""
    gather_weights: bool = True
    """Keep a whole copy of the policy on each rank; false generates through the ZeRO-3 shards, slower, without
    that memory (TRL's ds3_gather_for_generation)."""
    continuous_batching: bool = False
    """Let a new completion take the place of each that ends (transformers' paged attention)."""

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.continuous_batching and not self.gather_weights:
            raise ValueError("continuous_batching needs a copy of the weights: gather_weights must be true")
        if self.continuous_batching and self.cache_implementation != "dynamic":
            raise ValueError(
                "continuous_batching has a cache of its own: cache_implementation "
                f"{self.cache_implementation} cannot go with it"
            )
        return self

    def memory(self, gpu: bool) -> GeneratorMemory:
        """Tell what it holds on a rank."""
        return GeneratorMemory("whole" if self.gather_weights else "shards", together=self.batch_size)

    def check_sampling(self, sampling: SamplingConfig) -> list[Problem]:
        """Find the settings of `sampling` that hf cannot honour with these parameters."""
        problems = unknown_kwargs(sampling)
        if not self.continuous_batching:
            return problems
        # Its logits processors see the last token alone, and its requests end at tokens alone.
        refused = {
            "min_completion_length": sampling.min_completion_length > 0,
            "repetition_penalty": sampling.repetition_penalty != 1,
            "stop": bool(sampling.stop),
            "generation_kwargs": bool(sampling.generation_kwargs),
        }
        return problems + [
            Problem(
                "transformers' continuous batching cannot do this",
                key=f"sampling.{name}",
                given=f"{getattr(sampling, name)} with generator.continuous_batching true",
                allowed=f"generator.continuous_batching false, or sampling without {name}",
            )
            for name, given in refused.items()
            if given
        ]


class VllmParameters(Parameters):
    """The parameters of a generator that samples with vLLM."""

    def check_sampling(self, sampling: SamplingConfig) -> list[Problem]:
        """Find the settings of `sampling` that vLLM cannot honour."""
        return vllm_sampling.refused(sampling)


class VllmColocateConfig(VllmParameters):
    """vLLM in the training process."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """What the engine computes in; default: model.dtype. Another one makes a mismatch for the correction."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Ranks that hold one engine together, each a part of every weight; it divides the number of ranks. 1 as in
    TRL."""
    gpu_memory_utilization: float = Field(0.3, gt=0, le=1)
    """Part of the GPU's memory that the engine may take, weights and cache; 0.3 as in TRL. Unused on CPU."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """Memory for keys and values; default: what gpu_memory_utilization leaves, on CPU 1 GiB."""
    max_model_len: int | None = Field(None, ge=1)
    """Positions of prompt and completion together; default: the model's. Fewer need less memory."""
    sleep: bool = True
    """On CUDA give weights and cache back while the policy is updated (vLLM's sleep level 2)."""
    lora_sync: Literal["merged", "adapter"] = "merged"
    """With model.lora: what a sync brings, all weights with the adapters merged in, or the adapters alone, to
    be computed beside the frozen weights."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Any other argument of vLLM's engine, as it is: ``{max_num_seqs: 64, attention_backend: ...}``."""

    @field_validator("engine")
    @classmethod
    def _not_owned(cls, engine: dict[str, Any]) -> dict[str, Any]:
        for name, ours in ENGINE_OWNED.items():
            if name in engine:
                raise ValueError(f"'{name}' is set by grpox" + (f"; use {ours}" if ours else ""))
        return engine

    def memory(self, gpu: bool) -> GeneratorMemory:
        """Tell what the engine holds on a rank."""
        default = None if gpu else 2**30
        return GeneratorMemory(
            "engine",
            engine="vLLM",
            engine_ranks=self.tensor_parallel_size,
            cache=default if self.kv_cache_gib is None else int(self.kv_cache_gib * 2**30),
            share_key="generator.gpu_memory_utilization",
            cache_key="generator.kv_cache_gib",
        )

    def check_run(self, config: RunConfig) -> list[Problem]:
        """Refuse to bring adapters where the run trains none."""
        if self.lora_sync == "merged" or config.model.lora is not None:
            return []
        what = "there is no adapter to bring: model.lora is null"
        return [Problem(what, "generator.lora_sync", given="adapter", allowed="merged")]


ENGINE_OWNED = {
    "model": "model.path",
    "dtype": "generator.dtype",
    "seed": "train.seed",
    "load_format": "",
    "tokenizer": "",
    "generation_config": "",
    "logprobs_mode": "",
    "enable_sleep_mode": "generator.sleep",
    "max_model_len": "generator.max_model_len",
    "gpu_memory_utilization": "generator.gpu_memory_utilization",
    "kv_cache_memory_bytes": "generator.kv_cache_gib",
    "tensor_parallel_size": "generator.tensor_parallel_size",
    "distributed_executor_backend": "",
    "pipeline_parallel_size": "",
    "data_parallel_size": "",
    "enable_lora": "generator.lora_sync",
    "max_lora_rank": "model.lora.r",
    "max_loras": "",
    "lora_target_modules": "model.lora.target_modules",
}
"""Engine arguments that grpox sets: the key of the run file to use in their place, or none."""


LONGEST_WAIT = 1500.0
"""Seconds: a rank that waits for another gives up after 30 minutes."""


class VllmServerConfig(VllmParameters):
    """vLLM in servers of its own, which `grpox serve` starts."""

    urls: list[str] = Field(["http://127.0.0.1:8000"], min_length=1)
    """The servers. A prompt goes to the one with the least to do."""
    token_file: InputPath | None = None
    """File of the servers' token; default: GRPOX_SERVER_TOKEN, else the one that `grpox serve` makes."""
    start_timeout: float = Field(240.0, ge=0, le=LONGEST_WAIT)
    """Seconds to wait for a server, at the start and when all are lost; 240 as in TRL, at most 1500."""
    connect_timeout: float = Field(10.0, gt=0)
    """Seconds to wait for a connection."""
    read_timeout: float = Field(600.0, gt=0, le=LONGEST_WAIT)
    """Seconds without a word before a server is lost: more than twice the longest completion, at most 1500."""
    retries: int = Field(3, ge=0)
    """Times that a failed request is sent again to the same server, after 0.5, 1, 2, ... seconds."""
    bucket_mib: int = Field(64, ge=1)
    """Weights sent at a time, two buckets under way at most; a larger parameter is one by itself."""

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: list[str]) -> list[str]:
        for url in urls:
            try:
                parts = urlsplit(url)
                well_formed = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            except ValueError:
                well_formed = False
            if not well_formed or parts.query or parts.fragment or parts.username:
                raise ValueError(f"'{url}' is not of the form http://HOST:PORT")
        urls = [url.rstrip("/") for url in urls]
        if len(set(urls)) < len(urls):
            raise ValueError("urls names one server twice")
        return urls

    def memory(self, gpu: bool) -> GeneratorMemory:
        """Tell that it holds nothing on a rank: the servers do."""
        return GeneratorMemory("none")
