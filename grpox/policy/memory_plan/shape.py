"""Sizes of a model that determine its memory: sizes of its weights and widths of its layers.

Both come from the model's config.json, or from a model that transformers builds without data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from grpox.config import ModelConfig
from grpox.errors import ConfigError, describe
from grpox.runtime.files import read_mapping

DENSE = ("llama", "mistral", "qwen2", "qwen3")
"""Values of model_type whose weights this module counts; for others transformers builds a model without
data."""

SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
"""Fields that every configuration must have."""


@dataclass(frozen=True)
class Linear:
    """A linear layer of the body, where LoRA can put an adapter."""

    name: str
    """End of the layer's name: ``q_proj``."""
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Stack:
    """A parameter of two or three dimensions that is no weight of a layer of torch, such as stacked experts."""

    name: str
    """Full name of the parameter."""
    sizes: tuple[int, ...]

    @property
    def experts(self) -> int:
        return prod(self.sizes[:-2])


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder model."""

    weights: tuple[int, ...]
    """Number of elements of each weight; tied weights once."""
    linears: tuple[Linear, ...]
    """Linear layers without the head."""
    hidden: int
    """H"""
    intermediate: int
    """F, of the gated feed-forward layer"""
    layers: int
    queries: int
    """Q, the total width of all query heads"""
    keys: int
    """K, the width of the key heads, which groups of query heads share"""
    vocabulary: int
    """V"""
    stacks: tuple[Stack, ...] = ()
    """Parameters that can have an adapter of their own (`model.lora.target_parameters`)."""

    @property
    def parameters(self) -> int:
        return sum(self.weights)

    @property
    def head(self) -> int:
        """Number of elements of the head's weight."""
        return self.vocabulary * self.hidden

    def adapters(
        self, rank: int, targets: str | list[str], without: list[str], parameters: Sequence[str] = ()
    ) -> tuple[int, ...]:
        """Count the elements of LoRA's weights, A [r, inputs] and B [outputs, r] of each layer or expert named.

        Args:
            targets: ends of names, or ``all-linear``.
            without: ends of names without an adapter.
            parameters: ends of names of parameters.
        """
        ends, left_out = ({name.rpartition(".")[2] for name in names} for names in (targets, without))
        layers = (
            rank * size
            for one in self.linears
            if (targets == "all-linear" or one.name in ends) and one.name not in left_out
            for size in (one.inputs, one.outputs)
        )
        stacks = (rank * one.experts * size for one in self.stacks_named(parameters) for size in one.sizes[-2:])
        return (*layers, *stacks)

    def stacks_named(self, ends: Sequence[str]) -> tuple[Stack, ...]:
        """Select the parameters whose names end in one of `ends`."""
        return tuple(one for one in self.stacks if any(f".{one.name}".endswith(f".{end}") for end in ends))


def model_shape(config: ModelConfig) -> ModelShape:
    """Read the model's shape, without importing torch if its kind is known.

    Raises:
        ConfigError: see `built_shape`.
    """
    return shape_of(read_mapping(Path(config.path) / "config.json")) or built_shape(config)


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """Read the shape from a config.json; None if its kind of model is not known, or a size is missing."""
    if config.get("model_type") not in DENSE or config.get("quantization_config"):
        return None
    if not all(isinstance(config.get(name), int) for name in (*SIZES, "intermediate_size")):
        return None
    one = _widths(config.get)
    hidden, intermediate, queries, keys = one.hidden, one.intermediate, one.queries, one.keys
    sizes = {"q": (hidden, queries), "k": (hidden, keys), "v": (hidden, keys), "o": (queries, hidden)}
    sizes |= {"gate": (hidden, intermediate), "up": (hidden, intermediate), "down": (intermediate, hidden)}
    linears = tuple(Linear(f"{name}_proj", *size) for name, size in sizes.items())
    head_dim = queries // config["num_attention_heads"]
    layer = [*(one.inputs * one.outputs for one in linears), hidden, hidden, *_small(config, linears, head_dim)]
    heads = [one.head] * (1 if config.get("tie_word_embeddings") else 2)
    return replace(one, weights=(*heads, *layer * one.layers, hidden), linears=linears * one.layers)


def _widths(size_of: Callable[[str], Any]) -> ModelShape:
    """Build a shape without weights from a configuration's sizes by name."""
    hidden, heads = size_of("hidden_size"), size_of("num_attention_heads")
    head_dim = size_of("head_dim") or hidden // heads
    return ModelShape(
        weights=(),
        linears=(),
        hidden=hidden,
        # Families without gated layers use another name or omit the size; then it is 4 times the width.
        intermediate=size_of("intermediate_size") or size_of("n_inner") or 4 * hidden,
        layers=size_of("num_hidden_layers"),
        queries=heads * head_dim,
        keys=(size_of("num_key_value_heads") or heads) * head_dim,
        vocabulary=size_of("vocab_size"),
    )


def _small(config: Mapping[str, Any], linears: tuple[Linear, ...], head_dim: int) -> list[int]:
    """List the sizes of a layer's biases and norms, besides its two norms of the hidden state."""
    kind = config["model_type"]
    biased = ["q_proj", "k_proj", "v_proj"] if kind == "qwen2" else []
    if kind in ("llama", "qwen3") and config.get("attention_bias"):
        biased = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if kind == "llama" and config.get("mlp_bias"):
        biased += ["gate_proj", "up_proj", "down_proj"]
    norms = [head_dim, head_dim] if kind == "qwen3" else []
    return [one.outputs for one in linears if one.name in biased] + norms


def built_shape(config: ModelConfig) -> ModelShape:
    """Read the shape of a model of any kind: transformers builds it on the meta device without its weights.

    Raises:
        ConfigError: transformers cannot load the configuration or build a model from it, or a width that
            activations depend on is missing.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from grpox.policy.models import load_config

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
    return replace(
        _widths(lambda name: getattr(text, name, None)),
        weights=tuple(weight.numel() for weight in model.parameters()),
        linears=tuple(
            Linear(name.rpartition(".")[2], module.in_features, module.out_features)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        ),
        stacks=tuple(
            Stack(f"{name}.{own}", tuple(parameter.shape))
            for name, module in model.named_modules()
            if not isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
            for own, parameter in module.named_parameters(recurse=False)
            if parameter.dim() in (2, 3)
        ),
    )
