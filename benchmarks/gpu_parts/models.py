"""Models of random weights in the shapes of Qwen2.5, and the numbers that follow from a shape."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from random_model import QUICKSTART
from transformers import AutoTokenizer, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

PEAKS = {"H100 PCIe": 756.0, "H100": 989.0, "H200": 989.0, "GH200": 989.0, "B200": 2250.0, "A100": 312.0}
"""Part of a GPU's name -> dense bf16 TFLOP/s of its data sheet; the first that fits counts."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen2 model with tied embeddings."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int = 151_936

    @property
    def body(self) -> int:
        """Weights in matrix products, without the head."""
        size = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.key_heads * size
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def weights(self) -> int:
        return self.body + self.hidden * self.vocabulary

    @property
    def state_bytes(self) -> float:
        """Bytes of training in bfloat16: weights, float32 gradients and weights, and both moments of Adam."""
        return (2 + 4 + 4 + 8) * self.weights

    def activation_bytes(self, tokens: int) -> float:
        """Estimate what a pass in bfloat16 keeps for its backward if nothing is recomputed.

        transformers' layers keep four tensors of the MLP's width, and as much as 20 of the hidden width: the
        norms compute in float32.
        """
        return tokens * self.layers * 2.0 * (4 * self.intermediate + 20 * self.hidden)

    def operations(self, tokens: int, scored: int, length: int) -> float:
        """Count the operations of forward and backward.

        2 operations a weight and token forward and 4 backward; causal attention sees half of a sequence on
        average. Recomputed activations do not count.

        Args:
            tokens: of all sequences; scored: those whose logits are needed; length: of a sequence.
        """
        products = 6.0 * (self.body * tokens + self.hidden * self.vocabulary * scored)
        return products + 6.0 * self.layers * self.hidden * length * tokens


QWEN_05B = Shape(896, 4864, 24, 14, 2)
QWEN_15B = Shape(1536, 8960, 28, 12, 2)
TINY = Shape(64, 128, 2, 4, 2, vocabulary=512)


def config_of(shape: Shape) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )


def random_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model whose weights are drawn on `device`."""
    torch.manual_seed(0)
    with device:
        model: PreTrainedModel = Qwen2ForCausalLM(config_of(shape))
    # Drawn in float32 and then rounded: drawing is as fast, and every dtype has the same numbers.
    return model.to(dtype)


def write_model(folder: Path, shape: Shape, device: torch.device, dtype: torch.dtype) -> Path:
    """Save a random model with the quickstart's tokenizer, which knows the first few of its tokens."""
    tokenizer = AutoTokenizer.from_pretrained(os.fspath(QUICKSTART))  # type: ignore[call-overload]
    model = random_model(shape, device, dtype)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def peak_of_device(device: torch.device) -> float | None:
    """Return the data sheet's dense bf16 TFLOP/s; None if the device is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def described(shape: Shape) -> dict[str, int]:
    """Return the sizes for the JSON object."""
    return asdict(shape) | {"weights": shape.weights}
