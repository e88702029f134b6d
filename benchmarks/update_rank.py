"""All candidates of update.py on one rank, in turns.

Usage: update_rank.py ARGUMENTS.json OUT; writes OUT.<rank>
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bare_update import BareZero3, PlainTorch
from work import Step, step_of

from grpox.config import RunConfig
from grpox.policy.batch import PackedBatch, collate, samples_of
from grpox.policy.engine import Engine
from grpox.policy.optimizers import AdamW, NamedSchedule
from grpox.runfile.load import ResolvedRun, load_run
from grpox.runtime.setup import quieten
from grpox.runtime.world import World, start_world
from grpox.training.inputs import open_model, open_prompts, open_tokenizer
from grpox.update.policy_update import PolicyUpdate

OURS, BARE, TORCH = "grpox", "bare-zero3", "torch"
SWITCHES = ("prefix_sharing", "chunked_logprobs", "skip_zero_advantage")
"""Settings of the section train that save work, on unless a run says otherwise."""
BUDGET = "max_tokens_per_micro_batch"
WARM_UP_ROWS = 2

Take = Callable[[Sequence[PackedBatch], int], float]
"""Padded micro-batches and the completion tokens of the step over all ranks -> the gradient's norm."""


def switched_off(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The candidates without one of the settings that save work, and without any: name -> changes of train."""
    known = {name: False for name in SWITCHES if getattr(config.train, name, False)}
    changes: dict[str, Any] = known | ({BUDGET: None} if getattr(config.train, BUDGET, None) else {})
    single = {f"{OURS} -{name}": {name: value} for name, value in changes.items()}
    return single | ({f"{OURS} -all": changes} if len(changes) > 1 else {})


class Ours:
    """grpox's update on one engine, with one setting or other switched off."""

    def __init__(self, run: ResolvedRun, world: World) -> None:
        self.run, self.world, train = run, world, run.config.train
        schedule = NamedSchedule(train)
        self.engine: Any = Engine(open_model(run), run.config, world, 1000, AdamW(train), schedule)
        self.mode = getattr(self.engine, "mode", None)

    def taking(self, changes: dict[str, Any]) -> Take:
        config = self.run.config
        config = config.model_copy(update={"train": config.train.model_copy(update=changes)})
        self._prepare(config)
        update = PolicyUpdate(
            self.engine, None, self.run.build("loss"), self.run.build("correction"), config, self.world
        )

        def take(batches: Sequence[PackedBatch], tokens: int) -> float:
            self._prepare(config)
            return update.step([[replace(sample) for sample in batch.samples] for batch in batches])[
                "grad_norm"
            ]

        return take

    def _prepare(self, config: RunConfig) -> None:
        """The engine was made for all ways of the forward pass; these are those that `config` allows."""
        if self.mode is None:
            return
        ways = self.mode
        if not config.train.prefix_sharing:
            ways = replace(ways, shared_width=0)
        if not config.train.chunked_logprobs:
            ways = type(ways)()
        self.engine.mode = ways


def candidates(run: ResolvedRun, world: World, names: Sequence[str]) -> dict[str, Take]:
    ours = [name for name in names if name.startswith(OURS)]
    made: dict[str, Take] = {}
    if ours:
        engine = Ours(run, world)
        changes: dict[str, dict[str, Any]] = {OURS: {}} | switched_off(run.config)
        made = {name: engine.taking(changes[name]) for name in ours}
    if BARE in names:
        made[BARE] = BareZero3(open_model(run), run.config, world).step
    if TORCH in names:
        made[TORCH] = PlainTorch(open_model(run), run.config, world).step
    return made


def micro_batches(step: Step, per_rank: int, pad: int, world: World) -> list[PackedBatch]:
    """This rank's share of the step, padded as the schedule of a run has it."""
    made = []
    for start in range(world.rank * per_rank, len(step.rollouts), per_rank * world.size):
        rows = slice(start, start + per_rank)
        made.append(collate(samples_of(step.rollouts[rows], step.advantages[rows]), world.device))
    return made


def completion_tokens(step: Step) -> int:
    return sum(len(rollout.completion_ids) for rollout in step.rollouts)


def timed(take: Take, batches: list[PackedBatch], tokens: int, world: World) -> tuple[float, float]:
    """Seconds until every rank is done, and the gradient's norm."""
    world.barrier()
    _synchronise(world)
    begin = time.perf_counter()
    norm = take(batches, tokens)
    _synchronise(world)
    world.barrier()
    return time.perf_counter() - begin, norm


def _synchronise(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def main(told: str, out: str) -> None:
    given = json.loads(Path(told).read_text())
    quieten()
    world = start_world()
    run = load_run(given["run"], given["overrides"])
    tokenizer = open_tokenizer(run)
    prompts, _ = open_prompts(run, tokenizer)
    ids = [prompts.token_ids(index) for index in range(min(len(prompts), 64))]
    names = given["candidates"] or [OURS, BARE, TORCH, *switched_off(run.config)]
    takes = candidates(run, world, names)
    # All micro-batches are there, but narrow: optimizer states are made, and little is computed.
    warm_up = step_of(ids, 0, WARM_UP_ROWS * world.size // 2, 2, 4)
    seconds: dict[str, list[float]] = {name: [] for name in takes}
    norms: dict[str, list[float]] = {name: [] for name in takes}
    for take in takes.values():
        timed(take, micro_batches(warm_up, 2, tokenizer.pad_token_id, world), completion_tokens(warm_up), world)
    tokens = []
    for number in range(given["rounds"]):
        step = step_of(ids, number, given["prompts"], given["samples"], given["longest"])
        tokens.append(step.tokens)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            batches = micro_batches(
                step, run.config.train.per_device_train_batch_size, tokenizer.pad_token_id, world
            )
            taken, norm = timed(takes[name], batches, completion_tokens(step), world)
            seconds[name].append(taken)
            norms[name].append(norm)
            if world.is_main:
                print(f"round {number + 1}/{given['rounds']}  {name:30} {taken:8.3f} s", file=sys.stderr)
    parameters = sum(p.numel() for p in open_model(run).parameters())
    figures = {"seconds": seconds, "grad_norms": norms, "tokens": tokens, "parameters": parameters}
    Path(f"{out}.{world.rank}").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
