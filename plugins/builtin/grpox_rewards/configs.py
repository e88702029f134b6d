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
    """Parameters of exact."""

    column: str = "answer"
    """Dataset column with the answer; the reward abstains on rows with null."""
    strip: bool = True
    """True: ignore white space at both ends."""
    ignore_case: bool = False
    """True: ignore upper and lower case."""


class RegexConfig(Parameters):
    """Parameters of regex."""

    pattern: str
    """Regular expression for Python's `re`. Nested repetition such as ``(a+)+`` can take practically
    forever."""
    match: float = 1.0
    """Score if the pattern matches."""
    no_match: float = 0.0
    """Score if the pattern does not match."""
    full: bool = False
    """True: the whole completion must match, not only a part of it."""
    ignore_case: bool = False
    """True: ignore upper and lower case (re.IGNORECASE)."""
    multiline: bool = False
    """True: ^ and $ match at every line (re.MULTILINE)."""
    dotall: bool = False
    """True: a dot also matches newlines (re.DOTALL)."""
    column: str | None = None
    """Dataset column that `group` of the first match must equal, ignoring white space at both ends; the reward
    abstains on rows with null. Default: no comparison."""
    group: int | str = 1
    """Number or name of the group to compare with `column`."""

    @property
    def flags(self) -> re.RegexFlag:
        """The three flags in the form of `re`."""
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
                raise ValueError("'group' needs 'column', the column to compare it with")
            return self
        compiled = re.compile(self.pattern)
        if self.group not in {*range(compiled.groups + 1), *compiled.groupindex}:
            raise ValueError(f"the pattern has no group {self.group!r} to compare with column '{self.column}'")
        return self


class LengthConfig(Parameters):
    """Parameters of length."""

    target: int = Field(ge=1)
    """Length with the best score, 0."""
    unit: Literal["tokens", "characters"] = "tokens"
    """Unit of length: tokens of the completion, including EOS, or characters of its text."""
    scale: Literal["relative", "absolute"] = "relative"
    """Scale of the distance to the target: relative divides it by the target, with a maximum of 1; absolute
    counts units."""


class SoftOverlongConfig(Parameters):
    """Parameters of soft_overlong."""

    max_length: int = Field(ge=1)
    """Length in tokens, including EOS, from which a completion scores -1; 20480 in the DAPO paper."""
    buffer: int = Field(ge=0)
    """Number of tokens before max_length over which the score falls from 0 to -1; 4096 in the DAPO paper."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.buffer > self.max_length:
            raise ValueError(f"'buffer' {self.buffer} is longer than 'max_length' {self.max_length}")
        return self


class FormatConfig(Parameters):
    """Parameters of format."""

    tags: list[str] = Field(default=["think", "answer"], min_length=1)
    """Names of the blocks in order: <think>...</think> <answer>...</answer>."""
    opened: bool = False
    """True: the prompt ends with the first opening tag, so the completion begins inside the block."""
    text_after: bool = False
    """True: any text may follow the last block. With tags [think] this is TRL's think_format_reward."""

    @field_validator("tags")
    @classmethod
    def _distinct(cls, tags: list[str]) -> list[str]:
        if len(set(tags)) < len(tags) or not all(tags):
            raise ValueError("each tag needs a different name")
        return tags


class RewardModelConfig(Parameters):
    """Parameters of reward_model."""

    model: ModelPath
    """Folder in Hugging Face format, or hub id, of a sequence-classification model with one output and its
    tokenizer."""
    batch_size: int = Field(8, ge=1)
    """Number of completions scored together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights; each rank has a whole copy."""
    max_length: int | None = Field(None, ge=1)
    """Longest text in tokens; tokens are removed from the start of a longer one. Default: the limit of model
    and tokenizer."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the tokenizer's chat template, used for conversational data."""


class CodeConfig(Parameters):
    """Parameters of code."""

    column: str = "tests"
    """Dataset column with the tests: Python statements as a string or a list of strings, or a list of mappings
    with ``input`` and ``output``. The reward abstains on rows with null or no tests."""
    partial: bool = False
    """True: the score is the fraction of passed tests; false: 1 if all tests pass, else 0."""
    timeout_seconds: float = Field(5.0, gt=0)
    """Time limit in seconds for a completion with its statements, or for each input; slower code fails."""
    memory_mib: int = Field(512, ge=64)
    """Largest address space in MiB of the code, and of the tests."""
    processes: int | None = Field(None, ge=1)
    """Number of completions judged at a time on each rank; default: the rank's share of the CPU cores."""
    confinement: Literal["warn", "require"] = "warn"
    """Handling of a kernel that denies a part of the confinement: warn once, or refuse the run."""


class MathConfig(Parameters):
    """Parameters of math."""

    column: str = "answer"
    """Dataset column with the answer: a number, bare LaTeX, or text with an expression in $...$ or
    \\boxed{...}. The reward abstains on rows with null or without an expression."""
    timeout_seconds: float = Field(5.0, gt=0)
    """Time limit in seconds for one completion; a slower one scores 0 and counts in math/timeouts."""
