"""Errors as a user reads them: the cause, the key and the cure, in plain words and without secrets.

`problem` has the exceptions and `Problem`, one mistake with its key, its value and what would be right.
`validation` turns pydantic's errors into problems, in words made of a field's type.
`redaction` masks secrets, by the names of their keys and by their form, in configs and in any text.
`formatting` writes numbers and lists. Imports neither pydantic nor torch.
"""

from grpox.errors.problem import (
    ALLOWED,
    TEXT,
    TRACE,
    WHAT,
    ConfigError,
    GrpoxError,
    Problem,
    RunFailed,
    chain,
    describe,
    join,
    left_by_rich,
    nearest,
    plain,
    shorten,
    text_of,
    traceback_of,
)
from grpox.errors.redaction import redact, redacted

__all__ = [
    "ALLOWED",
    "TEXT",
    "TRACE",
    "WHAT",
    "ConfigError",
    "GrpoxError",
    "Problem",
    "RunFailed",
    "chain",
    "describe",
    "join",
    "left_by_rich",
    "nearest",
    "plain",
    "redact",
    "redacted",
    "shorten",
    "text_of",
    "traceback_of",
]
