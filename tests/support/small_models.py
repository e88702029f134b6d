"""Models of every architecture, so small that a test makes them anew, and a batch for them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpox.config import TrainConfig
from grpox.contracts import Rollout
from grpox.policy.batch import FULL_LOGITS, ForwardMode, PackedBatch, collate, samples_of

TRAIN = TrainConfig()
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model_of(kind: str, dtype: torch.dtype = torch.float64, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL | settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # large enough that a wrong mask shows
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def batch(mode: ForwardMode = FULL_LOGITS) -> PackedBatch:
    prompts = [(5, 6, 7), (5, 6, 7), (8, 9), (5, 6, 7), (8, 9)]
    completions = [(11, 12, 13, 14), (15,), (16, 17, 18, 19, 20), (21, 22), (23,)]
    rollouts = [
        Rollout(n, 0, prompt, completion, "stop", 0)
        for n, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]
    return collate(samples_of(rollouts, [0.0] * 5), torch.device("cpu"), mode)


def gradient_of(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative to the size of the whole: some layers of transformers compute in float32 whatever the model."""
    return float((one - other).norm() / other.norm())
