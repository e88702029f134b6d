"""`grpox try`: samples and scores a few prompts of a run, without training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from grpox.cli.arguments import LogFile, LogLevel, Overrides, Run, follow_log_options, load_named_run
from grpox.errors import escaped
from grpox.errors.console import Console
from grpox.errors.formatting import pluralize
from grpox.observing.conversation import ends, speeches
from grpox.runtime import launch
from grpox.runtime.files import without_nan

if TYPE_CHECKING:
    from grpox.contracts import ScoredRollout
    from grpox.training.try_run import Tried, TriedPrompt

MOST_TOKENS = 60
"""Largest number of a prompt's tokens that are shown; of more, the first ones and the last."""


def try_run(
    run: Run,
    overrides: Overrides = None,
    prompts: Annotated[
        int, typer.Option("--prompts", min=1, metavar="N", help="Prompts to draw, in the order of the run.")
    ] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with all tokens and whole texts.")
    ] = False,
    log_level: LogLevel = "warning",
    log_file: LogFile = None,
) -> None:
    """Sample and score a few prompts of a run, without training.

    Shows each prompt as text and as tokens, as the model gets it, and the other
    columns of its row. Then a group of completions, sampled by the run's
    generator and scored by its rewards: each reward, the weighted sum and the
    advantage. Nothing is trained, and nothing is written to output_dir.

    \b
    Examples:
      grpox try quickstart
      grpox try run.yaml --prompts 1 train.num_generations=4
      grpox try run.yaml --json > tried.json
    """
    follow_log_options(log_level, log_file)
    resolved = load_named_run(run, overrides)
    errors = Console(stderr=True, quiet=launch.rank() != 0)
    # Imported here because it imports torch: mistakes in the run file are reported before.
    with errors.status("starting") as status:

        def tell(phase: str) -> None:
            status.update(Text(phase))
            if not errors.is_terminal:
                errors.print(phase, markup=False, highlight=False, soft_wrap=True)

        from grpox.training.try_run import try_run as sample

        tried = sample(resolved, prompts, tell)
    if launch.rank() != 0:
        return
    if as_json:
        shown = without_nan(_as_json(resolved.source, tried))
        # What JSON cannot hold is written as Python does.
        typer.echo(json.dumps(shown, indent=2, ensure_ascii=False, allow_nan=False, default=repr))
        return
    console = Console()
    for number, each in enumerate(tried.prompts, 1):
        console.print(_report(number, len(tried.prompts), each, tried.weights))


def _report(number: int, count: int, prompt: TriedPrompt, weights: Mapping[str, float]) -> RenderableType:
    """Draw a prompt, its tokens, its other columns, and the table of its completions."""
    heading = f"prompt {number} of {count}: {prompt.place}, {pluralize(len(prompt.token_ids), 'token')}"
    columns = Table(box=None, show_header=False, pad_edge=False)
    columns.add_column(style="dim", overflow="fold")
    columns.add_column(overflow="fold")
    first, left_out, last = ends([escaped(token) for token in prompt.tokens], MOST_TOKENS)
    shown = [*first, *([f"... {left_out} more ..."] if left_out else []), *last]
    columns.add_row("tokens", Text("|", "dim", overflow="fold").join(map(Text, shown)))
    for name, value in prompt.columns.items():
        columns.add_row(_plain(name), _plain(value if isinstance(value, str) else repr(value)))
    table = _completions(prompt.completions, weights)
    return Group(Rule(Text(heading), align="left"), _plain(prompt.text), Text(), columns, Text(), table, Text())


def _completions(scored: Sequence[ScoredRollout], weights: Mapping[str, float]) -> Table:
    """Draw a row for each completion, with its scores below each other."""
    table = Table(show_lines=True)
    table.add_column("completion", overflow="fold", ratio=1)
    table.add_column("scores", overflow="fold")
    names = [*weights, "sum", "advantage"]
    width = max(map(len, names))
    for each in scored:
        numbers = [*map(_number, each.rewards.values()), _number(each.reward), f"{each.advantage:+.3f}"]
        lines = [f"{name:<{width}}  {number:>6}" for name, number in zip(names, numbers, strict=True)]
        table.add_row(_completion(each), Text("\n".join(lines)))
    parts = " + ".join(f"{weight:g} * {name}" for name, weight in weights.items())
    table.caption = Text(f"sum = {parts}")
    table.caption_justify = "left"
    return table


def _completion(scored: ScoredRollout) -> Text:
    """Write the text and its end; of an episode the whole conversation."""
    rollout = scored.rollout
    text = scored.completion
    if rollout.episode is not None and len(rollout.episode.messages) > 1:
        text = "\n".join(f"{each.speaker}: {each.text}" for each in speeches(rollout.episode.messages))
    end = f"{pluralize(len(rollout.completion_ids), 'token')}, ended by {rollout.finish_reason}"
    extra = [f"{name}: {value}" for name, value in scored.extra.items()]
    return Text("\n").join([_plain(text), Text("; ".join([end, *extra]), "dim", overflow="fold")])


def _number(value: float | None) -> str:
    """Write a score; a function that abstained gave none."""
    return "none" if value is None or math.isnan(value) else f"{value:.3f}"


def _plain(text: str) -> Text:
    """Write a text as it is, with its line breaks; other control characters are escaped."""
    return Text("\n").join(Text(escaped(line), overflow="fold") for line in text.split("\n"))


def _as_json(source: str, tried: Tried) -> dict[str, Any]:
    return {
        "config": source,
        "weights": dict(tried.weights),
        "prompts": [
            {
                **{name: value for name, value in vars(each).items() if name != "place"},
                "completions": [_completion_json(scored) for scored in each.completions],
            }
            for each in tried.prompts
        ],
    }


def _completion_json(scored: ScoredRollout) -> dict[str, Any]:
    rollout = scored.rollout
    written: dict[str, Any] = {
        "text": scored.completion,
        "token_ids": list(rollout.completion_ids),
        "finish_reason": rollout.finish_reason,
        "rewards": dict(scored.rewards),
        "sum": None if math.isnan(scored.reward) else scored.reward,
        "advantage": scored.advantage,
        "extra": scored.extra,
    }
    if rollout.episode is not None:
        written["messages"] = list(rollout.episode.messages)
    return written
