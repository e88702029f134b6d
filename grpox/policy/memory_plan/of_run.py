"""The memory of a run, computed from the run file and the model's config.json, without reading weights.

DeepSpeed needs the whole model on each GPU before it shards it; a model that does not fit is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from grpox.config.inputs import AUTO, dtype_on
from grpox.config.sampling import sampling_of
from grpox.config.training import tokens_on
from grpox.contracts import GeneratorMemory
from grpox.errors import ConfigError
from grpox.errors.formatting import format_bytes
from grpox.policy.deepspeed_config import own_settings
from grpox.policy.memory_plan.formula import DEFAULTS, LOAD, PROMPT, Setting, parts_of, size_in
from grpox.policy.memory_plan.shape import model_shape
from grpox.runfile.checks import divides_steps
from grpox.runfile.load import ResolvedRun

if TYPE_CHECKING:
    from grpox.config import RunConfig, SamplingConfig
    from grpox.runtime.world import World


def run_setting(run: ResolvedRun, gpu: bool, prompt_tokens: int | None = None) -> Setting:
    """Collect the settings that decide how much memory a rank of the run takes.

    Args:
        gpu: ranks have a GPU.
        prompt_tokens: length of the longest prompt; default: the run's limit, else 512.

    Raises:
        ConfigError: the model's configuration cannot be loaded or lacks a size.
    """
    config, train, lora, ranks = run.config, run.config.train, run.config.model.lora, run.plan.world_size
    prompt, completion = (
        prompt_tokens or config.data.max_prompt_length or PROMPT,
        config.sampling.max_completion_length,
    )
    shape, memory = model_shape(config.model), _generator_memory(run, gpu)
    sampled = -(-run.plan.prompts_per_generation // ranks) * train.num_generations
    samplings = [config.sampling]
    if config.evaluation is not None:
        samplings.append(sampling_of(config.evaluation, config.sampling))
        sampled = max(sampled, config.evaluation.batch_size * config.evaluation.num_generations)
    if memory is not None and memory.together is not None:
        sampled = min(sampled, memory.together)
    return Setting(
        shape=shape,
        ranks=ranks,
        gpu=gpu,
        weight_bytes=2 if dtype_on(config.model.dtype, gpu) == "bfloat16" else 4,
        trained=shape.adapters(lora.r, lora.target_modules, lora.exclude_modules, lora.target_parameters)
        if lora
        else (),
        merged=sum(prod(one.sizes) for one in shape.stacks_named(lora.target_parameters)) if lora else 0,
        sequences=train.per_device_train_batch_size,
        prompt=prompt,
        completion=completion,
        budget=_positions(run, gpu, prompt + completion),
        checkpointing=train.gradient_checkpointing,
        chunked=train.chunked_logprobs,
        reference=run.needs_reference and lora is None,
        fused=train.optim == "adamw_torch_fused",
        offload_optimizer=config.deepspeed.offload_optimizer,
        offload_param=config.deepspeed.offload_param,
        background=config.checkpoint.background,
        generator=memory,
        sampled=sampled,
        score_bytes=max(map(score_bytes, samplings)),
        zero=_zero_settings(config, gpu),
    )


def score_bytes(sampling: SamplingConfig) -> int:
    """Count the bytes of a score of the next token at its peak: its logit, and the results of the filters.

    `top_p` sorts: scores and indices of 64 bits, softmax, cumulated sums, and on CUDA a workspace.
    """
    if sampling.generation_kwargs:  # typical_p needs the most
        return 56
    if sampling.top_p < 1:
        return 40
    is_plain = not (sampling.top_k or sampling.min_p or sampling.min_completion_length)
    return 12 if is_plain and sampling.repetition_penalty == 1 else 24


def _positions(run: ResolvedRun, gpu: bool, longest: int) -> int | None:
    """Count the positions of a micro-batch that is limited by them: at most a step's, at least a sequence's."""
    train, given = run.config.train, run.config.train.max_tokens_per_micro_batch
    budget = tokens_on(given, gpu, given == AUTO and divides_steps(run.components["loss"]))
    if budget is None:
        return None
    of_step = train.per_device_train_batch_size * train.gradient_accumulation_steps
    return max(min(budget, of_step * longest), longest)


def _zero_settings(run: RunConfig, gpu: bool) -> Mapping[str, int]:
    """Read DeepSpeed's settings from the run file, or use grpox's and DeepSpeed's defaults."""
    config = run.deepspeed
    settings = config.settings.get("zero_optimization", {})
    given = {name: settings[name] for name in DEFAULTS if settings.get(name, "auto") != "auto"}
    own = DEFAULTS | own_settings(run, gpu) | {name: int(float(value)) for name, value in given.items()}
    if config.stage3_param_persistence_threshold is not None:
        own["stage3_param_persistence_threshold"] = config.stage3_param_persistence_threshold
    if config.offload_param == "nvme":
        own |= {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    return own


def _generator_memory(run: ResolvedRun, gpu: bool) -> GeneratorMemory | None:
    """Ask the run's generator for its memory; None if it does not report it."""
    memory_of: Any = getattr(run.components["generator"].config, "memory", None)
    return None if memory_of is None else memory_of(gpu)


def generator_settings(run: ResolvedRun) -> str:
    """Name the settings that reduce the memory of the run's generator; empty if it reports none."""
    memory = _generator_memory(run, gpu=True)
    if memory is None or not memory.engine:
        return ""
    keys = ", ".join(filter(None, (memory.share_key, memory.cache_key)))
    return f"the share of a {memory.engine} engine ({keys})"


def free_memory(world: World) -> int | None:
    """Return the free bytes of the ranks' GPU with the least free memory; None without GPUs. A collective."""
    if world.device.type != "cuda":
        return None
    import torch

    free, _ = torch.cuda.mem_get_info(world.device)
    # Memory that an earlier run of this process has freed, and torch still reserves.
    cached = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    return min(world.gather([free + cached]))


def check_load(run: ResolvedRun, free: int | None) -> None:
    """Refuse a model that is too large for a GPU while it loads.

    Args:
        free: free bytes of the GPU with the least free memory; None: no GPU, or unknown.

    Raises:
        ConfigError: loading would run out of memory, after minutes of reading weights.
    """
    needed = None if free is None else _needed(run)
    if free is None or needed is None or needed <= free:
        return
    model = run.config.model
    dtype = dtype_on(model.dtype, gpu=True)
    smaller = "model.dtype: bfloat16, " if dtype == "float32" else ""
    raise ConfigError(
        f"the model does not fit: while it loads, every GPU needs {format_bytes(needed)} for all of it, and "
        f"{format_bytes(free)} are free",
        "model.path",
        given=f"{model.path} in {dtype}",
        allowed=f"{smaller}a smaller model, or GPUs with more memory; more ranks or offload do not help "
        "(grpox plan --memory)",
    )


def _needed(run: ResolvedRun) -> int | None:
    """Count the bytes of a GPU while the model loads; None if they are not known."""
    given = run.given.model
    if given is not None:
        if given.device.type == "cuda":
            return None  # it is there already
        return int(sum(weight.numel() * weight.element_size() for weight in given.parameters()))
    try:
        setting = run_setting(run, gpu=True)
    except ConfigError:
        return None  # not countable; loading will show whether it loads at all
    return size_in(parts_of(setting), LOAD, on_host=False)
