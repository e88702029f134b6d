"""The sections `model`, adapters included, and `data`."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from grpox.config.component import ComponentRef, Section


class LoraConfig(Section):
    """Adapters of low rank (arXiv 2106.09685): W + (alpha / r) B A, of which A and B alone are trained."""

    r: int = Field(16, ge=1)
    """Rank of the product B A."""
    alpha: int = Field(32, ge=1)
    """The product is scaled by alpha / r. 16 and 32 as in TRL."""
    dropout: float = Field(0.0, ge=0)
    """0 and nothing else: as all dropout is off, so that sampling and training see one distribution."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Linear layers that get an adapter, by the ends of their names: ``[q_proj, v_proj]``; or all of them but
    the head."""
    exclude_modules: list[str] = Field(default_factory=list)
    """Layers among these that get none, by the ends of their names."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead (arXiv 2312.03732)."""

    @field_validator("dropout")
    @classmethod
    def _off(cls, dropout: float) -> float:
        if dropout != 0:
            raise ValueError("dropout is off in grpox, so that sampling and training see one distribution: 0")
        return dropout

    @field_validator("target_modules")
    @classmethod
    def _some(cls, target_modules: str | list[str]) -> str | list[str]:
        if target_modules == [] or (isinstance(target_modules, list) and "" in target_modules):
            raise ValueError("no module is named: all-linear, or a list of names such as [q_proj, v_proj]")
        return target_modules


class ModelConfig(Section):
    path: str
    """A local folder in Hugging Face format (or a hub id, where the hub can be reached)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights in training; optimizer states are float32."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the tokenizer's chat template for conversational prompts."""
    init: dict[str, Any] = Field(default_factory=dict)
    """Passed to transformers' `from_pretrained`: attn_implementation, revision, trust_remote_code, ..."""
    lora: LoraConfig | None = None
    """Train adapters and nothing else, with peft (``pip install 'grpox[lora]'``); default: all weights."""


class DataConfig(Section):
    path: str | None = None
    """A .jsonl, .json, .csv or .parquet file, or the id of a dataset on the hub."""
    subset: str | None = None
    """Configuration of a hub dataset that has several."""
    split: str = "train"
    """Split of a hub dataset, as `datasets` writes it: ``train``, ``train[:1000]``."""
    streaming: bool = False
    """Read rows as they are needed, without an index of all of them: for data larger than the disk."""
    source: ComponentRef | None = None
    """A dataset plugin, in place of `path`."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of role/content messages."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Tokens a prompt may have; default: what the model's positions leave beside a completion."""
    long_prompts: Literal["refuse", "cut"] = "refuse"
    """Treatment of a longer prompt: the run is refused, naming the row, or its left end is cut off."""

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.path is None) == (self.source is None):
            raise ValueError("give exactly one of 'path' and 'source'")
        return self
