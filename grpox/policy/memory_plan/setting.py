"""What of a run decides how much memory it takes; with DeepSpeed's own sizes, where the run names none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpox.config import RunConfig
from grpox.contracts import GeneratorMemory
from grpox.policy.memory_plan.shape import ModelShape

DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "sub_group_size": 1_000_000_000,
}
"""DeepSpeed 0.19's, in elements."""
PROMPT = 512
"""Tokens of a prompt where the run file sets no limit and nobody says."""


@dataclass(frozen=True)
class Setting:
    """All that the formula is given."""

    shape: ModelShape
    ranks: int
    gpu: bool
    """Whether ranks have a GPU; else all is in the host's memory, and what is never touched takes none."""
    weight_bytes: int = 4
    """Of an element of the weights that compute."""
    trained: tuple[int, ...] = ()
    """Elements of each weight of LoRA's adapters, which alone are trained; empty: the model's are."""
    sequences: int = 8
    """Of a micro-batch on a rank."""
    prompt: int = PROMPT
    completion: int = 256
    """Tokens of each sequence's prompt and completion, at most."""
    budget: int | None = None
    """Positions of a micro-batch in place of its sequences."""
    checkpointing: bool = False
    chunked: bool = True
    reference: bool = False
    fused: bool = True
    offload_optimizer: str = "none"
    offload_param: str = "none"
    background: bool = False
    """Whether checkpoints are written while training goes on."""
    generator: GeneratorMemory | None = None
    """Memory that the generator holds; None where it does not say."""
    sampled: int = 64
    """Completions that a rank samples together."""
    reduce_bucket: int = DEFAULTS["reduce_bucket_size"]
    prefetch: int = DEFAULTS["stage3_prefetch_bucket_size"]
    reuse: int = DEFAULTS["stage3_max_reuse_distance"]
    persistent: int = DEFAULTS["stage3_param_persistence_threshold"]
    sub_group: int = DEFAULTS["sub_group_size"]

    @property
    def positions(self) -> int:
        """That go through the model together, at most: no prompt is shared."""
        return self.budget or self.sequences * (self.prompt + self.completion)

    @property
    def trained_weights(self) -> tuple[int, ...]:
        return self.trained or self.shape.weights


def setting_of(
    config: RunConfig, generator: Any, shape: ModelShape, ranks: int, gpu: bool, prompt: int, sampled: int
) -> Setting:
    """The setting of a run.

    Args:
        generator: its checked parameters; None where it has none.
        prompt: tokens of the longest prompt.
        sampled: completions of a generation batch on one rank.
    """
    train, given = config.train, config.deepspeed.settings.get("zero_optimization", {})
    lora = config.model.lora
    own = {name: _elements(given, name) for name in DEFAULTS}
    if config.deepspeed.stage3_param_persistence_threshold is not None:
        own["stage3_param_persistence_threshold"] = config.deepspeed.stage3_param_persistence_threshold
    if config.deepspeed.offload_param == "nvme":
        own |= {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    ask = getattr(generator, "memory", None)
    memory: GeneratorMemory | None = None if ask is None else ask(gpu)
    most = None if memory is None else memory.together
    return Setting(
        shape=shape,
        ranks=ranks,
        gpu=gpu,
        weight_bytes=2 if config.model.dtype == "bfloat16" else 4,
        trained=shape.adapters(lora.r, lora.target_modules, lora.exclude_modules) if lora else (),
        sequences=train.per_device_train_batch_size,
        prompt=prompt,
        completion=config.sampling.max_completion_length,
        budget=train.max_tokens_per_micro_batch,
        checkpointing=train.gradient_checkpointing,
        chunked=train.chunked_logprobs,
        reference=train.beta > 0 and lora is None,
        fused=train.optim == "adamw_torch_fused",
        offload_optimizer=config.deepspeed.offload_optimizer,
        offload_param=config.deepspeed.offload_param,
        background=config.checkpoint.background,
        generator=memory,
        sampled=sampled if most is None else min(sampled, most),
        reduce_bucket=own["reduce_bucket_size"],
        prefetch=own["stage3_prefetch_bucket_size"],
        reuse=own["stage3_max_reuse_distance"],
        persistent=own["stage3_param_persistence_threshold"],
        sub_group=own["sub_group_size"],
    )


def _elements(given: Mapping[str, Any], name: str) -> int:
    value = given.get(name, "auto")
    return DEFAULTS[name] if value == "auto" else int(float(value))
