"""Bases of the conformance suites: a component, checks of it, and the violations that they report.

A suite is a class whose ``test_*`` methods are the checks. Pytest runs those of a subclass whose name begins
with Test; `grpox.testing.runner` runs them for ``grpox plugins check``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, ClassVar, NamedTuple
from unittest import SkipTest

import torch
from torch import Tensor

from grpox.errors import RunFailed
from grpox.plugins.component import BoundComponent
from grpox.plugins.component_state import NotPlain
from grpox.plugins.registry import Mention, bind, installed
from grpox.runtime.foreign_code import call
from grpox.testing.devices import device_problem
from grpox.testing.interruption import hidden_line
from grpox.testing.loss_examples import mapped, random_numbers, tensors_of
from grpox.testing.state import state_problems

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

    def _exercise(self) -> object:
        """Build the component and use it once; without a way to, the check of exceptions is skipped."""
        raise SkipTest("an exception of this kind of component may stand for a result")

    def test_exceptions(self) -> None:
        """Hides no exception of every type: a fault would look like a result."""
        line = hidden_line(self.bound.load(), self._exercise)
        what, advice = (
            f"it catches every exception and goes on: one that was raised at {line} is lost",
            (
                "catch the exceptions that are expected, raise the others; where everything is meant, "
                "write the reason behind `# noqa: BLE001 -` in the line of the handler"
            ),
        )
        require(not line, what, advice=advice)

    def test_state(self) -> None:
        """A component with state goes on alike in a new instance that loads it."""
        columns = getattr(self, "columns", None)
        try:
            for what, advice in state_problems(self.kind, self.build, self.bound.needs, columns):
                raise Violation(what, advice=advice)
        except NotPlain as error:
            raise Violation(str(error), advice="see grpox.contracts.Stateful") from error

    @classmethod
    def teardown_class(cls) -> None:
        """Free the resources of the checks; pytest calls it too."""

    def checks(self) -> Iterator[Check]:
        """Yield the checks in the order of their definition; the first is that the component runs at all."""
        off = {SAME_AS} if getattr(type(self), "reference", None) is None else set()
        if type(self)._exercise is Conformance._exercise:
            off.add("test_exceptions")
        bases = [base for base in reversed(type(self).__mro__) if base not in (Conformance, TensorConformance)]
        names = (name for base in (*bases, TensorConformance, Conformance) for name in vars(base))
        for name in dict.fromkeys(names):
            if name.startswith("test_") and hasattr(self, name) and name not in off:
                method = getattr(self, name)
                yield Check(name, (method.__doc__ or name).strip().partition("\n")[0].rstrip("."), method)


class TensorConformance(Conformance):
    """The base of the suites of components that compute tensors from tensors."""

    _results: ClassVar[str]
    """A noun in the plural for what it returns."""
    _may_draw: ClassVar[bool] = True
    """It may draw from the global random numbers."""
    _device_advice: ClassVar[str]
    _tolerances: ClassVar[tuple[float, float]] = (1e-9, 1e-12)
    """Relative and absolute difference of sums in another order, of float64."""

    def _cases(self) -> list[Any]:
        """List inputs, dataclasses of tensors, from the smallest up."""
        raise NotImplementedError

    def _values(self, component: Any, inputs: Any) -> list[Tensor]:
        """Call the component; returns its results, 0 where masked."""
        raise NotImplementedError

    def _shown(self, inputs: Any) -> str:
        """Write the inputs as text."""
        return str(inputs)

    def _copy(self, inputs: Any) -> Any:
        """Copy the inputs, so that the component can be called on them."""
        return mapped(inputs, torch.clone)

    def _exercise(self) -> object:
        return self._values(self.build(), self._cases()[-1])

    def _check_same(
        self, inputs: Any, other: Any, part: Any, what: str, advice: str, example: Any = None
    ) -> None:
        """Check that the results on inputs are `part`, an index, of those on others.

        Args:
            example: the inputs to show; default: the first.
        """
        pairs = zip(self._values(self.build(), inputs), self._values(self.build(), other), strict=True)
        same = all(torch.allclose(one, two[part], *self._tolerances) for one, two in pairs)
        require(same, what, self._shown(inputs if example is None else example), advice)

    def test_pure(self) -> None:
        """Returns the same bits twice, and leaves its inputs as they are."""
        for inputs in self._cases():
            component, copied, before = self.build(), self._copy(inputs), random_numbers()
            first = self._values(component, copied)
            for name, tensor in tensors_of(inputs).items():
                advice = f"the core uses {name} again: copy it before an in-place operation (x.mul_, x[...] =)"
                same = torch.equal(tensor, getattr(copied, name))
                require(same, f"it changes inputs.{name} in place", self._shown(inputs), advice)
            again = self._values(self._after_a_call(component), copied)
            advice = "draw nothing at random and keep nothing from one call to the next"
            what = f"called twice on the same inputs, it returned two {self._results}"
            require(all(map(torch.equal, first, again)), what, self._shown(inputs), advice)
            advice = "the trainer's draws would depend on it: use a torch.Generator of its own"
            same = self._may_draw or random_numbers() == before
            require(same, "it draws from the global random numbers", self._shown(inputs), advice)

    def _after_a_call(self, component: Any) -> Any:
        """Return the component for a second call, or another one if a call changes its state."""
        return component

    def test_call_order(self) -> None:
        """Returns the same for a batch whatever it was called on before."""
        component, cases = self.build(), self._cases()
        if hasattr(component, "state_dict"):
            raise SkipTest("it has a state")
        first = [self._values(self.build(), inputs) for inputs in cases]
        for inputs, before in reversed(list(zip(cases, first, strict=True))):
            same = all(map(torch.equal, self._values(component, inputs), before))
            advice = "keep nothing from one call to the next, or return it from state_dict()"
            what = f"after calls on other batches it returns other {self._results}"
            require(same, what, self._shown(inputs), advice)

    def test_device(self) -> None:
        """Creates its tensors on the device of its inputs."""
        inputs = self._cases()[-1]
        problem, remark = device_problem(lambda move: self._values(self.build(), mapped(inputs, move)))
        require(not problem, problem, self._shown(inputs), self._device_advice)
        self.notes.append(remark)
