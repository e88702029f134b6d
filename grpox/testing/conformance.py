"""Base of all conformance suites: a component, checks of it, and the violations that they report.

A suite is a class whose ``test_*`` methods are the checks. Pytest runs those of a subclass whose name begins
with Test; `grpox.testing.runner` runs them for ``grpox plugins check``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, ClassVar, NamedTuple
from unittest import SkipTest

from grpox.errors import RunFailed
from grpox.plugins.component import BoundComponent
from grpox.plugins.component_state import NotPlain
from grpox.plugins.registry import Mention, bind, installed
from grpox.runtime.foreign_code import call
from grpox.testing.exceptions import swallowing_handlers
from grpox.testing.state import state_problem

SAME_AS = "test_same_as_reference"
"""The check that only a suite with a reference has."""


class Violation(AssertionError):
    """A component breaks its contract.

    Args:
        what: the violation in one sentence.
        example: the smallest input that shows it, as lines.
        advice: its meaning and the remedy.
    """

    def __init__(self, what: str, example: str = "", advice: str = "") -> None:
        super().__init__("\n".join(part for part in (what, example, advice) if part))
        self.what, self.example, self.advice = what, example, advice


def require(holds: bool, what: str, example: object = "", advice: str = "") -> None:
    """Raise a `Violation` unless a rule holds; `example` is written as text."""
    if not holds:
        raise Violation(what, str(example), advice)


def call_component(kind: str, function: Callable[..., Any], *arguments: Any, example: object = "") -> Any:
    """Call a method of a component as a run does; an exception of the method is a `Violation`."""
    try:
        return call(kind, function, *arguments)
    except RunFailed as error:
        raise Violation(str(error), str(example)) from error


class Check(NamedTuple):
    """One method of a suite."""

    name: str
    title: str
    """The first line of its docstring."""
    run: Callable[[], None]


class Conformance:
    """The base of the suites, one for each kind of component. A subclass names the component."""

    kind: ClassVar[str]
    component: ClassVar[Mention]
    reports_swallowed: ClassVar[bool] = False
    """A handler that hides every exception is a remark, and no violation."""

    @cached_property
    def notes(self) -> list[str]:
        """Remarks of a check on a component that passes."""
        return []  # not in __init__: pytest collects no class that has one

    @property
    def bound(self) -> BoundComponent:
        """The component with its parameters and capabilities.

        Raises:
            ConfigError: no such component, or the parameters do not fit.
        """
        return bind(self.kind, self.component)

    def build(self) -> Any:
        """Build a new instance of the component."""
        return installed().build(self.bound)

    @property
    def _formula(self) -> Callable[..., Any]:
        """The suite's `reference`; without one, the check that asks for it is skipped."""
        reference: Callable[..., Any] | None = getattr(type(self), "reference", None)
        if reference is None:
            raise SkipTest("no reference is given: see grpox.testing.same_as")
        return reference

    def test_exceptions(self) -> None:
        """Hides no exception of every type: a fault would look like a result."""
        handlers = list(swallowing_handlers(self.bound.load(), may_abstain=self.kind == "reward"))
        if handlers and self.reports_swallowed:
            self.notes.append(f"hides every exception at {'; '.join(map(str, handlers))}")
        elif handlers:
            what = f"it catches every exception and goes on, at {handlers[0].file}:{handlers[0].line}"
            advice = (
                "catch the exceptions that are expected, raise the others; where everything is meant, "
                "write the reason behind `# noqa: BLE001 -` in that line"
            )
            raise Violation(what, "\n".join(map(str, handlers)), advice)

    def test_state(self) -> None:
        """A component with state goes on alike in a new instance that loads it."""
        try:
            what, advice = state_problem(
                self.kind, self.build, self.bound.needs, getattr(self, "columns", None)
            )
        except NotPlain as error:
            raise Violation(str(error), advice="see grpox.contracts.Stateful") from error
        require(not what, what, advice=advice)

    @classmethod
    def teardown_class(cls) -> None:
        """Free the resources of the checks; pytest calls it too."""

    def checks(self) -> Iterator[Check]:
        """Yield the checks in the order of their definition; the first is that the component runs at all."""
        bases = [base for base in reversed(type(self).__mro__) if base is not Conformance]
        for name in dict.fromkeys(name for base in (*bases, Conformance) for name in vars(base)):
            is_off = name == SAME_AS and getattr(type(self), "reference", None) is None
            if name.startswith("test_") and not is_off:
                method = getattr(self, name)
                yield Check(name, (method.__doc__ or name).strip().partition("\n")[0].rstrip("."), method)
