"""`grpox plan`: draws the flow of batches by micro-batch, or a table of each rank's memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpox.cli.arguments import Overrides, Ranks, Run, load_named_run
from grpox.config import TrainConfig
from grpox.data.schedule import BatchPlan, MicroBatchPlan, PromptSampler, Schedule
from grpox.errors import ConfigError
from grpox.errors.console import Console
from grpox.errors.formatting import format_bytes, pluralize
from grpox.policy.memory_plan.fit import Answer, Line, Memory, gpus_here, host_here, verdict_lines, worst_of
from grpox.policy.memory_plan.formula import LOAD, PHASES, Part, Setting, parts_of, peak_of, size_in

MOST_MICRO_BATCHES = 500
"""Largest number of optimizer steps drawn."""
MOST_ROWS = 12
"""Largest number of rows of a micro-batch written one by one; more are grouped, as in ``0*16 1*16``."""
MOST_RUNS = 4
"""Largest number of groups written; of more, the first ones and the last are."""
NARROW = 100
"""Columns of a terminal below which 2 ranks are drawn, and from which 4 are: the first ones and the last."""

PHASE_WORDS = {
    "load": "loading and sharding the model",
    "generate": "sampling",
    "update": "forward and backward",
    "reduce": "summing gradients over the ranks",
    "step": "the optimizer's step",
}
NOT_COUNTED = (
    "Python and its libraries: 0.5 to 1 GiB of the host for each rank",
    "on a GPU: CUDA's context, cuBLAS and NCCL, 1 to 2 GiB",
    "fragmentation in the allocator: usually 5 to 10 %, more with changing lengths",
    "reward models, processes of rewards, the data set, and files in the host's cache",
)


def plan(
    run: Run,
    overrides: Overrides = None,
    world_size: Ranks = None,
    generations: Annotated[
        int, typer.Option("--generations", min=1, metavar="N", help="Generation batches to draw.")
    ] = 2,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show the memory of a rank instead of the batches.")
    ] = False,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="With --memory: length of the longest prompt, in tokens.",
            show_default="data.max_prompt_length, else 512",
        ),
    ] = None,
    gpu_gib: Annotated[
        float | None,
        typer.Option(
            "--gpu-gib",
            min=0.1,
            metavar="N",
            help="With --memory: judge a GPU with N GiB, which need not be here.",
            show_default="this machine",
        ),
    ] = None,
) -> None:
    """Draw the flow of batches: the prompts of each rank, and the optimizer steps.

    --memory shows the memory that each rank needs on its GPU and on the host,
    computed from the model's config.json, without its weights. Its last lines say
    whether the run fits this machine, or a GPU with --gpu-gib GiB. The exit code
    is 0 if it fits, or is tight, and 1 if not.

    \b
    Examples:
      grpox plan run.yaml
      grpox plan run.yaml --world-size 2 --generations 3
      grpox plan run.yaml train.gradient_accumulation_steps=4
      grpox plan run.yaml --memory --world-size 32
      grpox plan run.yaml --memory --gpu-gib 80
    """
    if gpu_gib is not None and not memory:
        raise ConfigError("has no effect without --memory", "--gpu-gib", given=f"{gpu_gib:g}")
    if gpu_gib is not None and math.isinf(gpu_gib):
        raise ConfigError("is no size of a GPU", "--gpu-gib", given=f"{gpu_gib:g}", allowed="a number of GiB")
    resolved, console = load_named_run(run, overrides, world_size), Console()
    if memory:
        from grpox.policy.memory_plan.of_run import run_setting

        setting, on_cpu = (run_setting(resolved, gpu, prompt_tokens) for gpu in (True, False))
        assumed = prompt_tokens is None and resolved.config.data.max_prompt_length is None
        console.print(memory_report(setting, on_cpu, assumed))
        if gpu_gib is None:
            lines = list(verdict_lines(setting, on_cpu, host_here(), gpus_here()))
        else:
            size = int(gpu_gib * 2**30)
            lines = list(verdict_lines(setting, on_cpu, None, [Memory(size, size)]))
        console.print(verdict_report(lines, gpu_gib))
        raise typer.Exit(1 if worst_of(lines) == "does not fit" else 0)
    train = resolved.config.train
    console.print(plan_report(train, resolved.plan, resolved.num_prompts, generations, console))


def plan_report(
    train: TrainConfig, plan: BatchPlan, num_prompts: int | None, generations: int, console: Console
) -> RenderableType:
    """Draw the table of the first `generations` generation batches, and the numbers of the whole run.

    Args:
        num_prompts: prompts of the training data; None when unknown.
        console: the terminal, whose width limits the number of ranks drawn.
    """
    drawn = generations * plan.prompts_per_generation if num_prompts is None else num_prompts
    # Without shuffling, the number of a prompt in the table is the order in which it is drawn.
    sampler = PromptSampler(drawn, plan.prompts_per_generation, shuffle=False, seed=train.seed)
    schedule = Schedule(plan, sampler, train.max_steps, train.num_train_epochs)
    about = "[0 0 0]: the prompts of a rank's completions, numbered in the order in which they are drawn"
    caption = Text(about, "dim")
    if train.dynamic_sampling_rounds:
        caption.append(
            "; shown without dynamic sampling: each group that it replaces takes the next prompt, which shifts "
            "all later batches"
        )
    table = _table(schedule, generations, 2 if console.width < NARROW else 4)
    return Group(table, caption, Text(), _summary(schedule, train, num_prompts))


def _table(schedule: Schedule, generations: int, most_ranks: int) -> Table:
    plan = schedule.plan
    ranks: list[int | None] = list(range(plan.world_size))
    if plan.world_size > most_ranks:
        ranks = [*range(max(1, most_ranks - 2)), None, plan.world_size - 1]
    table = Table(title="Flow of batches", title_justify="left")
    for name in ("gen.", *(["iter."] if plan.num_iterations > 1 else []), "micro-\nbatch"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in ranks:
        if rank is None:
            table.add_column("...", no_wrap=True)
        else:
            table.add_column(f"GPU {rank}", min_width=7, overflow="fold")
    table.add_column("step", justify="right", no_wrap=True)
    last: tuple[int, int] | None = None
    for step in schedule.steps():
        shown = list(takewhile(lambda micro_batch: micro_batch.generation < generations, step.micro_batches))
        for position, micro_batch in enumerate(shown, 1):
            generation, place = micro_batch.generation, (micro_batch.generation, micro_batch.iteration)
            is_new = last is None or last[0] != generation
            if is_new and last is not None:
                table.add_section()
            heading = [str(generation) if is_new else ""]
            if plan.num_iterations > 1:
                heading.append("" if place == last else str(micro_batch.iteration))
            heading.append(str(micro_batch.rows.start // plan.rows_per_micro_batch))
            mark = str(step.step) if position == len(step.micro_batches) else ""
            cells = [_cell(plan, micro_batch, rank) for rank in ranks]
            table.add_row(*heading, *cells, mark)
            last = place
        if len(shown) < len(step.micro_batches):
            break
        if table.row_count >= MOST_MICRO_BATCHES:
            table.add_row("...")
            break
    return table


def _cell(plan: BatchPlan, micro_batch: MicroBatchPlan, rank: int | None) -> str:
    """Write the prompts of a rank; dots stand for omitted ranks."""
    if rank is None:
        return "..."
    first = micro_batch.generation * plan.prompts_per_generation
    prompts = [first + row // plan.num_generations for row in micro_batch.rank_rows(rank)]
    written = [str(prompt) for prompt in prompts]
    if len(prompts) > MOST_ROWS:
        written = [f"{prompt}*{len(list(rows))}" for prompt, rows in groupby(prompts)]
        if len(written) > MOST_RUNS:
            written = [*written[: MOST_RUNS - 1], "...", written[-1]]
    return f"\\[{' '.join(written)}]"  # a backslash keeps rich from reading the bracket as markup


def _summary(schedule: Schedule, train: TrainConfig, num_prompts: int | None) -> Table:
    plan, sampler = schedule.plan, schedule.sampler
    per_device, ranks = plan.per_device_train_batch_size, plan.world_size
    size, prompts = plan.generation_batch_size, plan.prompts_per_generation
    accumulation = plan.gradient_accumulation_steps
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", style="bold", overflow="fold")
    table.add_column(style="dim", overflow="fold")
    steps = plan.steps_per_generation
    how = f"per device x ranks x steps_per_generation = {per_device} x {ranks} x {steps}"
    table.add_row("completions per generation batch", str(size), how)
    how = f"{size} / num_generations {plan.num_generations}"
    table.add_row("unique prompts per generation batch", str(prompts), how)
    how = f"per device x ranks x accumulation = {per_device} x {ranks} x {accumulation}"
    table.add_row("samples per optimizer step", str(plan.train_batch_size), how)
    how = f"steps_per_generation {steps} x num_iterations {plan.num_iterations} / accumulation {accumulation}"
    table.add_row("optimizer steps per generation batch", str(plan.optimizer_steps_per_generation), how)
    table.add_row("prompts in the data", "unknown" if num_prompts is None else str(num_prompts))
    if num_prompts is not None:
        left = num_prompts % prompts
        notes = ["at most; fewer if dynamic sampling replaces groups"] if train.dynamic_sampling_rounds else []
        notes += [f"drops {pluralize(left, 'prompt')}"] if left else []
        table.add_row("generation batches per epoch", str(sampler.generations_per_epoch), "; ".join(notes))
    is_known = num_prompts is not None or train.max_steps >= 0
    table.add_row("optimizer steps in all", str(schedule.total_steps) if is_known else "unknown")
    return table


# -- Memory ------------------------------------------------------------------------------------------------


def memory_report(setting: Setting, on_cpu: Setting, prompt_assumed: bool) -> RenderableType:
    """Draw two tables, and notes on memory that they do not count.

    Args:
        setting: ranks with a GPU.
        on_cpu: the same ranks without one; a line gives their memory.
        prompt_assumed: the length of prompts is unknown, and a default is assumed.
    """
    parts = parts_of(setting)
    tables = (_parts_table(setting, parts), Text(), _phases_table(parts), Text())
    return Group(*tables, *_notes(setting, on_cpu, prompt_assumed))


STYLES: Mapping[Answer, str] = {"fits": "bold green", "tight": "bold yellow", "does not fit": "bold red"}


def verdict_report(lines: Sequence[Line], gpu_gib: float | None = None) -> RenderableType:
    """Draw a line for each kind of memory, and the verdict below them.

    Args:
        gpu_gib: size of the GPU that is judged; None: this machine.
    """
    answer = worst_of(lines)
    where = "here" if gpu_gib is None else f"on GPUs of {gpu_gib:g} GiB"
    if gpu_gib is None and not any(line.where == "each GPU" for line in lines):
        where += ", where no GPU is found (--gpu-gib N judges another machine)"
    return Group(Text(), *(Text(str(line)) for line in lines), Text(f"{answer} {where}", STYLES[answer]))


def _parts_table(setting: Setting, parts: Sequence[Part]) -> Table:
    parameters = setting.shape.parameters
    title = f"Memory of each of {pluralize(setting.ranks, 'rank')}: {parameters:,} parameters"
    if setting.shape.adapters:
        title += f", {sum(setting.shape.adapters):,} trained"
    table = Table(title=title, title_justify="left")
    table.add_column("part", overflow="fold")
    table.add_column("GPU", justify="right", no_wrap=True)
    table.add_column("host", justify="right", no_wrap=True)
    table.add_column("while", overflow="fold")
    table.add_column("arithmetic", style="dim", overflow="fold")
    for part in parts:
        cells = ("", format_bytes(part.size)) if part.on_host else (format_bytes(part.size), "")
        always = set(part.phases) >= set(PHASES) - {"load"}
        table.add_row(part.name, *cells, "always" if always else ", ".join(part.phases), part.why)
    return table


def _phases_table(parts: Sequence[Part]) -> Table:
    peaks = {on_host: peak_of(parts, on_host).phase for on_host in (False, True)}
    table = Table("while", title="Together", title_justify="left")
    table.add_column("GPU", justify="right", no_wrap=True)
    table.add_column("host", justify="right", no_wrap=True)
    for phase in PHASES:
        cells = [
            Text(format_bytes(size_in(parts, phase, on_host)), "bold" if peak == phase else "")
            for on_host, peak in peaks.items()
        ]
        table.add_row(f"{phase}: {PHASE_WORDS[phase]}", *cells)
    return table


def _notes(setting: Setting, on_cpu: Setting, prompt_assumed: bool) -> Iterator[Text]:
    yield Text("The tables count what is auto in the run file as on GPUs, and the next line as without them.")
    without = peak_of(parts_of(on_cpu), on_host=True)
    yield Text(
        f"Without GPUs: {format_bytes(without.size)} of host memory for each rank, during: {without.phase}"
    )
    yield Text("Host memory is per rank: multiply it by the number of ranks on a machine.")
    whole = size_in(parts_of(setting), LOAD, on_host=False)
    yield Text(
        f"While the model loads, every GPU holds all of it, {format_bytes(whole)}, for any number of ranks."
    )
    assumed = " (assumed; --prompt-tokens sets the length)" if prompt_assumed else ""
    completion = setting.config.sampling.max_completion_length
    yield Text(
        f"Prompts: {setting.prompt} tokens{assumed}; completions: {completion} tokens; no prompt is shared "
        "between sequences."
    )
    generator = setting.generator
    if generator is None:
        yield Text("The generator's memory is not counted, because the generator does not report it.")
    elif generator.holds == "engine" and setting.gpu and generator.cache is None:
        yield Text(
            f"{generator.engine}'s KV cache takes the GPU memory that {generator.share_key} leaves for it."
        )
    if setting.config.deepspeed.nvme_path:
        yield Text("Offload to nvme: DeepSpeed's buffers in host memory are not counted.")
    yield Text("Not counted:")
    for each in NOT_COUNTED:
        yield Text(f"  {each}", "dim")
