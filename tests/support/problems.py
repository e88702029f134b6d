"""The problems of a call that is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from grpox.errors import ConfigError, Problem


def refused(call: Callable[..., object], *arguments: Any, **options: Any) -> list[Problem]:
    """Return the problems of the ConfigError that a call must raise."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **options)
    return list(caught.value.problems)


def problem_of(call: Callable[..., object], *arguments: Any, **options: Any) -> Problem:
    """Return the only problem of the ConfigError that a call must raise."""
    [problem] = refused(call, *arguments, **options)
    return problem
