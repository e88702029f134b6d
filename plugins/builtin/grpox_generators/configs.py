"""Parameters of the built-in generators."""

from __future__ import annotations

from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from grpox.config import Parameters, RunConfig, SamplingConfig
from grpox.contracts import GeneratorMemory, InputPath
from grpox.errors import Problem
from grpox_generators.generation_kwargs import ALLOWED, OWNED, VLLM_ALLOWED, VLLM_OWNED, refused_keys

LEAST_WEIGHTS = 2**16
"""Number of weights of the smallest linear layer that hf multiplies in blocks on a CPU."""
HOTTEST = 2.0
"""Highest temperature that vLLM accepts."""


class HfConfig(Parameters):
    """Parameters of hf, which samples with the model of transformers."""

    batch_size: int = Field(1024, ge=1)
    """Number of completions sampled together on one rank; fewer need less memory."""
    cache_implementation: Literal["dynamic", "static", "offloaded", "offloaded_static", "quantized"] = "dynamic"
    """Type of KV cache, by transformers' name. Only dynamic shares a prompt's cache within its group."""
    gather_weights: bool = True
    """True: store a whole copy of the policy on each rank. False: generate through the ZeRO-3 shards, which is
    slower but needs no copy (ds3_gather_for_generation in TRL)."""
    continuous_batching: bool = False
    """Replace each finished completion in the batch by a new one (transformers' paged attention)."""

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.continuous_batching and not self.gather_weights:
            raise ValueError("gather_weights must be true: continuous_batching needs a copy of the weights")
        if self.continuous_batching and self.cache_implementation != "dynamic":
            raise ValueError(
                f"cache_implementation {self.cache_implementation} does not work with continuous_batching, "
                "which has its own cache"
            )
        return self

    def memory(self, gpu: bool) -> GeneratorMemory:
        """Return the memory of the generator on a rank."""
        holds: Literal["whole", "shards"] = "whole" if self.gather_weights else "shards"
        blocks_from = LEAST_WEIGHTS if self.gather_weights and not gpu else 0
        return GeneratorMemory(holds, shares=True, together=self.batch_size, blocks_from=blocks_from)

    def check_sampling(self, sampling: SamplingConfig) -> list[Problem]:
        """Return the settings of `sampling` that hf cannot honour with these parameters."""
        what = "hf samples token by token, and passes no such key to transformers"
        problems = refused_keys(sampling, ALLOWED, OWNED, what)
        if not self.continuous_batching:
            return problems
        # Its logits processors see only the last token, and only tokens end its requests.
        names = ("min_completion_length", "repetition_penalty", "stop", "generation_kwargs")
        return problems + [
            Problem(
                "transformers' continuous batching does not support this",
                key=f"sampling.{name}",
                given=f"{getattr(sampling, name)} with generator.continuous_batching true",
                allowed=f"generator.continuous_batching false, or sampling without {name}",
            )
            for name in names
            if getattr(sampling, name) != getattr(SamplingConfig(), name)
        ]


class VllmParameters(Parameters):
    """Parameters of a generator that samples with vLLM."""

    def check_sampling(self, sampling: SamplingConfig) -> list[Problem]:
        """Return the settings of `sampling` that vLLM cannot honour."""
        what = "grpox passes no such key to vLLM's SamplingParams"
        problems = refused_keys(sampling, VLLM_ALLOWED, VLLM_OWNED, what)
        if sampling.temperature > HOTTEST:
            given, allowed = f"{sampling.temperature:g}", f"at most {HOTTEST:g}"
            key, what = "sampling.temperature", "is higher than vLLM supports"
            problems.append(Problem(what, key, given=given, allowed=allowed))
        return problems


