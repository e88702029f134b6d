"""Contracts of the parts that a training run is built from: datasets, optimizer factories and schedules.

A dataset gives the same prompts and columns in each process. An optimizer steps on small quadratics, and on
flat parts of parameters as ZeRO-3 has them. A schedule is followed over whole runs.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, zip_longest
from pickle import UnpicklingError
from typing import Any, ClassVar
from unittest import SkipTest

import torch
from torch import Tensor, nn

from grpox.data.unusable_columns import REWARD_ARGUMENTS
from grpox.plugins.component_state import odd_part
from grpox.plugins.registry import Mention, bind, installed
from grpox.testing.conformance import Conformance, Violation, call_component, require
from grpox.testing.devices import device_problem

ROWS = 200
"""Rows that are looked at, the first of the dataset."""
IN_ANOTHER_PROCESS = (
    "import sys, json; from grpox.testing.training_parts import digest_of\n"
    "print(digest_of(json.loads(sys.argv[1])))"
)
SHAPES = ((3, 4), (4,), (2, 3))
"""Shapes of the parameters: two matrices and a bias."""
STEPS = 20


class DatasetConformance(Conformance):
    """The checks of a dataset component."""

    kind = "dataset"
    prompt_column: ClassVar[str] = "prompt"
    """As `data.prompt_column` of a run file."""

    def test_runs(self) -> None:
        """Loads a datasets.Dataset or IterableDataset that has rows and the prompt column."""
        rows = _rows_of(self.build())
        require(bool(rows), "it loads no row")
        column, columns = self.prompt_column, list(rows[0])
        advice = "name its column in the suite's `prompt_column`, as in data.prompt_column of a run file"
        require(column in columns, f"it has no column '{column}' but {', '.join(columns)}", advice=advice)
        others = ", ".join(name for name in columns if name != column) or "none"
        self.notes.append(f"{len(rows)} rows read; columns beside the prompt: {others}")

    def test_prompts(self) -> None:
        """Every prompt is a text that is not empty, or messages with role and content, alike in all rows."""
        sorts = set()
        for place, row in enumerate(_rows_of(self.build())):
            prompt: Any = row.get(self.prompt_column)
            example = f"row {place}: {prompt!r:.100}"
            is_list = isinstance(prompt, Sequence) and len(prompt) > 0
            is_prompt = is_list and (
                isinstance(prompt, str)
                or all(isinstance(each, Mapping) and {"role", "content"} <= each.keys() for each in prompt)
            )
            require(is_prompt, "a prompt is neither text nor messages", example)
            sorts.add(type(prompt).__name__)
            require(len(sorts) == 1, f"prompts are of {' and '.join(sorted(sorts))}", example)

    def test_columns(self) -> None:
        """Columns are the same in all rows, of plain values, and none has the name of a reward's argument."""
        rows = _rows_of(self.build())
        for place, row in enumerate(rows):
            require(row.keys() == rows[0].keys(), f"row {place} has columns {sorted(row)}", sorted(rows[0]))
            for name, value in row.items():
                what = f"column '{name}' has a {type(value).__name__}"
                advice = "rewards get numbers, texts, None, and lists and dicts of these"
                require(odd_part(value, is_a=isinstance) is None, what, f"row {place}", advice)
        for name in sorted({*REWARD_ARGUMENTS} & rows[0].keys() - {self.prompt_column}):
            what = f"column '{name}' has the name of an argument that rewards are given"
            raise Violation(what, advice="rename it")

    def test_same_rows(self) -> None:
        """Loads the same rows a second time, and reads them a second time."""
        source = self.build()
        first, again = _rows_of(source), _rows_of(source)
        advice = "seed what is drawn at random, and keep no iterator from one call to the next"
        for what, rows in (("loaded again", again), ("built and loaded again", _rows_of(self.build()))):
            for place, (one, other) in enumerate(zip_longest(first, rows)):
                example = f"row {place}: {one!r:.100}\nthen   {other!r:.100}"
                require(one == other, f"{what}, it has other rows", example, advice)

    def test_other_process(self) -> None:
        """Loads the same rows in another process, as a second rank of a run does."""
        mention = json.dumps(self.component if isinstance(self.component, str) else dict(self.component))
        variables = {**os.environ, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "PYTHONHASHSEED": "77"}
        command = [sys.executable, "-c", IN_ANOTHER_PROCESS, mention]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
        last = (done.stderr.strip().splitlines() or [""])[-1]
        require(done.returncode == 0, f"on rank 1 it fails: {last}")
        same = done.stdout.splitlines()[-1:] == [digest_of(self.component)]
        advice = "its rows depend on the process: hash(), a set's order, the time, or a seed that is not fixed"
        require(same, "on rank 1 it has other rows than on rank 0", advice=advice)

    def _exercise(self) -> object:
        return _rows_of(self.build())


