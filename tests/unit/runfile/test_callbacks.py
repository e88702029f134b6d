"""Callbacks of `grpox.Run`: objects with the methods of an observer, and objects that have none."""

from typing import Any

import pytest
from support.problems import refused

from grpox import hookimpl
from grpox.errors import ConfigError
from grpox.training.arguments import read_callbacks


class Named:
    def grpox_step_finished(self, step: int) -> None:
        """Its name makes it a hook."""


class Marked:
    @hookimpl(tryfirst=True)
    def grpox_step_finished(self, step: int) -> None:
        """Keeps its own options."""


class OfTransformers:
    def on_step_end(self, args: Any, state: Any, control: Any) -> None:
        """A callback of another library."""


class WrongArgument:
    def grpox_step_finished(self, stepp: int) -> None:
        """Misspelled."""


def test_methods_are_hooks_by_their_names() -> None:
    named, marked = Named(), Marked()
    assert read_callbacks([named, marked]) == (named, marked)
    assert Named.grpox_step_finished.grpox_impl["tryfirst"] is False  # type: ignore[attr-defined]
    assert Marked.grpox_step_finished.grpox_impl["tryfirst"] is True  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="a list of objects"):
        read_callbacks(Named())


@pytest.mark.parametrize(
    ("callback", "what", "near"),
    [
        (OfTransformers(), "has none of the methods of an observer", "grpox_step_finished"),
        (print, "has none of the methods of an observer", ""),
        (Named, "is the class Named", ""),
        (WrongArgument(), "stepp", ""),
    ],
)
def test_what_is_no_callback(callback: Any, what: str, near: str) -> None:
    [problem] = refused(read_callbacks, [Named(), callback])
    assert (problem.where, problem.key) == ("Run()", "callbacks[1]")
    assert what in problem.what
    assert problem.nearest == near
