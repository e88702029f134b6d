"""Counts, without a GPU, how often an optimizer step would wait for one.

A step of grpox under DeepSpeed runs on the CPU while `sync_counter` tells host and GPU apart. Each case takes
two steps that differ in the number of micro-batches: the difference is the count of a micro-batch, the rest
that of the step. Operations of DeepSpeed, torch.optim and transformers are listed under "others" and not
counted. The time of a wait is not seen here, nor code that runs on CUDA alone.

    python benchmarks/host_syncs.py [--quick]

The last line is JSON with `per_micro_batch` and `per_step`, the largest of all cases, and the figures of each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from random_model import make_model
from surroundings import surroundings
from sync_counter import GPU, Marks, Waits, counting
from work import step_of

from grpox.policy import attention
from grpox.policy.batch import FULL_LOGITS, ForwardMode, Sample, TokenRecord, samples_of
from grpox.policy.deepspeed_import import deepspeed
from grpox.policy.engine import Engine, FrozenEngine
from grpox.policy.optimizers import AdamW, NamedSchedule
from grpox.runfile.load import ResolvedRun, load_run
from grpox.runtime.setup import quieten
from grpox.runtime.world import World, start_world
from grpox.training.generation_feed import keep_reported
from grpox.training.inputs import open_model
from grpox.update.policy_update import PolicyUpdate
from grpox.update.step_statistics import StepStatistics

MICRO_BATCH_GOAL, MICRO_BATCH_LIMIT, STEP_GOAL, STEP_LIMIT = 1, 3, 4, 8
ROWS = 4
"""Completions of a micro-batch."""
FEW, MANY = 2, 5
"""Micro-batches of the two steps."""
PROMPTS = [[3 + (7 * group + place) % 11 for place in range(8)] for group in range(11)]


@dataclass(frozen=True)
class Case:
    """A kind of step."""

    train: dict[str, Any] = field(default_factory=dict)
    """Changes of the run file's section."""
    full_logits: bool = False
    packed: bool = False
    correction: str = "token-truncate"
    statistics: bool = False
    of_generator: bool = False
    """pi_old is what the generator reported."""
    later: bool = False
    """pi_old is computed for samples that a later step trains on."""


CASES = {
    "default": Case(),
    "all logits": Case(full_logits=True),
    "without prefix sharing": Case({"prefix_sharing": False}),
    "packed": Case({"packing": True}, packed=True),
    "reference": Case({"beta": 0.1}),
    "entropy": Case({"entropy_coef": 0.01, "top_entropy_quantile": 0.5, "off_policy_mask_threshold": 0.1}),
    "statistics": Case(correction="sequence-mask", statistics=True),
    "generator's pi_old": Case(of_generator=True),
    "later step": Case(later=True),
}


class Machine:
    """An engine and a reference, and the marks of their tensors."""

    def __init__(self, folder: Path, world: World, kind: Case) -> None:
        """
        Args:
            folder: of the model.
            kind: a case with this engine's kind of attention.
        """
        self.folder, self.world, self.marks = folder, world, Marks()
        run = self.run_of(kind)
        train = run.config.train
        self.engine = Engine(open_model(run), run.config, world, 1000, AdamW(train), NamedSchedule(train))
        self.mode = self.engine.mode
        if self.mode.packed != kind.packed:
            raise SystemExit(f"the trial of forward modes left {self.mode}: {'; '.join(self.mode.failures)}")
        self.reference = FrozenEngine(open_model(run), run.config, world)

    def run_of(self, case: Case) -> ResolvedRun:
        train = {"per_device_train_batch_size": ROWS, "num_generations": ROWS, **case.train}
        words = [f"train.{key}={json.dumps(value)}" for key, value in train.items()]
        words += [f"model.init.attn_implementation={attention.VARLEN}"] if case.packed else []
        return load_run("quickstart", [f"model.path={self.folder}", f"correction={case.correction}", *words])

    def count(self, case: Case, micro_batches: int) -> tuple[Waits, int]:
        """Count a step, and its passes with a gradient, for which samples are grouped anew."""
        run = self.run_of(case)
        train = run.config.train
        self.engine.mode = _mode(self.mode, case, train.prefix_sharing)
        wanted: Any = {("ratio", "mean"): "a component", ("entropy", "max"): "a component"}
        update = PolicyUpdate(
            self.engine,
            self.reference if train.beta else None,
            run.build("loss"),
            run.build("correction"),
            run.config,
            self.world,
            statistics=StepStatistics(wanted if case.statistics else {}),
        )
        waits, passes = Waits(), Counter[str]()
        begin = self.engine.begin_micro_batch

        def begin_micro_batch(*, last: bool) -> None:
            passes.update(["passes"])
            begin(last=last)

        self.engine.begin_micro_batch = begin_micro_batch  # type: ignore[method-assign]
        batches, later = work(micro_batches, 0), work(micro_batches, 1)
        for each in self._tensors():
            self.marks.set(each, True)
        with counting(waits, self.marks), pausing(waits):
            if case.of_generator:
                keep_reported([sample for batch in batches for sample in batch], 0, self.world.device)
            if case.later:
                update.score_old(later)
            update.step(batches)
        self.engine.begin_micro_batch = begin  # type: ignore[method-assign]
        return waits, passes.total()

    def _tensors(self) -> list[Any]:
        """Weights, their shards and gradients: what the engines hold between steps."""
        held: list[Any] = []
        for engine in (self.engine, self.reference):
            parameters = list(engine.module.parameters())
            held += [*parameters, *(p.ds_tensor for p in parameters), *engine.module.buffers()]
        optimizer = self.engine.deepspeed.optimizer
        held += [*optimizer.fp32_partitioned_groups_flat, *optimizer.fp16_partitioned_groups_flat]
        for states in optimizer.optimizer.state.values():
            held += [each for each in states.values() if hasattr(each, "untyped_storage")]
        return held


