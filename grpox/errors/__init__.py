"""What a user is told: errors with their cause and cure, in plain words and without secrets."""

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
