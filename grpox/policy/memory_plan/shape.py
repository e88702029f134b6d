"""What of a model decides how much memory it takes: the sizes of its weights, and the widths of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DENSE = ("llama", "mistral", "qwen2", "qwen3")
"""Values of model_type whose weights are counted here; of others transformers builds the model without data."""


@dataclass(frozen=True)
class Linear:
    """A linear layer of the body, where LoRA can put an adapter."""

    name: str
    """The end of its name: ``q_proj``."""
    inputs: int
    outputs: int


@dataclass(frozen=True)
class ModelShape:
    """A decoder, whatever it is called."""

    weights: tuple[int, ...]
    """Elements of each weight; tied ones once."""
    linears: tuple[Linear, ...]
    """Without the head."""
    hidden: int
    """H"""
    intermediate: int
    """F, of the gated feed-forward layer"""
    layers: int
    queries: int
    """Q, the width of all query heads together"""
    keys: int
    """K, that of the key heads, which groups of query heads share"""
    vocabulary: int
    """V"""

    @property
    def parameters(self) -> int:
        return sum(self.weights)

    @property
    def head(self) -> int:
        """Elements of the head's weight."""
        return self.vocabulary * self.hidden

    def adapters(self, rank: int, targets: str | list[str], without: list[str]) -> tuple[int, ...]:
        """Elements of the weights that LoRA adds: A [r, inputs] and B [outputs, r] of each layer named.

        Args:
            targets: ends of names, or ``all-linear``.
            without: ends of names that get none.
        """
        named = [
            linear
            for linear in self.linears
            if (targets == "all-linear" or linear.name in {name.rpartition(".")[2] for name in targets})
            and linear.name not in {name.rpartition(".")[2] for name in without}
        ]
        return tuple(size for one in named for size in (rank * one.inputs, rank * one.outputs))


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a config.json tells; None where its kind of model is not known, or a size is missing."""
    if config.get("model_type") not in DENSE or config.get("quantization_config"):
        return None
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        intermediate, layers = int(config["intermediate_size"]), int(config["num_hidden_layers"])
        vocabulary = int(config["vocab_size"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        keys = int(config.get("num_key_value_heads") or heads) * head_dim
    except (KeyError, TypeError, ValueError):
        return None
    queries = heads * head_dim
    linears = (
        Linear("q_proj", hidden, queries),
        Linear("k_proj", hidden, keys),
        Linear("v_proj", hidden, keys),
        Linear("o_proj", queries, hidden),
        Linear("gate_proj", hidden, intermediate),
        Linear("up_proj", hidden, intermediate),
        Linear("down_proj", intermediate, hidden),
    )
    layer = [*(one.inputs * one.outputs for one in linears), hidden, hidden, *_small(config, linears, head_dim)]
    heads_weights = [vocabulary * hidden] * (1 if config.get("tie_word_embeddings") else 2)
    return ModelShape(
        weights=(*heads_weights, *layer * layers, hidden),
        linears=linears * layers,
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        queries=queries,
        keys=keys,
        vocabulary=vocabulary,
    )


def _small(config: Mapping[str, Any], linears: tuple[Linear, ...], head_dim: int) -> list[int]:
    """Biases and norms of a layer, besides its two norms of the hidden state."""
    kind = config["model_type"]
    biased: set[str] = set()
    if kind == "qwen2":
        biased |= {"q_proj", "k_proj", "v_proj"}
    elif kind != "mistral" and config.get("attention_bias"):
        biased |= {"q_proj", "k_proj", "v_proj", "o_proj"}
    if kind == "llama" and config.get("mlp_bias"):
        biased |= {"gate_proj", "up_proj", "down_proj"}
    norms = [head_dim, head_dim] if kind == "qwen3" else []
    return [one.outputs for one in linears if one.name in biased] + norms
