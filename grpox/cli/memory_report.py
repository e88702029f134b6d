"""`grpox plan --memory`: what a rank takes of its GPU's memory and of the host's, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpox.errors.formatting import amount, counted
from grpox.policy.memory_plan.formula import LOAD, PHASES, Part, Setting, parts_of, peak_of, size_in

PHASE_WORDS = {
    "load": "loading and sharding the model",
    "generate": "sampling",
    "update": "forward and backward",
    "reduce": "summing gradients over the ranks",
    "step": "the optimizer's step",
}
COMMON = (16, 24, 40, 48, 80, 141, 180)
"""GiB of memory that GPUs have, about."""
NOT_COUNTED = (
    "Python and its libraries: 0.5 to 1 GiB of the host for each rank",
    "on a GPU: CUDA's context, cuBLAS and NCCL, 1 to 2 GiB",
    "fragmentation: what the allocator holds and cannot give; 5 to 10 % are usual, more with changing lengths",
    "reward models, rewards' own processes, the data set, and files that the host caches",
)


def memory_report(setting: Setting, prompt_assumed: bool) -> RenderableType:
    """Two tables and what they leave out.

    Args:
        setting: of ranks with a GPU; how much they take without one is told in the end.
        prompt_assumed: whether nobody said how long prompts are.
    """
    parts = parts_of(setting)
    return Group(
        _parts_table(setting, parts), Text(), _phases_table(parts), Text(), *_notes(setting, prompt_assumed)
    )


def _parts_table(setting: Setting, parts: Sequence[Part]) -> Table:
    parameters = setting.shape.parameters
    title = f"Memory of each of {counted(setting.ranks, 'rank')}: {parameters:,} parameters"
    if setting.trained:
        title += f", {sum(setting.trained):,} trained"
    table = Table(title=title, title_justify="left")
    table.add_column("part", overflow="fold")
    table.add_column("GPU", justify="right", no_wrap=True)
    table.add_column("host", justify="right", no_wrap=True)
    table.add_column("while", overflow="fold")
    table.add_column("arithmetic", style="dim", overflow="fold")
    for part in parts:
        cells = ("", amount(part.size)) if part.on_host else (amount(part.size), "")
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
            Text(amount(size_in(parts, phase, on_host)), "bold" if peaks[on_host] == phase else "")
            for on_host in (False, True)
        ]
        table.add_row(f"{phase}: {PHASE_WORDS[phase]}", *cells)
    return table


def _notes(setting: Setting, prompt_assumed: bool) -> Iterator[Text]:
    without = peak_of(parts_of(replace(setting, gpu=False)), on_host=True)
    yield Text(f"Without GPUs, all in the host's memory: {amount(without.size)} a rank, while: {without.phase}")
    yield Text("The host's figures are for each rank: a machine needs them as many times as it has ranks.")
    whole = size_in(parts_of(replace(setting, gpu=True)), LOAD, on_host=False)
    told = (
        f"Every rank's GPU holds the whole model while it loads, {amount(whole)}, however many ranks there are"
    )
    common = ", ".join(str(size) for size in COMMON if whole > size * 2**30)
    yield Text(
        f"{told}." if not common else f"{told}: it does not fit one of {common} GiB.", "bold" if common else ""
    )
    tokens = f"{setting.prompt} tokens" + (", assumed: say it by --prompt-tokens" if prompt_assumed else "")
    yield Text(f"Prompts: {tokens}; completions: {setting.completion}, sequences not sharing their prompts.")
    held = setting.generator
    if held is None:
        yield Text("What the generator takes is not counted: it does not say.")
    elif held.holds == "engine" and setting.gpu and held.cache is None:
        yield Text(f"{held.engine}'s keys and values: what {held.share_key} leaves of the GPU.")
    if "nvme" in (setting.offload_optimizer, setting.offload_param):
        yield Text("Offload to nvme: DeepSpeed's buffers in the host's memory are not counted.")
    yield Text("Not counted:")
    for each in NOT_COUNTED:
        yield Text(f"  {each}", "dim")