def digest_of(mention: Mention) -> str:
    """Hash the first rows of a dataset component."""
    rows = _rows_of(installed().build(bind("dataset", mention)))
    return hashlib.sha256(repr([sorted(row.items()) for row in rows]).encode()).hexdigest()


def _rows_of(source: Any) -> list[Mapping[str, Any]]:
    """Load the dataset and read its first rows."""
    import datasets

    loaded = call_component("dataset", source.load)
    what = f"load() returned a {type(loaded).__name__}"
    advice = "return a datasets.Dataset, such as Dataset.from_list(rows), or an IterableDataset"
    require(isinstance(loaded, datasets.Dataset | datasets.IterableDataset), what, advice=advice)
    try:
        return [dict(row) for row in islice(loaded, ROWS)]
    except Exception as error:
        raise Violation(f"reading a row raises {type(error).__name__}: {error}") from error


class OptimizerConformance(Conformance):
    """The checks of an optimizer factory."""

    kind = "optimizer"
    learning_rate: ClassVar[float] = 0.01

    def test_runs(self) -> None:
        """Builds a torch.optim.Optimizer that has every parameter once, at the run's learning rate."""
        optimizer, parameters = self._start()
        present = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        require(len(present) == len(set(present)), "a parameter is in two groups")
        shapes = [tuple(parameter.shape) for parameter in parameters if id(parameter) not in present]
        what = f"it leaves out parameters of shapes {shapes}"
        require(not shapes, what, advice="they would never be trained")
        rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
        what = f"for a learning rate of {self.learning_rate:g} no group has it: {rates}"
        advice = "pass `learning_rate` on: the schedule multiplies what a group has as 'lr'"
        require(self.learning_rate in rates, what, advice=advice)
        if len(rates) > 1:
            self.notes.append(f"groups have learning rates {rates}")

    def test_direction(self) -> None:
        """Steps lower a quadratic, the first one against the gradient."""
        optimizer, parameters = self._start()
        before = copy.deepcopy(parameters)
        _take_steps(optimizer, parameters, 1)
        # The gradient is the parameter itself.
        along = sum(((new - old) * old).sum().item() for new, old in zip(parameters, before, strict=True))
        what = f"its first step goes along the gradient: their product is {along:.3g}"
        require(along < 0, what, advice="a step is minus the learning rate times the gradient")
        _take_steps(optimizer, parameters, STEPS - 1)
        first, last = (sum(each.square().sum().item() for each in them) / 2 for them in (before, parameters))
        what = f"{STEPS} steps took a quadratic from {first:.4g} to {last:.4g}"
        require(last < first, what, advice="the loss is minimised")
        self.notes.append(what)

    def test_decay(self) -> None:
        """Makes no weight larger by itself: on gradients of 0 weights stay, or decay."""
        optimizer, parameters = self._start()
        before = copy.deepcopy(parameters)
        _take_steps(optimizer, parameters, 3, torch.zeros_like)
        shrinks = all(bool((new.abs() <= old.abs()).all()) for new, old in zip(parameters, before, strict=True))
        advice = "weight decay multiplies by 1 - lr * decay"
        require(shrinks, "on gradients of 0 weights grow, or become NaN", advice=advice)

    def test_learning_rate(self) -> None:
        """Moves no weight at a learning rate of 0, which the schedule sets on the groups before a step."""
        optimizer, parameters = self._start()
        before = copy.deepcopy(parameters)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        _take_steps(optimizer, parameters, 1)
        advice = "read group['lr'] at each step: warm-up and decay set it there"
        require(_are_equal(parameters, before), "with group['lr'] = 0 it moves weights", advice=advice)

    def test_state(self) -> None:
        """Goes on bit by bit where a checkpoint of its state_dict was taken."""
        optimizer, parameters = self._start()
        _take_steps(optimizer, parameters, 3)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        resumed, others = self._start(copy.deepcopy(parameters))
        try:
            resumed.load_state_dict(torch.load(file, weights_only=True))
        except UnpicklingError as error:
            what = f"a checkpoint cannot hold its state_dict: {' '.join(str(error).split())[:300]}"
            advice = "keep tensors, numbers and texts in self.state and the groups"
            raise Violation(what, advice=advice) from error
        _take_steps(optimizer, parameters, 4, _fading_gradients())
        _take_steps(resumed, others, 4, _fading_gradients())
        advice = "keep what a step needs in self.state and the groups: state_dict() saves those"
        same = _are_equal(parameters, others)
        require(same, "after its state_dict is loaded, it takes other steps", advice=advice)

    def test_device(self) -> None:
        """Keeps its state on the device of the parameters."""

        def run(move: Callable[[Tensor], Tensor]) -> list[Tensor]:
            optimizer, parameters = self._start(move(each.detach()).requires_grad_() for each in _parameters())
            _take_steps(optimizer, parameters, 2)
            return [each.detach() for each in parameters]

        problem, remark = device_problem(run)
        require(not problem, problem, advice="use torch.zeros_like(parameter)")
        self.notes.append(remark)

    def test_partitions(self) -> None:
        """Takes the same steps on the flat parts of parameters that ZeRO-3 gives each rank."""
        if getattr(self.build(), "elementwise", True) is False:
            raise SkipTest("it declares elementwise = False: its steps depend on the number of ranks")
        optimizer, whole = self._start()
        _take_steps(optimizer, whole, 3)
        advice = (
            "under ZeRO-3 a rank has a flat part of a group's parameters: a step that uses shapes, or "
            "norms of whole parameters, differs there; who accepts that declares elementwise = False"
        )
        for ranks in (1, 2):
            what = f"on {ranks} rank{'s' * (ranks > 1)} it takes other steps than on whole parameters"
            for one, other in zip(whole, self._on_ranks(ranks), strict=True):
                example = f"parameter of shape {tuple(one.shape)}\nwhole {one.tolist()}\nparts {other.tolist()}"
                require(torch.allclose(one, other, rtol=1e-4, atol=1e-6), what, example, advice)

    def _exercise(self) -> object:
        return self._on_ranks(1)

    def _on_ranks(self, ranks: int) -> list[Tensor]:
        """Take three steps as ZeRO-3 does: the parameters of a group in a row, cut into equal parts."""
        parameters, result = _parameters(), dict[int, Tensor]()
        parts = [self._steps_of_rank(parameters, rank, ranks) for rank in range(ranks)]
        for group, *flat in zip(self._start(parameters)[0].param_groups, *parts, strict=True):
            sizes = [each.numel() for each in group["params"]]
            values = torch.cat(flat)[: sum(sizes)].split_with_sizes(sizes)
            result |= dict(zip(map(id, group["params"]), values, strict=True))
        return [result[id(each)].view(each.shape) for each in parameters]

    def _steps_of_rank(self, parameters: Sequence[Tensor], rank: int, ranks: int) -> list[Tensor]:
        """Take the steps of one rank, one group at a time, the others empty; returns each group's flat part."""
        optimizer, parts = self._start(parameters)[0], []
        for group in optimizer.param_groups:
            flat = torch.cat([each.detach().flatten() for each in group["params"]])
            flat = nn.functional.pad(flat, (0, -len(flat) % ranks))
            parts.append(nn.Parameter(flat.view(ranks, -1)[rank].clone()))
            group["params"] = []
        for group, part in list(zip(optimizer.param_groups, parts, strict=True)) * 3:
            group["params"] = [part]
            try:
                _take_steps(optimizer, [part], 1)
            except Exception as error:
                what = f"it fails on a flat part of parameters: {type(error).__name__}: {error}"
                raise Violation(what, f"a part of {tuple(part.shape)}") from error
            group["params"] = []
        return [part.detach() for part in parts]

    def _start(self, parameters: Iterable[Tensor] = ()) -> tuple[torch.optim.Optimizer, list[Tensor]]:
        """Build the optimizer of some parameters, by default new ones, and return both."""
        tensors: list[Tensor] = list(parameters) or [*_parameters()]
        optimizer = call_component("optimizer", self.build().build, list(tensors), self.learning_rate)
        what = f"it builds a {type(optimizer).__name__}, not a torch.optim.Optimizer"
        require(isinstance(optimizer, torch.optim.Optimizer), what)
        return optimizer, tensors


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(1 + torch.rand(shape, generator=generator)) for shape in SHAPES]


