"""Parameters of the built-in rewards."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from grpox.contracts import ModelPath


class Parameters(BaseModel):
    """Parameters that refuse unknown names, and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ExactConfig(Parameters):
    """The parameters of exact."""

    column: str = "answer"
    """Dataset column with the answer; a row where it is null abstains."""
    strip: bool = True
    """Ignore white space at both ends."""
    ignore_case: bool = False
    """Compare without regard to case."""


class RegexConfig(Parameters):
    """The parameters of regex."""

    pattern: str
    """A regular expression of Python's `re`. Nested repetition such as ``(a+)+`` can take for ever."""
    match: float = 1.0
    """Score where it matches."""
    no_match: float = 0.0
    """Score where it does not."""
    full: bool = False
    """The whole completion must match, not just a part of it."""
    ignore_case: bool = False
    """Match without regard to case (re.IGNORECASE)."""
    multiline: bool = False
    """re.MULTILINE: ^ and $ match at every line."""
    dotall: bool = False
    """re.DOTALL: a dot matches newlines too."""
    column: str | None = None
    """If given, `group` of the first match must also equal this dataset column, white space at both ends
    ignored; a row where it is null abstains."""
    group: int | str = 1
    """Number or name of the group that is compared with `column`."""

    @property
    def flags(self) -> re.RegexFlag:
        """The three flags as `re` takes them."""
        chosen = re.NOFLAG
        chosen |= re.IGNORECASE if self.ignore_case else re.NOFLAG
        chosen |= re.MULTILINE if self.multiline else re.NOFLAG
        chosen |= re.DOTALL if self.dotall else re.NOFLAG
        return chosen

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error.msg} at position {error.pos}") from error
        return pattern

    @model_validator(mode="after")
    def _has_the_group(self) -> Self:
        if self.column is None:
            if "group" in self.model_fields_set:
                raise ValueError("'group' is compared with 'column', which is not given")
            return self
        compiled = re.compile(self.pattern)
        if self.group not in {*range(compiled.groups + 1), *compiled.groupindex}:
            raise ValueError(f"the pattern has no group {self.group!r} to compare with column '{self.column}'")
        return self


class LengthConfig(Parameters):
    """The parameters of length."""

    target: int = Field(ge=1)
    """Length that scores 0, the best."""
    unit: Literal["tokens", "characters"] = "tokens"
    """What is counted: the completion's tokens, its ending EOS included, or the characters of its text."""
    scale: Literal["relative", "absolute"] = "relative"
    """Whether the distance to the target is divided by the target and at most 1, or counted in units."""


class SoftOverlongConfig(Parameters):
    """The parameters of soft_overlong."""

    max_length: int = Field(ge=1)
    """Tokens from which on a completion scores -1, its ending EOS included; 20480 in the DAPO paper."""
    buffer: int = Field(ge=0)
    """Tokens before max_length over which the score falls from 0 to -1; 4096 in the DAPO paper."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.buffer > self.max_length:
            raise ValueError(f"'buffer' {self.buffer} is longer than 'max_length' {self.max_length}")
        return self


class FormatConfig(Parameters):
    """The parameters of format."""

    tags: list[str] = Field(default=["think", "answer"], min_length=1)
    """Names of the blocks, in their order: <think>...</think> <answer>...</answer>."""
    opened: bool = False
    """Whether the prompt ends in the first opening tag, so that the completion begins inside the block."""
    text_after: bool = False
    """Whether anything may follow the last block; tags [think] with this is TRL's think_format_reward."""

    @field_validator("tags")
    @classmethod
    def _distinct(cls, tags: list[str]) -> list[str]:
        if len(set(tags)) < len(tags) or not all(tags):
            raise ValueError("each tag needs a name of its own")
        return tags


class RewardModelConfig(Parameters):
    """The parameters of reward_model."""

    model: ModelPath
    """Folder in Hugging Face format with a sequence-classification model of one output and its tokenizer, or a
    hub id."""
    batch_size: int = Field(8, ge=1)
    """Completions scored together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights; each rank holds a whole copy."""
    max_length: int | None = Field(None, ge=1)
    """Tokens that the model reads, a longer text loses its left end; default: what model and tokenizer take."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the tokenizer's chat template for conversational data."""


class CodeConfig(Parameters):
    """The parameters of code."""

    column: str = "tests"
    """Dataset column with the tests: Python statements as a string or a list of them, or a list of mappings of
    ``input`` and ``output``. A row where it is null or empty abstains."""
    partial: bool = False
    """Score the part of the tests that pass; else 1 if all do and 0 if not."""
    timeout_seconds: float = Field(5.0, gt=0)
    """Time for a completion with its statements, or for each of its inputs; what takes longer fails."""
    memory_mib: int = Field(512, ge=64)
    """Address space of the code, and of the tests."""
    processes: int | None = Field(None, ge=1)
    """Completions judged at a time on each rank; default: the rank's part of the CPU cores."""
    confinement: Literal["warn", "require"] = "warn"
    """Where the kernel denies a part of the confinement: tell it once, or refuse the run."""


class MathConfig(Parameters):
    """The parameters of math."""

    column: str = "answer"
    """Dataset column with the answer: a number, bare LaTeX, or text with it in $...$ or \\boxed{...}.
    A row where it is null or holds no expression abstains."""
    timeout_seconds: float = Field(5.0, gt=0)
    """Time allowed for one completion; one that takes longer scores 0 and counts in math/timeouts."""
