"""Sampling with vLLM in the training process: one engine per rank, or per group of ranks, on their devices.

The engine starts without weights (`load_format: dummy`); each sync brings the policy's. On CUDA the engine
sleeps during the update and drops its weights; it gets them again when it wakes.

With tensor parallelism, `size` consecutive ranks share one engine. Every rank runs its own scheduler; the
schedulers stay in step because all get the same requests in the same order. Source: vLLM's
`ExecutorWithExternalLauncher`, as TRL uses it.
"""

from __future__ import annotations

import copy
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpox.config import SamplingConfig
from grpox.contracts import GeneratorContext, Prompt, Rollout, WeightStream
from grpox.errors import ConfigError, RunFailed
from grpox.toolkit import (
    ADAPTER,
    adapted_layers,
    base_buffers,
    describe,
    has_float32_head,
    preserve_env,
    preserve_random_state,
    stream_adapters,
    stream_base,
    stream_weights,
    text_of,
    world_size,
    write_adapter,
)
from grpox_generators.configs import VllmColocateConfig
from grpox_generators.vllm_requests import BROKEN_OFF, refused_settings, request_params, seed_of
from grpox_generators.vllm_weights import as_stored, from_all_ranks
from grpox_vllm_serving.launch import PRECISION, SHARED_MEMORY, engine_settings
from grpox_vllm_serving.weight_reload import as_loaded, check_all_loaded, head_is_embedding, pack_again

Item = TypeVar("Item")

