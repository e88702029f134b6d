"""Contract of every learning-rate schedule, followed over whole runs.

from grpox.testing import SchedulerConformance

class TestMine(SchedulerConformance):
    component = "mine"
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import SkipTest

import torch

from grpox.errors import RunFailed
from grpox.runtime.foreign_code import call
from grpox.testing.conformance import Conformance, Violation, require


class SchedulerConformance(Conformance):
    """The checks of a scheduler factory."""

    kind = "scheduler"
    total_steps: ClassVar[int] = 12
    learning_rate: ClassVar[float] = 0.5
    reference: ClassVar[Callable[[int, int], float] | None] = None
    """The formula: (steps done, total steps) -> factor of the learning rate."""

    def test_runs(self) -> None:
        """Has step, state_dict and load_state_dict, and gives finite rates from 0 for every step of a run."""
        for steps in (self.total_steps, 10 * self.total_steps):
            rates = self._rates(steps)
            example = f"total_steps {steps}\nrates {_text(rates)}"
            sound = all(math.isfinite(rate) and rate >= 0 for rate in rates)
            require(sound, "a learning rate is not finite and at least 0", example)
            what = "every step of the run has learning rate 0"
            require(any(rate > 0 for rate in rates[:-1]), what, example, "nothing would be trained")
            zeros = [step for step, rate in enumerate(rates[:-1], start=1) if rate == 0]
            what = f"{len(zeros)} of {steps} steps have learning rate 0"
            require(len(zeros) <= max(1, steps // 4), what, example, "they train nothing")
        self.notes.append(
            f"rates of {self.total_steps} steps, of {self.learning_rate:g}: {_text(self._rates())}"
        )

    def test_learning_rate(self) -> None:
        """Starts from the learning rate of the run, and never exceeds it unless it declares so."""
        optimizer = self._optimizer()
        self._build(optimizer, self.total_steps)
        base = float(optimizer.param_groups[0].get("initial_lr", self.learning_rate))
        what = f"it takes {base:.4g} for the learning rate of the run, which is {self.learning_rate:g}"
        require(
            base == self.learning_rate, what, advice="change no group of the optimizer before the first step"
        )
        rates = self._rates()
        if getattr(self.build(), "exceeds", False):
            self.notes.append("it declares exceeds = True")
            return
        what = f"the largest rate is {max(rates):.4g}, more than the run's learning rate {self.learning_rate:g}"
        advice = (
            "a schedule multiplies the learning rate by at most 1; one that goes above declares exceeds = True"
        )
        require(max(rates) <= self.learning_rate * (1 + 1e-6), what, f"rates {_text(rates)}", advice)

    def test_same_as_reference(self) -> None:
        """Is the formula of the reference, at every step."""
        reference = type(self).reference
        if reference is None:
            raise SkipTest("no reference is given")
        for steps in (1, self.total_steps, 10 * self.total_steps):
            for step, rate in enumerate(self._rates(steps)[:-1]):
                wanted = self.learning_rate * reference(step, steps)
                of_reference = f"that of the reference {wanted:.6g}"
                what = f"after {step} of {steps} steps its rate is {rate:.6g}, and {of_reference}"
                require(math.isclose(rate, wanted, rel_tol=1e-6, abs_tol=1e-9), what)

    def test_groups(self) -> None:
        """Treats every group of parameters alike."""
        optimizer = self._optimizer(groups=2)
        scheduler = self._build(optimizer, self.total_steps)
        for step in range(self.total_steps):
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            require(len(set(rates)) == 1, f"before step {step + 1} two groups have rates {rates}")
            optimizer.step()
            scheduler.step()

    def test_restart(self) -> None:
        """Gives the same rates after a restart at every step: from its state_dict and the optimizer's."""
        whole = self._rates()
        for step in range(self.total_steps):
            optimizer = self._optimizer()
            scheduler = self._build(optimizer, self.total_steps)
            for _ in range(step):
                optimizer.step()
                scheduler.step()
            states = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
            other = self._optimizer()
            resumed = self._build(other, self.total_steps)
            other.load_state_dict(states[0])
            resumed.load_state_dict(states[1])
            rates = [*whole[:step], *self._follow(other, resumed, self.total_steps - step)]
            what = f"restarted after step {step}, it gives other rates"
            example = f"at once   {_text(whole)}\nrestarted {_text(rates)}"
            advice = "state_dict() has all that the next rates depend on"
            require(rates == whole, what, example, advice)

    def test_repeats(self) -> None:
        """Gives the same rates in a second run."""
        first, second = self._rates(), self._rates()
        require(first == second, "a second run has other rates", f"{_text(first)}\n{_text(second)}")

    def _rates(self, steps: int | None = None) -> list[float]:
        """List the learning rate of each step, and the one after the last."""
        optimizer = self._optimizer()
        count = steps or self.total_steps
        return self._follow(optimizer, self._build(optimizer, count), count)

    def _follow(self, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        rates = [float(optimizer.param_groups[0]["lr"])]
        for step in range(steps):
            optimizer.step()
            try:
                scheduler.step()
            except Exception as error:
                what = f"step {step + 1} of {steps} raises {type(error).__name__}: {error}"
                raise Violation(what, advice="it is called once after each of total_steps steps") from error
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    def _optimizer(self, groups: int = 1) -> torch.optim.Optimizer:
        parameters = [{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(groups)]
        optimizer = torch.optim.SGD(parameters, lr=self.learning_rate)
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(1)
        return optimizer

    def _build(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        try:
            scheduler = call("scheduler", self.build().build, optimizer, steps)
        except RunFailed as error:
            raise Violation(str(error), f"total_steps {steps}") from error
        for name in ("step", "state_dict", "load_state_dict"):
            what = f"it builds a {type(scheduler).__name__}, which has no method {name}"
            advice = "return a torch.optim.lr_scheduler.LRScheduler, such as LambdaLR"
            require(callable(getattr(scheduler, name, None)), what, advice=advice)
        return scheduler


def _text(rates: list[float]) -> str:
    return "  ".join(f"{rate:.4g}" for rate in rates)