def _take_steps(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    steps: int,
    gradient: Callable[[Tensor], Tensor] = torch.clone,
) -> None:
    """Take steps, by default on the quadratic, half the sum of squares: each parameter is its own gradient."""
    for _ in range(steps):
        for each in parameters:
            each.grad = gradient(each.detach())
        optimizer.step()


def _fading_gradients() -> Callable[[Tensor], Tensor]:
    """Return gradients of both signs for four steps, which fade, so that what is remembered decides."""
    generator = torch.Generator().manual_seed(1)
    sizes = iter([size for size in (1.0, 0.1, 0.01, 0.001) for _ in SHAPES])
    return lambda parameter: next(sizes) * torch.randn(parameter.shape, generator=generator)


def _are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


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
            example, zeros = f"total_steps {steps}\nrates {_text(rates)}", rates[:-1].count(0)
            sound = all(math.isfinite(rate) and rate >= 0 for rate in rates)
            require(sound, "a learning rate is not finite and at least 0", example)
            what = "every step of the run has learning rate 0"
            require(zeros < steps, what, example, "nothing would be trained")
            what = f"{zeros} of {steps} steps have learning rate 0"
            require(zeros <= max(1, steps // 4), what, example, "they train nothing")
        text = _text(self._rates())
        self.notes.append(f"rates of {self.total_steps} steps, of {self.learning_rate:g}: {text}")

    def test_learning_rate(self) -> None:
        """Starts from the learning rate of the run, and never exceeds it unless it declares so."""
        own, rates = self.learning_rate, self._rates()
        base = float(self._start()[0].param_groups[0].get("initial_lr", own))
        what = f"it takes {base:.4g} for the learning rate of the run, which is {own:g}"
        require(base == own, what, advice="change no group of the optimizer before the first step")
        if getattr(self.build(), "exceeds", False):
            self.notes.append("it declares exceeds = True")
            return
        what = f"the largest rate is {max(rates):.4g}, more than the run's learning rate {own:g}"
        advice = "a schedule multiplies the learning rate by at most 1, or declares exceeds = True"
        require(max(rates) <= own * (1 + 1e-6), what, f"rates {_text(rates)}", advice)

    def test_same_as_reference(self) -> None:
        """Is the formula of the reference, at every step."""
        for steps in (1, self.total_steps, 10 * self.total_steps):
            for step, rate in enumerate(self._rates(steps)[:-1]):
                wanted = self.learning_rate * self._formula(step, steps)
                of_reference = f"that of the reference {wanted:.6g}"
                what = f"after {step} of {steps} steps its rate is {rate:.6g}, and {of_reference}"
                require(math.isclose(rate, wanted, rel_tol=1e-6, abs_tol=1e-9), what)

    def test_groups(self) -> None:
        """Treats every group of parameters alike."""
        optimizer, scheduler = self._start(groups=2)
        for step in range(self.total_steps):
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            require(len(set(rates)) == 1, f"before step {step + 1} two groups have rates {rates}")
            _follow(optimizer, scheduler, 1)

    def test_restart(self) -> None:
        """Gives the same rates after a restart at every step: from its state_dict and the optimizer's."""
        whole = self._rates()
        for step in range(self.total_steps):
            optimizer, scheduler = self._start()
            _follow(optimizer, scheduler, step)
            states = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
            other, resumed = self._start()
            other.load_state_dict(states[0])
            resumed.load_state_dict(states[1])
            rates = [*whole[:step], *_follow(other, resumed, self.total_steps - step)]
            what = f"restarted after step {step}, it gives other rates"
            example = f"at once   {_text(whole)}\nrestarted {_text(rates)}"
            require(rates == whole, what, example, "state_dict() has all that the next rates depend on")

    def test_repeats(self) -> None:
        """Gives the same rates in a second run."""
        first, second = self._rates(), self._rates()
        require(first == second, "a second run has other rates", f"{_text(first)}\n{_text(second)}")

    def _exercise(self) -> object:
        return self._rates()

    def _rates(self, steps: int | None = None) -> list[float]:
        """List the learning rate of each step, and the one after the last."""
        return _follow(*self._start(steps), steps or self.total_steps)

    def _start(self, steps: int | None = None, groups: int = 1) -> tuple[torch.optim.Optimizer, Any]:
        """Build an optimizer, and the schedule of a run with it."""
        steps = steps or self.total_steps
        parameters = [nn.Parameter(torch.ones(1)) for _ in range(groups)]
        optimizer = torch.optim.SGD([{"params": [each]} for each in parameters], lr=self.learning_rate)
        for each in parameters:
            each.grad = torch.ones(1)
        build = self.build().build
        scheduler = call_component("scheduler", build, optimizer, steps, example=f"total_steps {steps}")
        for name in ("step", "state_dict", "load_state_dict"):
            what = f"it builds a {type(scheduler).__name__}, which has no method {name}"
            advice = "return a torch.optim.lr_scheduler.LRScheduler, such as LambdaLR"
            require(callable(getattr(scheduler, name, None)), what, advice=advice)
        return optimizer, scheduler


def _follow(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    """Take steps, and list the learning rate before each, and the one after the last."""
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


def _text(rates: list[float]) -> str:
    return "  ".join(f"{rate:.4g}" for rate in rates)