ENVIRONMENT = {
    # Run the engine's core in this process, so that its weights can be set without a copy to another process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # vLLM's warnings at each sync are about buffers without weights.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # vLLM's CPU build would bind the threads of all ranks to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment variables set before vLLM is imported, unless the user has set them."""
CHANGED = ("LOCAL_WORLD_SIZE", "LD_PRELOAD")
"""Variables that vLLM's CPU build sets at its start. LOCAL_WORLD_SIZE then counts the engine's ranks as those
of the machine; LD_PRELOAD names libraries for its workers, which the reward processes would also load."""
NAME, NUMBER = "policy", 1
"""The engine's name and number of its only adapter."""


class VllmColocateGenerator:
    """Samples with one request per prompt for its whole group, so that the prompt is computed once."""

    stateless = True

    def __init__(self, config: VllmColocateConfig) -> None:
        # Checked here because `start` comes after the model is loaded.
        size, ranks = config.tensor_parallel_size, world_size()
        if ranks % size:
            what = "the ranks cannot be divided into groups of this size"
            allowed = f"a divisor of the number of ranks, {ranks}"
            raise ConfigError(what, "generator.tensor_parallel_size", given=str(size), allowed=allowed)
        self.config = config
        self.version = 0
        self._asleep: set[str] = set()
        """Parts of the engine that are asleep: weights, kv_cache."""
        self._adapter: AdapterFiles | None = None
        """Files of the policy's adapter if the engine computes it separately, else None."""
        self._base_buffers: list[Tensor] | None = None
        """Buffers that the engine then has beside the frozen weights; None while it has no frozen weights."""

    def start(self, context: GeneratorContext) -> None:
        """Start the engine, after DeepSpeed: otherwise vLLM would create its own process group."""
        self.context = context
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._sleeps = self.config.sleep and context.device.type == "cuda"
        policy = context.policy.config.get_text_config()
        self._tied = bool(getattr(policy, "tie_word_embeddings", False))
        self._vocabulary, self._longest = policy.vocab_size, getattr(policy, "longest_sequence", None)
        # In a model that is only evaluated, the adapters are merged.
        if self.config.lora_sync == "adapter" and adapted_layers(context.policy):
            self._adapter = AdapterFiles(context.policy)
        with (
            preserve_random_state(),
            preserve_env(*CHANGED, PRECISION),
            own_segments(context),
            tempfile.TemporaryDirectory() as folder,
        ):
            # The engine sets it in this process, so for the trainer too.
            is_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
            os.environ.setdefault(PRECISION, "high" if is_tf32 else "highest")
            # Save the config without weights, so that a hub id, a folder and a Python object all start in the
            # same way.
            config = copy.deepcopy(context.policy.config)
            # A model that was not loaded from files does not name its architecture.
            config.architectures = config.architectures or [type(context.policy).__name__]
            if has_float32_head(context.policy):
                config.head_dtype = "float32"  # as `--hf-overrides` of vLLM's server would set it
            config.save_pretrained(folder)
            context.tokenizer.save_pretrained(folder)
            self._engine = self._start_engine(folder)
        [self._head_is_embedding] = self._engine.apply_model(head_is_embedding)

    def sync(self, weights: WeightStream, version: int) -> None:
        """Load the weights bucket by bucket as they are gathered, or only the adapter; then `weights` is not
        read."""
        self._wake("weights")
        if self._adapter is None:
            self._reload(weights)
        else:
            # The frozen weights are needed at first, after sleep, and after a change of a buffer.
            buffers = [buffer for _, buffer in base_buffers(self.context.policy)]
            before = self._base_buffers
            same = before is not None and all(map(torch.equal, before, buffers))
            if any(from_all_ranks(not same, self.context)):
                self._reload(stream_base(self.context.policy))
                self._base_buffers = [buffer.clone() for buffer in buffers]
            with preserve_random_state():
                self._adapter.send(self._engine)
        if not self._engine.reset_prefix_cache():
            raise RunFailed("vLLM's prefix cache was in use and kept keys and values of the old weights")
        self.version = version

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterable[Rollout]:
        """Sample every prompt's group; a temperature of 0 decodes greedily."""
        seeded, mine = ask_together([(prompt, seed_of(prompt, seed)) for prompt in prompts])
        if not seeded:
            return
        outputs = self._outputs(seeded, sampling)[mine]
        for prompt, output in zip(prompts, outputs, strict=True):
            for completion in sorted(output.outputs, key=lambda completion: completion.index):
                token_ids, reason = tuple(completion.token_ids), completion.finish_reason
                if reason in BROKEN_OFF:
                    raise RunFailed(f"vLLM broke off a completion of group {prompt.group_id}: {reason}")
                chosen = (p[token].logprob for token, p in zip(token_ids, completion.logprobs, strict=True))
                of = prompt.group_id, completion.index, prompt.token_ids, token_ids
                yield Rollout(*of, reason, self.version, tuple(chosen))

    def sleep(self) -> None:
        """On CUDA, release the memory of weights and cache for the update."""
        if self._sleeps:
            self._engine.sleep(level=2)
            self._base_buffers = None
            self._asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        """On CUDA, reserve the memory again, and load the weights unless a sync has done so; a collective."""
        if "weights" in self._asleep:
            self.sync(stream_weights(self.context.policy), self.version)
        self._wake("kv_cache")

    def close(self) -> None:
        """Free the engine's memory without vLLM's own shutdown, which would destroy the run's process group."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        client = self._engine.llm_engine.engine_core
        client._finalizer.detach()
        client.engine_core.model_executor.shutdown()
        destroy_model_parallel()
        del self._engine
        if self._adapter is not None:
            self._adapter.close()

    def _reload(self, weights: WeightStream) -> None:
        with preserve_random_state():
            stored = as_stored(self.context.policy, weights)
            named = as_loaded(stored, self._tied, self._head_is_embedding)
            self._engine.apply_model(_check_next_load)
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
            self._engine.apply_model(pack_again)
        for _ in weights:  # a collective: every rank must gather all weights that the engine did not read
            pass

    def _wake(self, what: str) -> None:
        if what in self._asleep:
            self._engine.wake_up(tags=[what])
            self._asleep.remove(what)

    def _outputs(self, seeded: Sequence[tuple[Prompt, int]], sampling: SamplingConfig) -> list[Any]:
        """Return vLLM's answer to each prompt with its seed."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

        positions = self._engine.llm_engine.model_config.max_model_len
        stops, whose = self.context.stop_token_ids, "vLLM's engine (generator.max_model_len)"
        params = request_params(seeded, sampling, stops, self._vocabulary, positions, whose)
        requests = [{"prompt_token_ids": list(prompt.token_ids)} for prompt, _ in seeded]
        try:
            # A run file has mappings here, vLLM needs objects.
            own, names = sampling.generation_kwargs, ("structured_outputs", "repetition_detection")
            kinds = zip(names, (StructuredOutputsParams, RepetitionDetectionParams), strict=True)
            typed = {name: kind(**own[name]) for name, kind in kinds if own.get(name)}
            of_prompts = [SamplingParams(**each | typed) for each in params]
            with preserve_random_state():
                adapter = None if self._adapter is None else self._adapter.request()
                generate = self._engine.generate
                outputs: list[Any] = generate(requests, of_prompts, lora_request=adapter, use_tqdm=False)
        except VLLMValidationError as error:
            message, given = " ".join(text_of(error).split()), str(sampling.generation_kwargs)
            raise refused_settings(message, given) from error
        return outputs

    def _start_engine(self, folder: str) -> Any:
        from vllm import LLM

        device, config, policy = self.context.device, self.config, self.context.policy
        dtype = config.dtype or str(policy.dtype).removeprefix("torch.")
        # Without a limit vLLM would stop where factors for long sequences begin.
        longest = config.max_model_len or self._longest
        own = {
            **engine_settings(dtype, device.type == "cuda", longest, config.kv_cache_gib),
            **engine_arguments(config.tensor_parallel_size, self.context.world_size),
            "model": folder,
            "load_format": "dummy",
            "seed": self.context.seed + self.context.rank // config.tensor_parallel_size,
            "enable_sleep_mode": self._sleeps,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            **({} if self._adapter is None else self._adapter.arguments),
        }
        try:
            return LLM(**own | dict(config.engine))
        except (TypeError, ValueError) as error:
            what = f"vLLM cannot start: {describe(error)}"
            raise ConfigError(what, "generator.engine", given=str(config.engine)) from error


def _check_next_load(model: Any) -> None:
    """Make the next load of weights fail if it omits some."""
    load_weights = model.load_weights

    def load(weights: WeightStream) -> Any:
        del model.load_weights
        loaded = load_weights(weights)
        check_all_loaded(model)
        return loaded

    model.load_weights = load


def engine_arguments(size: int, world_size: int) -> dict[str, Any]:
    """Return the arguments that describe the ranks to vLLM.

    Without the external launcher, vLLM would treat each rank as a separate world on the machine's first GPU.
    """
    if world_size == 1:
        return {}
    return {"tensor_parallel_size": size, "distributed_executor_backend": "external_launcher"}


def ask_together(mine: Sequence[Item]) -> tuple[list[Item], slice]:
    """Return the requests of this rank's group in rank order, and the slice of `mine`; a collective."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return list(mine), slice(None)
    parts: list[list[Item]] = [[] for _ in range(group.world_size)]
    dist.all_gather_object(parts, list(mine), group=group.cpu_group)
    before = sum(len(part) for part in parts[: group.rank_in_group])
    return [request for part in parts for request in part], slice(before, before + len(mine))


@contextmanager
def own_segments(context: GeneratorContext) -> Iterator[None]:
    """Name the engine's shared memory segments after this run, and remove the names when all ranks have opened
    them.

    If a launcher started the ranks, vLLM uses the same names for every run on a host, and removes them only
    when its process ends normally. A run beside another, or after a killed one, then finds the names in use. A
    segment without a name exists as long as a process uses it.
    """
    if context.world_size == 1 or context.device.type != "cpu":
        yield
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    run = f"grpox-{from_all_ranks(secrets.token_hex(4), context)[0]}"
    of_vllm = _CPUSHMDistributed.make_group_name

    def of_this_run(communicator: Any) -> str:
        return f"{run}-{of_vllm(communicator).lstrip('/')}"

    _CPUSHMDistributed.make_group_name = staticmethod(of_this_run)
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(of_vllm)
        for segment in SHARED_MEMORY.glob(f"{run}-*_{context.rank}"):  # each rank's own: all ranks have joined
            segment.unlink()


class AdapterFiles:
    """The adapter of `policy` in a folder of this process, from which its engine reads it.

    vLLM loads an adapter from files in peft's format, into memory that it reserves when the engine starts.
    https://docs.vllm.ai/en/latest/features/lora/
    """

    def __init__(self, policy: nn.Module) -> None:
        """Create the folder for the files.

        Raises:
            ConfigError: vLLM supports no adapter of this rank, or none of the head.
        """
        from vllm.config.lora import MaxLoRARanks

        self._policy = policy
        layers = adapted_layers(policy)
        # The folder is removed with this object too, if a run ends before its generator is closed.
        self._files = tempfile.TemporaryDirectory(
            prefix="grpox-adapter-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        )
        head = next((name for name in layers if "." not in name), None)
        if head is not None:
            raise _not_by_itself(f"vLLM takes no adapter of the head ({head}) by itself")
        # Memory is reserved for one of vLLM's ranks that fits.
        rank, rooms = next(iter(layers.values())).r[ADAPTER], get_args(MaxLoRARanks)
        if rank > max(rooms):
            raise _not_by_itself(f"vLLM takes adapters of rank {max(rooms)} at most, and this is of {rank}")
        self.arguments: dict[str, Any] = {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": min(room for room in rooms if room >= rank),
            # Layers without an adapter would compute with zeros.
            "lora_target_modules": list(dict.fromkeys(name.rpartition(".")[2] for name in layers)),
        }
        """Arguments of vLLM's engine."""

    def request(self, **more: Any) -> Any:
        """Return the reference to the adapter for a request to the engine."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(NAME, NUMBER, self._files.name, **more)

    def send(self, engine: Any) -> None:
        """Load the current adapter into the engine; a collective."""
        state = {name: tensor.cpu() for name, tensor in stream_adapters(self._policy)}
        write_adapter(self._policy, state, "", Path(self._files.name))
        engine.llm_engine.add_lora(self.request(load_inplace=True))

    def close(self) -> None:
        """Remove the files."""
        self._files.cleanup()


def _not_by_itself(what: str) -> ConfigError:
    return ConfigError(what, "generator.lora_sync", given="adapter", allowed="merged")
