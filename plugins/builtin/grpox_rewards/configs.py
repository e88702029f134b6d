"""Parameters of the built-in rewards."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

STRICT = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ExactConfig(BaseModel):
    """The parameters of exact."""

    model_config = STRICT

    column: str = "answer"
    """Dataset column with the answer; a row where it is null abstains."""
    strip: bool = True
    """Ignore white space at both ends."""
    ignore_case: bool = False
    """Compare without regard to case."""


class RegexConfig(BaseModel):
    """The parameters of regex."""

    model_config = STRICT

    pattern: str
    """A regular expression of Python's `re`. Nested repetition such as ``(a+)+`` can take for ever."""
    match: float = 1.0
    """Score where it matches."""
    no_match: float = 0.0
    """Score where it does not."""
    full: bool = False
    """The whole completion must match, not just a part of it."""
    ignore_case: bool = False
    """re.IGNORECASE"""
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


class LengthConfig(BaseModel):
    """The parameters of length."""

    model_config = STRICT

    target: int = Field(ge=1)
    """Length that scores 0, the best; lengths of 0 and of twice the target and more score -1."""
    unit: Literal["tokens", "characters"] = "tokens"
    """What is counted: the completion's tokens, its ending EOS included, or the characters of its text."""


class MathConfig(BaseModel):
    """The parameters of math."""

    model_config = STRICT

    column: str = "answer"
    """Dataset column with the answer: a number, bare LaTeX, or text with it in $...$ or \\boxed{...}.
    A row where it is null or holds no expression abstains."""
    timeout_seconds: float = Field(5.0, gt=0)
    """Time allowed for one completion; one that takes longer scores 0 and counts in math/timeouts."""
