"""The sections `model`, adapters included, and `data`."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from grpox.config.component import ComponentRef, Section

AUTO = "auto"
Dtype = Literal["float32", "bfloat16"]
"""Precision of weights."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): W + (alpha / r) B A, where only A and B are trained."""

    r: int = Field(16, ge=1)
    """Rank of the product B A."""
    alpha: int = Field(32, ge=1)
    """Scale of the product: it is multiplied by alpha / r. Rank 16 and alpha 32 as in TRL."""
    dropout: float = Field(0.0, ge=0)
    """Must be 0: grpox turns all dropout off, so that sampling and training have the same distribution."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Linear layers that get an adapter, by the ends of their names: ``[q_proj, v_proj]``. ``all-linear`` means
    all linear layers except the head; ``[]``, beside `target_parameters`, means none."""
    target_parameters: list[str] = Field(default_factory=list)
    """Parameters of two or three dimensions that are no layer's weight, such as the stacked experts of a
    mixture of experts, by the ends of their names: ``[experts.gate_up_proj, experts.down_proj]``. They get
    adapters in addition to `target_modules`; in a stack every expert gets its own."""
    exclude_modules: list[str] = Field(default_factory=list)
    """Layers of `target_modules` that get no adapter, by the ends of their names."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead of alpha / r (rsLoRA, arXiv 2312.03732)."""

    @field_validator("dropout")
    @classmethod
    def _off(cls, dropout: float) -> float:
        if dropout != 0:
            raise ValueError(
                "must be 0: grpox uses no dropout, so that sampling and training have the same distribution"
            )
        return dropout

    @field_validator("target_modules", "target_parameters")
    @classmethod
    def _named(cls, names: str | list[str]) -> str | list[str]:
        if "" in names and isinstance(names, list):
            raise ValueError("has an empty name: write names such as q_proj or experts.down_proj")
        return names


def dtype_on(dtype: Literal["auto", "float32", "bfloat16"], gpu: bool) -> Dtype:
    """Return the precision that a value of ``model.dtype`` means on a GPU or on a CPU."""
    if dtype == "auto":
        return "bfloat16" if gpu else "float32"
    return dtype


class ModelConfig(Section):
    path: str
    """A local folder in Hugging Face format, or a hub id if the hub can be reached."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights in training; ``auto`` is bfloat16 on GPUs with CUDA and float32 on CPUs. Master
    weights and optimizer states are always float32."""
    cast_lm_head_to_fp32: bool = False
    """Compute all logits in float32 from hidden states and weights in `dtype`, as ScaleRL recommends (arXiv
    2510.13786): in sampling with hf and vLLM, in evaluations, and in training without
    `train.chunked_logprobs`. With it, training does so in any case."""
    longest_sequence: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Number of tokens, prompt and completion together, by which position factors are chosen, if the model has
    others for long sequences (longrope, dynamic NTK). ``auto``: `data.max_prompt_length` plus the longest
    completion, at most the model's positions; null for models with the same factors for all lengths."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the tokenizer's chat template, used for conversational prompts."""
    chat_date: Literal["auto"] | date = "auto"
    """Date that the chat template writes as the present one: ``2026-11-26``. ``auto``: the day on which the run
    begins, which a resume and an evaluation of the run keep."""
    init: dict[str, Any] = Field(default_factory=dict)
    """Arguments for transformers' `from_pretrained`: attn_implementation, revision, trust_remote_code, ..."""
    dequantize: bool = False
    """Widen a quantised checkpoint (FP8, MXFP4, compressed-tensors, ...) to `dtype` while it loads, where
    transformers can; the trained model is saved unquantised. By default such a checkpoint is refused."""
    lora: LoraConfig | None = None
    """Train only adapters, with peft (``pip install 'grpox[lora]'``); default: train all weights."""


class DataConfig(Section):
    path: str | None = None
    """A .jsonl, .json, .csv or .parquet file, or the id of a dataset on the hub."""
    subset: str | None = None
    """Configuration of a hub dataset that has several configurations."""
    split: str = "train"
    """Split of a hub dataset, as `datasets` writes it: ``train``, ``train[:1000]``."""
    streaming: bool = False
    """Read rows only when they are needed, without an index; for data larger than the disk."""
    source: ComponentRef | None = None
    """A dataset plugin, instead of `path`."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of role/content messages."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Longest prompt in tokens; default: the model's context length minus max_completion_length."""
    long_prompts: Literal["refuse", "cut"] = "refuse"
    """Handling of a longer prompt: refuse the run, naming the row, or cut tokens behind its BOS."""
    chat: bool = False
    """Make each plain prompt a message of the user, for the chat template; completions are messages too."""
    allow_special_tokens: bool = False
    """Let the text of a special token in a message, such as ``<|im_end|>``, be that token: it can forge a turn.
    Plain prompts may have special tokens in any case."""
    continue_final_message: bool = False
    """Prompts may end with a message of the assistant, which the model goes on with. It belongs to the prompt:
    it is not trained on, and reward functions get the completion without it. False: such rows are refused."""

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.path is None) == (self.source is None):
            raise ValueError("give exactly one of 'path' and 'source'")
        return self
