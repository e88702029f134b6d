"""A model of random weights in the quickstart's vocabulary: of any size, and with room for long completions."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

QUICKSTART = importlib.resources.files("grpox.runfile.recipes") / "quickstart" / "model"
HEAD = 32
"""Size of an attention head."""


def make_model(folder: Path, hidden: int, layers: int) -> None:
    """Write a Llama and its tokenizer to `folder`."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(os.fspath(QUICKSTART))  # type: ignore[call-overload]
    torch.manual_seed(0)
    heads = max(1, hidden // HEAD)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