@contextmanager
def pausing(waits: Waits) -> Iterator[None]:
    """Pause the count where grpox attends by lengths, which is a kernel on a GPU and a loop on a CPU."""
    attend = attention.attend_within

    def attend_uncounted(*arguments: Any) -> Any:
        with waits.paused():
            return attend(*arguments)

    attention.attend_within = attend_uncounted
    try:
        yield
    finally:
        attention.attend_within = attend


def _mode(mode: ForwardMode, case: Case, shares: bool) -> ForwardMode:
    if case.full_logits:
        return FULL_LOGITS
    return mode if shares else replace(mode, shared_width=0)


def work(micro_batches: int, number: int) -> list[list[Sample]]:
    """Micro-batches of one prompt each, whose completions teach, and some of whose tokens are recorded."""
    step = step_of(PROMPTS, number, micro_batches, ROWS, longest=12)
    samples = samples_of(step.rollouts, [(-1.0) ** row for row in range(len(step.rollouts))])
    for place, sample in enumerate(samples):
        sample.sampler_logprobs = np.full(len(sample.completion), -2.5, dtype=np.float32)
        if place % 2:  # some of every micro-batch
            turns = np.zeros(len(sample.completion), dtype=np.int32)
            sample.token_record = TokenRecord(1, 1, place // ROWS, place % ROWS, turns)
    return [samples[start : start + ROWS] for start in range(0, len(samples), ROWS)]


def figures_of(count: Callable[[int], tuple[Waits, int]]) -> dict[str, Any]:
    """Part the counts of two steps into those of a micro-batch and those of the step."""
    (small, few), (large, many) = count(FEW), count(MANY)
    per_micro_batch = (large.own.total() - small.own.total()) / (many - few)
    return {
        "micro_batches": [few, many],
        "per_micro_batch": round(per_micro_batch, 3),
        "per_step": round(small.own.total() - few * per_micro_batch, 3),
        "own": rows_of(large.own),
        "others": rows_of(large.others),
        "mixed": rows_of(large.mixed),
    }


def rows_of(counts: Counter[tuple[str, str]]) -> list[dict[str, Any]]:
    """Name the places, the most frequent first."""
    return [{"place": place, "what": what, "count": count} for (place, what), count in counts.most_common()]


def show(name: str, figures: dict[str, Any]) -> None:
    """Print a case."""
    print(f"\n{name}: {figures['per_micro_batch']:g} a micro-batch, {figures['per_step']:g} a step")
    for kind in ("own", "mixed", "others"):
        for row in figures[kind]:
            print(f"  {kind:6} {row['count']:5}  {row['place']}  {row['what']}")


def measure(names: Sequence[str], hidden: int, layers: int) -> dict[str, Any]:
    """Count the cases of these names."""
    cases: dict[str, Any] = {}
    world = replace(start_world(), device=GPU)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), hidden, layers)
        machines = {case.packed: Machine(Path(folder), world, case) for case in (Case(), CASES["packed"])}
        accelerator = deepspeed.accelerator.get_accelerator()
        accelerator.current_device_name = accelerator.device_name = lambda *_: str(GPU)
        for is_packed, machine in machines.items():
            machine.count(Case(packed=is_packed), 1)  # the first step makes the states of the optimizer
        for name in names:
            case = CASES[name]
            cases[name] = figures_of(partial(machines[case.packed].count, case))
            show(name, cases[name])
    return {
        "per_micro_batch": max(each["per_micro_batch"] for each in cases.values()),
        "per_step": max(each["per_step"] for each in cases.values()),
        "limits": {"per_micro_batch": MICRO_BATCH_LIMIT, "per_step": STEP_LIMIT},
        "goals": {"per_micro_batch": MICRO_BATCH_GOAL, "per_step": STEP_GOAL},
        "mixed": sum(len(each["mixed"]) for each in cases.values()),
        "cases": cases,
        **surroundings(["grpox", "torch", "deepspeed", "transformers"]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, print, and return 1 where a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a model of two small layers")
    parser.add_argument("--cases", default=",".join(CASES), help="names, separated by commas")
    options = parser.parse_args(arguments)
    quieten()
    hidden, layers = (64, 2) if options.quick else (256, 8)
    figures = measure(options.cases.split(","), hidden, layers)
    print(json.dumps(figures))
    within = figures["per_micro_batch"] <= MICRO_BATCH_LIMIT and figures["per_step"] <= STEP_LIMIT
    return 0 if within and not figures["mixed"] else 1


if __name__ == "__main__":
    sys.exit(main())
