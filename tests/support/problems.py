"""The problem of a call that is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from grpox.errors import ConfigError, Problem


def problem_of(call: Callable[..., object], *arguments: Any, **options: Any) -> Problem:
    """Return the only problem of the ConfigError that a call raises."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **options)
    [problem] = caught.value.problems
    return problem
