"""The memory that a run file asks for: from the file and the model's config.json, no weights read."""

from __future__ import annotations

import json
from pathlib import Path

from grpox.config import ModelConfig
from grpox.contracts import GeneratorMemory
from grpox.policy.memory_plan.setting import PROMPT, Setting, setting_of
from grpox.policy.memory_plan.shape import ModelShape, shape_of
from grpox.runfile.load import ResolvedRun


def run_setting(run: ResolvedRun, gpu: bool, prompt_tokens: int | None = None) -> Setting:
    """What decides how much memory a rank of the run takes.

    Args:
        gpu: whether ranks have a GPU.
        prompt_tokens: of the longest prompt; default: the run's limit, else 512.

    Raises:
        ConfigError: the model's configuration cannot be loaded, or tells too little.
    """
    config, generator = run.config, run.components["generator"].config
    prompt = prompt_tokens or config.data.max_prompt_length or PROMPT
    ranks = run.plan.world_size
    sampled = -(-run.plan.prompts_per_generation // ranks) * config.train.num_generations
    if config.evaluation is not None:
        sampled = max(sampled, config.evaluation.batch_size * config.evaluation.num_generations)
    return setting_of(config, generator, model_shape(config.model), ranks, gpu, prompt, sampled)


def generator_settings(run: ResolvedRun) -> str:
    """Name the settings that make the run's generator need less memory; empty where it tells none."""
    ask = getattr(run.components["generator"].config, "memory", None)
    held: GeneratorMemory | None = None if ask is None else ask(True)
    if held is None or not held.engine:
        return ""
    keys = ", ".join(filter(None, (held.share_key, held.cache_key)))
    return f"the share of a {held.engine} engine ({keys})"


def model_shape(config: ModelConfig) -> ModelShape:
    """The model's shape, without importing torch where its kind is one that is known."""
    file = Path(config.path) / "config.json"
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        told = {}
    if shape := shape_of(told if isinstance(told, dict) else {}):
        return shape
    from grpox.policy.memory_plan.built_shape import built_shape

    return built_shape(config)
