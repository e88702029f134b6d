"""Rotary position factors that depend on the longest sequence, chosen once for a run.

LongRoPE (arXiv 2402.13753) has different factors for long sequences, and dynamic NTK scaling moves its base.
transformers chooses by the longest sequence of a batch, and vLLM by its engine's limit. A run changes the
model's configuration to one choice for all lengths; a saved model has its original configuration.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from grpox.config.sampling import sampling_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from grpox.config import RunConfig

LENGTH, OWN = "longest_sequence", "own_rope_parameters"
"""Attributes of a changed configuration: the length of its choice, and the model's original parameters."""


def longest_sequence(run: RunConfig, model: PreTrainedConfig) -> int | None:
    """Return the largest length of a prompt with its completion that `run` allows; None without a limit."""
    evaluation = run.sampling if run.evaluation is None else sampling_of(run.evaluation, run.sampling)
    completion = max(run.sampling.max_completion_length, evaluation.max_completion_length)
    prompt = run.data.max_prompt_length
    limits = (_positions(model), None if prompt is None else prompt + completion)
    return min((limit for limit in limits if limit is not None), default=None)


def rope_choice(model: PreTrainedConfig, longest: int | None = None) -> str:
    """Name the factors for `longest` tokens, by default those in use; empty if all lengths have the same."""
    config = model.get_text_config()
    longest = longest or getattr(config, LENGTH, None) or _positions(model) or 0
    parameters = getattr(config, OWN, None) or getattr(config, "rope_parameters", None)
    return ", ".join(sorted({choice for _, choice in _choices(parameters, longest)}))


def fix_rope(model: PreTrainedModel, longest: int | str | None) -> None:
    """Choose the factors of a model, as `fix_config` does."""
    if fix_config(model.config, longest):
        for module in model.modules():
            if hasattr(module, "rope_type") and hasattr(module, "config"):
                fresh = vars(type(module)(module.config).to(next(module.buffers()).device))
                vars(module).update({name: value for name, value in fresh.items() if not name.startswith("_")})
                module._buffers = fresh["_buffers"]


def fix_config(model: PreTrainedConfig, longest: int | str | None) -> bool:
    """Choose the factors for sequences of up to `longest` tokens; return True if that changes them.

    Args:
        longest: ``auto``: the model's positions; None: restore the model's original parameters.
    """
    config = model.get_text_config()
    before = getattr(config, "rope_parameters", None)
    own = vars(config).pop(OWN, before)
    vars(config).pop(LENGTH, None)
    fixed = copy.deepcopy(own)
    length = longest if isinstance(longest, int) else _positions(model) or 0
    for part, choice in _choices(fixed if longest else None, length):
        vars(config).update({LENGTH: length, OWN: own})
        _fix(part, choice, config)
    if fixed != before:
        config.rope_parameters = fixed
    return bool(fixed != before)


def _positions(model: PreTrainedConfig) -> int | None:
    return getattr(model.get_text_config(), "max_position_embeddings", None)


def _choices(parameters: dict[str, Any] | None, longest: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the parameters that depend on lengths, of all layers or one type, and the choice for `longest`."""
    parameters = parameters or {}
    for part in [parameters] if "rope_type" in parameters else list(parameters.values()):
        kind = part.get("rope_type") if isinstance(part, dict) else None
        if kind == "longrope":
            yield part, "long" if longest > part["original_max_position_embeddings"] else "short"
        elif kind == "dynamic":
            yield part, kind


def _fix(part: dict[str, Any], choice: str, config: PreTrainedConfig) -> None:
    part.pop("type", None)  # an older name of `rope_type`
    if choice == "dynamic":
        # Its base moves only beyond the model's positions, where a run has no sequences.
        alpha, width = part.pop("alpha", None) or 1, getattr(config, "head_dim", None) or 4
        base = part["rope_theta"] * alpha ** (width / (width - 2))
        part |= {"rope_type": "linear", "factor": 1.0, "rope_theta": base}
        return
    if scale := part.get("attention_factor"):
        part |= {"short_mscale": scale, "long_mscale": scale} | part  # its names in vLLM
    other = "short" if choice == "long" else "long"
    part |= {name.replace(choice, other, 1): part[name] for name in part if name.startswith(f"{choice}_")}
