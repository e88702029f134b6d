"""Contract of every optimizer factory, on small quadratics and on flat parts of parameters as ZeRO-3 has them.

from grpox.testing import OptimizerConformance

class TestMine(OptimizerConformance):
    component = "mine"
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pickle import UnpicklingError
from typing import Any, ClassVar
from unittest import SkipTest

import torch
from torch import Tensor, nn

from grpox.errors import RunFailed
from grpox.runtime.foreign_code import call
from grpox.testing.conformance import Conformance, Violation, require
from grpox.testing.devices import device_problem

SHAPES = ((3, 4), (4,), (2, 3))
"""Shapes of the parameters: two matrices and a bias."""
STEPS = 20


class OptimizerConformance(Conformance):
    """The checks of an optimizer factory."""

    kind = "optimizer"
    learning_rate: ClassVar[float] = 0.01

    def test_runs(self) -> None:
        """Builds a torch.optim.Optimizer that has every parameter once, at the run's learning rate."""
        parameters = _parameters()
        optimizer = self._build(parameters)
        present = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        require(len(present) == len(set(present)), "a parameter is in two groups")
        missing = [place for place, parameter in enumerate(parameters) if id(parameter) not in present]
        shapes = [SHAPES[place] for place in missing]
        require(
            not missing, f"it leaves out parameters of shapes {shapes}", advice="they would never be trained"
        )
        rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
        what = f"for a learning rate of {self.learning_rate:g} no group has it: {rates}"
        advice = "pass `learning_rate` on: the schedule multiplies what a group has as 'lr'"
        require(self.learning_rate in rates, what, advice=advice)
        if len(rates) > 1:
            self.notes.append(f"groups have learning rates {rates}")

    def test_direction(self) -> None:
        """Steps lower a quadratic, the first one against the gradient."""
        parameters = _parameters()
        optimizer = self._build(parameters)
        before, values = [each.detach().clone() for each in parameters], [_value(parameters)]
        for step in range(STEPS):
            _backward(parameters)
            gradients = [_gradient(each).clone() for each in parameters]
            optimizer.step()
            if step == 0:
                moves = [new.detach() - old for new, old in zip(parameters, before, strict=True)]
                along = sum(float((move * g).sum()) for move, g in zip(moves, gradients, strict=True))
                what = f"its first step goes along the gradient: their product is {along:.3g}"
                require(along < 0, what, advice="a step is minus the learning rate times the gradient")
            values.append(_value(parameters))
        what = f"{STEPS} steps took a quadratic from {values[0]:.4g} to {values[-1]:.4g}"
        require(values[-1] < values[0], what, advice="the loss is minimised")
        self.notes.append(what)

    def test_decay(self) -> None:
        """Makes no weight larger by itself: on gradients of 0 weights stay, or decay."""
        parameters = _parameters()
        optimizer = self._build(parameters)
        before = [each.detach().clone() for each in parameters]
        for _ in range(3):
            for each in parameters:
                each.grad = torch.zeros_like(each)
            optimizer.step()
        shrinks = all(bool((new.abs() <= old.abs()).all()) for new, old in zip(parameters, before, strict=True))
        advice = "weight decay multiplies by 1 - lr * decay"
        require(shrinks, "on gradients of 0 weights grow, or become NaN", advice=advice)

    def test_learning_rate(self) -> None:
        """Moves no weight at a learning rate of 0, which the schedule sets on the groups before a step."""
        parameters = _parameters()
        optimizer = self._build(parameters)
        before = [each.detach().clone() for each in parameters]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        _backward(parameters)
        optimizer.step()
        same = all(torch.equal(new, old) for new, old in zip(parameters, before, strict=True))
        advice = "read group['lr'] at each step: warm-up and decay set it there"
        require(same, "with group['lr'] = 0 it moves weights", advice=advice)

    def test_state(self) -> None:
        """Goes on bit by bit where a checkpoint of its state_dict was taken."""
        parameters = _parameters()
        optimizer = self._build(parameters)
        self._step(optimizer, parameters, 3)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        others = [nn.Parameter(each.detach().clone()) for each in parameters]
        resumed = self._build(others)
        try:
            resumed.load_state_dict(torch.load(file, weights_only=True))
        except UnpicklingError as error:
            what = f"a checkpoint cannot hold its state_dict: {' '.join(str(error).split())[:300]}"
            raise Violation(
                what, advice="keep tensors, numbers and texts in self.state and the groups"
            ) from error
        for each, own in ((optimizer, parameters), (resumed, others)):
            _step_on_fading(each, own)
        same = all(torch.equal(one, other) for one, other in zip(parameters, others, strict=True))
        advice = "keep what a step needs in self.state and the groups: state_dict() saves those"
        require(same, "after its state_dict is loaded, it takes other steps", advice=advice)

    def test_device(self) -> None:
        """Keeps its state on the device of the parameters."""
        problem, remark = device_problem(self._step_elsewhere)
        require(not problem, problem, advice="use torch.zeros_like(parameter)")
        self.notes.append(remark)

    def _step_elsewhere(self, move: Callable[[Tensor], Tensor]) -> list[Tensor]:
        parameters = [move(each.detach()).requires_grad_() for each in _parameters()]
        optimizer = self._build(parameters)
        for _ in range(2):
            for each in parameters:
                each.grad = each.detach().clone()
            optimizer.step()
        return [each.detach() for each in parameters]

    def test_partitions(self) -> None:
        """Takes the same steps on the flat parts of parameters that ZeRO-3 gives each rank."""
        if getattr(self.build(), "elementwise", True) is False:
            raise SkipTest("it declares elementwise = False: its steps depend on the number of ranks")
        whole = _parameters()
        optimizer = self._build(whole)
        self._step(optimizer, whole, 3)
        for ranks in (1, 2):
            result = self._on_ranks(ranks)
            for place, (one, other) in enumerate(zip(whole, result, strict=True)):
                advice = (
                    "under ZeRO-3 a rank has a flat part of a group's parameters: a step that uses shapes, or "
                    "norms of whole parameters, differs there; who accepts that declares elementwise = False"
                )
                what = f"on {ranks} rank{'s' * (ranks > 1)} it takes other steps than on whole parameters"
                example = f"parameter of shape {SHAPES[place]}\nwhole {one.tolist()}\nparts {other.tolist()}"
                require(torch.allclose(one, other, rtol=1e-4, atol=1e-6), what, example, advice)

    def _on_ranks(self, ranks: int) -> list[Tensor]:
        """Take three steps as ZeRO-3 does: the parameters of a group in a row, cut into equal parts."""
        parameters = _parameters()
        parts = [self._steps_of_rank(parameters, rank, ranks) for rank in range(ranks)]
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        result: list[Tensor] = [torch.empty(0)] * len(parameters)
        for number, group in enumerate(self._build(parameters).param_groups):
            flat, start = torch.cat([rank[number] for rank in parts]), 0
            for parameter in group["params"]:
                end = start + parameter.numel()
                result[places[id(parameter)]] = flat[start:end].view(parameter.shape)
                start = end
        return result

    def _steps_of_rank(self, parameters: Sequence[nn.Parameter], rank: int, ranks: int) -> list[Tensor]:
        """Take the steps of one rank, one group at a time, the others empty; returns each group's flat part."""
        optimizer = self._build(parameters)
        parts = [_part(group["params"], rank, ranks) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []
        for group, part in list(zip(optimizer.param_groups, parts, strict=True)) * 3:
            part.grad = part.detach().clone()  # of the quadratic
            group["params"] = [part]
            try:
                optimizer.step()
            except Exception as error:
                what = f"it fails on a flat part of parameters: {type(error).__name__}: {error}"
                raise Violation(what, f"a part of {tuple(part.shape)}") from error
            group["params"] = []
        return [part.detach() for part in parts]

    def _build(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        try:
            optimizer: Any = call("optimizer", self.build().build, list(parameters), self.learning_rate)
        except RunFailed as error:
            raise Violation(str(error)) from error
        what = f"it builds a {type(optimizer).__name__}, not a torch.optim.Optimizer"
        require(isinstance(optimizer, torch.optim.Optimizer), what)
        return optimizer  # type: ignore[no-any-return]

    def _step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], steps: int) -> None:
        for _ in range(steps):
            _backward(parameters)
            optimizer.step()


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(1 + torch.rand(shape, generator=generator)) for shape in SHAPES]


def _value(parameters: Sequence[Tensor]) -> float:
    """Compute the quadratic, half the sum of squares."""
    return sum(float(each.detach().square().sum()) for each in parameters) / 2


def _backward(parameters: Sequence[nn.Parameter]) -> None:
    for each in parameters:
        each.grad = each.detach().clone()


def _step_on_fading(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Take steps on gradients of both signs that fade, so that what is remembered decides."""
    generator = torch.Generator().manual_seed(1)
    for size in (1.0, 0.1, 0.01, 0.001):
        for each in parameters:
            each.grad = size * torch.randn(each.shape, generator=generator)
        optimizer.step()


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _part(parameters: Sequence[Tensor], rank: int, ranks: int) -> nn.Parameter:
    """Cut a rank's part out of the parameters of a group, one after the other and padded with zeros."""
    flat = torch.cat([each.detach().flatten() for each in parameters])
    size = -(-len(flat) // ranks)
    flat = torch.nn.functional.pad(flat, (0, size * ranks - len(flat)))
    return nn.Parameter(flat[rank * size : (rank + 1) * size].clone())
