"""The memory of a run, computed from the run file and the model's config.json, without reading weights.

DeepSpeed needs the whole model on each GPU before it shards it; a model that does not fit is refused here.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from grpox.config.inputs import AUTO, dtype_on
from grpox.config.training import tokens_on
from grpox.contracts import GeneratorMemory
from grpox.errors import ConfigError, describe
from grpox.errors.formatting import format_bytes
from grpox.policy.deepspeed_config import deepspeed_config
from grpox.policy.lora.add import parameter_targets, targets_of
from grpox.policy.memory_plan.formula import (
    DEFAULTS,
    LOAD,
    PROMPT,
    ModelShape,
    Setting,
    parts_of,
    size_in,
)
from grpox.policy.models import load_config
from grpox.runfile.checks import divides_steps
from grpox.runfile.load import ResolvedRun

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpox.config import LoraConfig, ModelConfig
    from grpox.runtime.world import World

SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
"""Fields that every configuration must have."""


def run_setting(run: ResolvedRun, gpu: bool, prompt_tokens: int | None = None) -> Setting:
    """Collect the inputs of the formula for a rank of the run.

    Args:
        gpu: True if ranks have a GPU.
        prompt_tokens: length of the longest prompt; default: the run's limit, else 512.

    Raises:
        ConfigError: see `model_shape`.
    """
    config, ranks, memory = run.config, run.plan.world_size, _generator_memory(run, gpu)
    evaluation, zero = config.evaluation, deepspeed_config(config, ranks, gpu)["zero_optimization"]
    prompt = prompt_tokens or config.data.max_prompt_length or PROMPT
    sampled = -(-run.plan.prompts_per_generation // ranks) * config.train.num_generations
    if evaluation is not None:
        sampled = max(sampled, evaluation.batch_size * evaluation.num_generations)
    if memory is not None and memory.together is not None:
        sampled = min(sampled, memory.together)
    return Setting(
        config=config,
        shape=model_shape(config.model),
        ranks=ranks,
        gpu=gpu,
        prompt=prompt,
        budget=_positions(run, gpu, prompt + config.sampling.max_completion_length),
        reference=run.needs_reference and config.model.lora is None,
        generator=memory,
        sampled=sampled,
        zero={name: int(float(zero.get(name, default))) for name, default in DEFAULTS.items()},
    )


def model_shape(config: ModelConfig) -> ModelShape:
    """Read the sizes of a model, which transformers builds on the meta device, without its weights.

    Raises:
        ConfigError: transformers cannot load the configuration or build a model from it, a width that
            activations depend on is missing, or a name of `model.lora` fits nothing in the model.
    """
    loaded = load_config(config)
    try:
        with torch.device("meta"):
            trusted = bool(config.init.get("trust_remote_code", False))
            model = AutoModelForCausalLM.from_config(loaded, trust_remote_code=trusted)
    except Exception as error:
        what = f"no model can be built from its configuration: {describe(error)}"
        raise ConfigError(what, "model.path", given=config.path) from error
    text, head = loaded.get_text_config(), model.get_output_embeddings()
    for name in SIZES:
        if not isinstance(getattr(text, name, None), int):
            what = f"its config.json has no {name}, which is needed to compute the memory of activations"
            raise ConfigError(what, "model.path", given=str(Path(config.path)))
    hidden, heads = text.hidden_size, text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    # Families without gated layers use another name or omit the size; then it is 4 times the width.
    intermediate = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
    linears = [each for each in model.modules() if isinstance(each, torch.nn.Linear) and each is not head]
    adapters, merged = ((), 0) if config.lora is None else _adapted(model, config.lora)
    return ModelShape(
        weights=tuple(weight.numel() for weight in model.parameters()),
        hidden=hidden,
        intermediate=intermediate,
        layers=text.num_hidden_layers,
        queries=heads * head_dim,
        keys=(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        vocabulary=text.vocab_size,
        linears=tuple(layer.weight.numel() for layer in linears),
        adapters=adapters,
        merged=merged,
    )


def _adapted(model: PreTrainedModel, lora: LoraConfig) -> tuple[tuple[int, ...], int]:
    """Count the elements of LoRA's weights A and B, and of the parameters to which they are added."""
    stacks = [model.get_parameter(name).shape for name in parameter_targets(model, lora)]
    layers = [model.get_submodule(name).weight.shape for name in targets_of(model, lora)]
    # A and B of each expert of a stack [E, rows, columns], or of a matrix.
    sizes = [lora.r * prod(shape[:-2]) * size for shape in (*layers, *stacks) for size in shape[-2:]]
    return tuple(sizes), sum(map(prod, stacks))


def _positions(run: ResolvedRun, gpu: bool, longest: int) -> int | None:
    """Count the positions of a micro-batch with a limit on them: at most one step, at least one sequence."""
    train, given = run.config.train, run.config.train.max_tokens_per_micro_batch
    budget = tokens_on(given, gpu, given == AUTO and divides_steps(run.components["loss"]))
    if budget is None:
        return None
    of_step = train.per_device_train_batch_size * train.gradient_accumulation_steps
    return max(min(budget, of_step * longest), longest)


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
    free, _ = torch.cuda.mem_get_info(world.device)
    # An earlier run of this process has freed this memory, but torch still reserves it.
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
        return None  # its size is unknown; loading will show any error
    return size_in(parts_of(setting), LOAD, on_host=False)