class VllmColocateConfig(VllmParameters):
    """Parameters of vllm-colocate: vLLM in the training process."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the engine; default: model.dtype. A different precision causes a mismatch, which needs a
    correction."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of ranks that share one engine, each with a part of every weight; a divisor of the number of
    ranks. 1 as in TRL."""
    gpu_memory_utilization: float = Field(0.3, gt=0, le=1)
    """Fraction of the GPU's memory for the engine's weights and cache; 0.3 as in TRL. Ignored on a CPU."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """Memory of the KV cache in GiB; default: the rest of gpu_memory_utilization; on a CPU 1 GiB."""
    max_model_len: int | None = Field(None, ge=1)
    """Largest number of tokens in prompt and completion together; default: the model's limit. Fewer need less
    memory."""
    sleep: bool = True
    """True: on CUDA, release weights and cache while the policy is updated (vLLM's sleep level 2)."""
    lora_sync: Literal["merged", "adapter"] = "merged"
    """Content of a weight sync with model.lora: all weights with merged adapters, or only the adapters, which
    vLLM then computes beside the frozen weights."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of vLLM's engine, unchanged: ``{max_num_seqs: 64, attention_backend: ...}``."""

    @field_validator("engine")
    @classmethod
    def _not_owned(cls, engine: dict[str, Any]) -> dict[str, Any]:
        for name, ours in ENGINE_OWNED.items():
            if name in engine:
                raise ValueError(f"'{name}' is set by grpox" + (f"; use {ours}" if ours else ""))
        return engine

    def memory(self, gpu: bool) -> GeneratorMemory:
        """Return the memory of the engine on a rank."""
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
        """Refuse a sync of adapters if the run trains none, or some of parameters."""
        lora = config.model.lora
        if self.lora_sync == "merged" or (lora is not None and not lora.target_parameters):
            return []
        what = "there is no adapter to sync: model.lora is null"
        if lora is not None:
            what = "grpox sends adapters of parameters (model.lora.target_parameters) to vLLM only merged"
        return [Problem(what, "generator.lora_sync", given="adapter", allowed="merged")]


ENGINE_OWNED = {
    "model": "model.path",
    "dtype": "generator.dtype",
    "seed": "train.seed",
    "enable_sleep_mode": "generator.sleep",
    "max_model_len": "generator.max_model_len",
    "gpu_memory_utilization": "generator.gpu_memory_utilization",
    "kv_cache_memory_bytes": "generator.kv_cache_gib",
    "tensor_parallel_size": "generator.tensor_parallel_size",
    "enable_lora": "generator.lora_sync",
    "max_lora_rank": "model.lora.r",
    "lora_target_modules": "model.lora.target_modules",
    **dict.fromkeys(("load_format", "tokenizer", "generation_config", "logprobs_mode", "max_loras"), ""),
    **dict.fromkeys(("distributed_executor_backend", "pipeline_parallel_size", "data_parallel_size"), ""),
}
"""Engine arguments that grpox sets -> key of the run file to use instead, or none."""


LONGEST_WAIT = 1500.0
"""Longest time limit in seconds: a rank that waits for another gives up after 30 minutes."""


class VllmServerConfig(VllmParameters):
    """Parameters of vllm-server: vLLM in separate servers, started by `grpox serve`."""

    urls: list[str] = Field(["http://127.0.0.1:8000"], min_length=1)
    """Addresses of the servers. A prompt goes to the server with the least work."""
    token_file: InputPath | None = None
    """File with the servers' token; default: GRPOX_SERVER_TOKEN, else the file that `grpox serve` creates."""
    start_timeout: float = Field(240.0, ge=0, le=LONGEST_WAIT)
    """Seconds to wait for a server at the start and after all are lost; 240 as in TRL, at most 1500."""
    connect_timeout: float = Field(10.0, gt=0)
    """Seconds to wait for a connection."""
    read_timeout: float = Field(600.0, gt=0, le=LONGEST_WAIT)
    """Seconds of silence after which a server counts as lost; set more than twice the time of the longest
    completion, at most 1500."""
    retries: int = Field(3, ge=0)
    """Number of retries of a failed request on the same server, after 0.5, 1, 2, ... seconds."""
    bucket_mib: int = Field(64, ge=1)
    """MiB of weights per bucket; at most two buckets are in transfer. A larger parameter is its own bucket."""

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
                raise ValueError(f"'{url}' does not have the form http://HOST:PORT")
        urls = [url.rstrip("/") for url in urls]
        if len(set(urls)) < len(urls):
            raise ValueError("urls names one server twice")
        return urls

    def memory(self, gpu: bool) -> GeneratorMemory:
        """Return the memory of a transfer by nccl, as servers with CUDA have it; all else is on the servers."""
        return GeneratorMemory("none", sends=self.bucket_mib * 2**20 if gpu else 0)
