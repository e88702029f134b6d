"""`grpox plan`: draws which prompts each rank trains on, micro-batch by micro-batch, with the arithmetic."""

from __future__ import annotations

from itertools import groupby, takewhile
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from grpox.config import TrainConfig
from grpox.data.schedule import BatchPlan, MicroBatchPlan, PromptSampler, Schedule
from grpox.errors.formatting import counted

ROOM = 1000
"""Columns beyond any terminal's."""
MOST_MICRO_BATCHES = 500
"""After so many the step that is drawn is the last one."""
MOST_ROWS = 12
"""Rows of a rank's micro-batch that are written one by one; more are written ``0*16 1*16``."""
MOST_RUNS = 4
"""Prompts that are written in that form; of more, the first ones and the last."""


class _Form(NamedTuple):
    """How the table is written: its headings, and how much stands in its cells."""

    generation: str
    iteration: str
    micro_batch: str
    optimizer: str
    generate: str
    step: str
    most_ranks: int
    """Ranks that are drawn; of more, the first ones and the last."""


_FULL = _Form("generation", "iteration", "micro-batch", "optimizer", "{}: generate", "step {}", 4)
_NARROW = _Form("gen.", "iter.", "micro-\nbatch", "step", "{}", "{}", 2)


def plan_report(
    train: TrainConfig, plan: BatchPlan, num_prompts: int | None, generations: int, console: Console
) -> RenderableType:
    """The table of the first `generations` generation batches, and the numbers of the whole run.

    Args:
        num_prompts: of the training data; None when unknown.
        console: where it is to be shown; where the table does not fit, a narrower one is drawn.
    """
    drawn = generations * plan.prompts_per_generation if num_prompts is None else num_prompts
    # Numbered in the order in which they are drawn, which is what the table is about; hence no shuffle.
    sampler = PromptSampler(drawn, plan.prompts_per_generation, shuffle=False, seed=train.seed)
    schedule = Schedule(plan, sampler, train.max_steps, train.num_train_epochs)
    known = num_prompts is not None or train.max_steps >= 0
    caption = Text(
        "[0 0 0]: the prompts, numbered as they are drawn, whose completions a rank trains on", "dim"
    )
    if train.dynamic_sampling_rounds:
        caption.append(
            "; as if dynamic sampling replaced no group: each that it does takes the next prompt, and later "
            "batches begin as many further on"
        )
    table = _table(schedule, generations, _FULL)
    # Measured as if there were room: the console's own options cut the answer at its width.
    if Measurement.get(console, console.options.update(max_width=ROOM), table).minimum > console.width:
        table = _table(schedule, generations, _NARROW)
    return Group(table, caption, Text(), _summary(schedule, train, num_prompts, known))


def _table(schedule: Schedule, generations: int, form: _Form) -> Table:
    plan = schedule.plan
    ranks = _ranks(plan.world_size, form.most_ranks)
    table = Table(title="How batches flow", title_justify="left")
    table.add_column(form.generation, no_wrap=True)
    if plan.num_iterations > 1:
        table.add_column(form.iteration, justify="right", no_wrap=True)
    table.add_column(form.micro_batch, justify="right", no_wrap=True)
    for rank in ranks:
        if rank is None:
            table.add_column("...", no_wrap=True)
        else:
            table.add_column(f"GPU {rank}", min_width=7, overflow="fold")
    table.add_column(form.optimizer, no_wrap=True)
    last: tuple[int, int] | None = None
    for step in schedule.steps():
        shown = list(takewhile(lambda micro_batch: micro_batch.generation < generations, step.micro_batches))
        for position, micro_batch in enumerate(shown):
            place = (micro_batch.generation, micro_batch.iteration)
            if last is not None and place[0] != last[0]:
                table.add_section()
            done = position == len(step.micro_batches) - 1
            mark = form.step.format(step.step) if done else ""
            heading = _heading(plan, micro_batch, place, last, form)
            table.add_row(*heading, *_cells(schedule, micro_batch, ranks), mark)
            last = place
        if len(shown) < len(step.micro_batches):
            break
        if table.row_count >= MOST_MICRO_BATCHES:
            table.add_row("...")
            break
    return table


def _heading(
    plan: BatchPlan,
    micro_batch: MicroBatchPlan,
    place: tuple[int, int],
    last: tuple[int, int] | None,
    form: _Form,
) -> list[str]:
    fresh = last is None or place[0] != last[0]
    generation = [form.generate.format(place[0]) if fresh else ""]
    iteration = [str(place[1]) if place != last else ""] if plan.num_iterations > 1 else []
    return [*generation, *iteration, str(micro_batch.rows.start // plan.rows_per_micro_batch)]


def _cells(schedule: Schedule, micro_batch: MicroBatchPlan, ranks: list[int | None]) -> list[str]:
    plan = schedule.plan
    first = micro_batch.generation * plan.prompts_per_generation
    cells = []
    for rank in ranks:
        rows = micro_batch.rank_rows(rank) if rank is not None else ()
        prompts = _prompts([first + row // plan.num_generations for row in rows])
        # A backslash keeps rich from reading the bracket as markup.
        cells.append(f"\\[{prompts}]" if rank is not None else "...")
    return cells


def _prompts(prompts: list[int]) -> str:
    if len(prompts) <= MOST_ROWS:
        return " ".join(map(str, prompts))
    runs = [f"{prompt}*{len(list(rows))}" for prompt, rows in groupby(prompts)]
    return " ".join(runs if len(runs) <= MOST_RUNS else [*runs[: MOST_RUNS - 1], "...", runs[-1]])


def _ranks(world_size: int, most: int) -> list[int | None]:
    """The ranks to draw; None stands for those left out."""
    if world_size <= most:
        return list(range(world_size))
    return [*range(max(1, most - 2)), None, world_size - 1]


def _summary(schedule: Schedule, train: TrainConfig, num_prompts: int | None, known: bool) -> Table:
    plan, sampler = schedule.plan, schedule.sampler
    factors = f"{plan.per_device_train_batch_size} x {plan.world_size} x {plan.steps_per_generation}"
    step = f"{plan.per_device_train_batch_size} x {plan.world_size} x {plan.gradient_accumulation_steps}"
    size, prompts = plan.generation_batch_size, plan.prompts_per_generation
    rows = [
        (
            "completions per generation batch",
            str(size),
            f"per device x ranks x steps_per_generation = {factors}",
        ),
        (
            "unique prompts per generation batch",
            str(prompts),
            f"{size} / num_generations {plan.num_generations}",
        ),
        (
            "samples per optimizer step",
            str(plan.train_batch_size),
            f"per device x ranks x accumulation = {step}",
        ),
        ("optimizer steps per generation batch", str(plan.optimizer_steps_per_generation), _steps(plan)),
        ("prompts in the data", "unknown" if num_prompts is None else str(num_prompts), ""),
    ]
    if num_prompts is not None:
        left = num_prompts % prompts
        dropped = f"{counted(left, 'prompt')} left over {'is' if left == 1 else 'are'} dropped" if left else ""
        most = "at most, without what replaces groups" if train.dynamic_sampling_rounds else ""
        note = "; ".join(each for each in (most, dropped) if each)
        rows.append(("generation batches per epoch", str(sampler.generations_per_epoch), note))
    rows.append(("optimizer steps in all", str(schedule.total_steps) if known else "unknown", ""))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", style="bold", overflow="fold")
    table.add_column(style="dim", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _steps(plan: BatchPlan) -> str:
    return (
        f"steps_per_generation {plan.steps_per_generation} x num_iterations {plan.num_iterations}"
        f" / accumulation {plan.gradient_accumulation_steps}"
    )
