"""Writes the page of a run, or of several, as one HTML file that needs no server: the report."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpox.errors import ConfigError
from grpox.errors.formatting import spread
from grpox.observing.page.data import (
    COMPLETION_CHARACTERS,
    MESSAGE_CHARACTERS,
    METRICS,
    MOST_MESSAGES,
    PROMPT_CHARACTERS,
    SampledBatch,
    check_folder,
    compare,
    read_samples,
)
from grpox.observing.page.document import document
from grpox.observing.page.rows import tokens_of
from grpox.observing.page.source import RunSource
from grpox.observing.record_files import finite
from grpox.runtime.files import readable, write_atomically
from grpox.runtime.logs import get_logger

logger = get_logger(__name__)
REPORT = "report.html"
"""Name of the report in a run's folder."""
POINTS = 400
"""Largest number of points of a curve."""
SHARES = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 0)
"""Parts of the points, of the completions and of their tokens, of which the first that fits is taken."""
METRICS_BYTES = 240_000
"""Size of all curves of a page."""
COMPLETIONS_BYTES = 860_000
"""Size of all completions of a page."""
MOST_RECORDED = 8
"""Largest number of completions of a batch with recorded tokens that are shown beside the others."""
TOKENS_BYTES = 250_000
"""Size of all tokens of a page."""


def write_report(
    folder: Path, output: Path | None = None, warn: Callable[[str], None] = logger.warning
) -> Path:
    """Write the report of the run in `folder`, whole or not at all, and return its path.

    Args:
        output: the file to write; default: ``report.html`` in `folder`.
        warn: gets what is wrong with the run's record, a line for each fault.

    Raises:
        ConfigError: `folder` is not a run's folder, or one of its files cannot be read.
    """
    path = output or folder / REPORT
    write_atomically(path, render([folder], warn))
    return path


def write_comparison(folders: Sequence[Path], output: Path) -> Path:
    """Write one page that shows the curves of several runs over each other, and in what they differ.

    Raises:
        ConfigError: one of `folders` is not a run's folder, or one of its files cannot be read.
    """
    if output.is_dir():
        raise ConfigError("is a folder: name a file", key="--html", given=str(output))
    write_atomically(output, render(folders))
    return output


def render(folders: Sequence[Path], warn: Callable[[str], None] = logger.warning) -> str:
    """Return the page of the runs in `folders` as HTML, of 1.4 megabytes at most."""
    for folder in folders:
        check_folder(folder)
    names = _names(folders)
    sources = [RunSource(folder, name) for name, folder in names.items()]
    runs = {source.name: source.run() for source in sources}
    for run in runs.values():
        for problem in run["problems"]:
            warn(f"{run['folder']}: {problem}")
    metrics = _first_fitting(
        METRICS_BYTES,
        lambda share: {each.name: _rounded(each.metrics(points=int(POINTS * share))) for each in sources},
    )
    for name, folder in names.items():
        if not metrics[name]["names"]:
            raise ConfigError("has no finished step and no evaluation", where=str(folder / METRICS))
    answers: dict[str, Any] = {
        "run": runs,
        "metrics": metrics,
        "phases": {source.name: source.phases() for source in sources},
        **_completions(names),
    }
    for source in sources:
        source.close()
    if len(names) > 1:
        answers["compare"] = compare(names)
    shown = [{"name": name, "shown": True} for name in names]
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    title = f"{', '.join(run['source'] for run in runs.values())} \N{EN DASH} grpox"
    return document({"made": now, "runs": shown, "answers": answers}, title)


def _names(folders: Sequence[Path]) -> dict[str, Path]:
    """Name each run by its folder; folders of one name by their paths."""
    absolute = [folder.absolute() for folder in folders]
    last = [folder.name for folder in absolute]
    return {readable(folder if last.count(folder.name) > 1 else folder.name): folder for folder in absolute}


def _first_fitting(most: int, build: Callable[[float], dict[str, Any]]) -> dict[str, Any]:
    """Return the answer with the largest share that has at most `most` bytes as JSON, else the last one."""
    answer: dict[str, Any] = {}
    for share in SHARES:
        answer = build(share)
        if len(json.dumps(answer, ensure_ascii=False).encode(errors="surrogatepass")) <= most:
            break
    return answer


def _rounded(answer: dict[str, Any]) -> dict[str, Any]:
    """Round values to six digits, which a curve does not show."""
    series = {
        name: [steps, [None if value is None else float(f"{value:.6g}") for value in values]]
        for name, (steps, values) in answer["series"].items()
    }
    return {**answer, "series": series}


def _completions(names: Mapping[str, Path]) -> dict[str, Any]:
    """Return the completions and the tokens of all runs, each within its size."""
    batches = {name: read_samples(folder, MOST_RECORDED) for name, folder in names.items()}
    completions = _first_fitting(
        COMPLETIONS_BYTES,
        lambda share: {name: _answer(*of_run, share) for name, of_run in batches.items()},
    )
    recorded = {
        name: {
            row["id"]: columns_of(tokens_of(folder, row["id"]))
            for row in completions[name]["rows"]
            if row["has_tokens"]
        }
        for name, folder in names.items()
    }
    tokens = _first_fitting(
        TOKENS_BYTES,
        lambda share: {name: _part(of_run, share) for name, of_run in recorded.items()},
    )
    for name, answer in completions.items():
        for row in answer["rows"]:
            row["has_tokens"] = row["id"] in tokens[name]
        if answer["remark"] and len(tokens[name]) < len(recorded[name]):
            answer["remark"] += (
                f"Tokens of {len(tokens[name])} of the {len(recorded[name])} recorded completions here are on"
                " this page; grpox watch shows all.",
            )
    return {"completions": completions, "tokens": tokens}


def columns_of(tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tokens of a completion as columns for the page; one value for a column that never changes.

    Numbers are rounded to four digits, which the page shows.
    """
    columns: dict[str, Any] = {}
    for name in tokens[0] if tokens else ():
        values = [token[name] for token in tokens]
        values = [float(f"{each:.4g}") if isinstance(each, float) else each for each in values]
        columns[name] = values if len(set(values)) > 1 else values[0]
    return {"count": len(tokens), "columns": columns}


def _part(recorded: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Return a part of the tokens, evenly spaced."""
    ids = list(recorded)
    return {ids[place]: recorded[ids[place]] for place in spread(len(ids), math.ceil(len(ids) * share))}


def _answer(batches: Sequence[SampledBatch], saved: int, share: float) -> dict[str, Any]:
    """Return all shown completions of a run in the form of `RunSource.completions`, and what is left out."""
    rows: list[Mapping[str, Any]] = []
    table: list[list[Any]] = []
    for batch in batches:
        extremes = {batch.best: "best", batch.worst: "worst"} if batch.best != batch.worst else {}
        # The first and the last row of a batch are always among a part.
        places = spread(len(batch.rows), max(2, int(len(batch.rows) * share)))
        for row in (batch.rows[place] for place in places):
            rows.append({**row, "extreme": extremes.get(row["reward"], "")})
        numbers = map(finite, (batch.worst, batch.mean, batch.best))
        table.append([batch.label, len(places), batch.total, *numbers])
    remark = (
        f"{len(batches)} of {saved} saved generation batches, evenly spaced over the run.",
        f"Of each batch at most {max((shown for _, shown, *_ in table), default=0)} completions: its best, its"
        " worst, between them evenly spaced ranks of reward, and those whose tokens are recorded. Prompts over"
        f" {PROMPT_CHARACTERS} and completions over {COMPLETION_CHARACTERS} characters are cut in the middle,"
        f" conversations over {MOST_MESSAGES} messages and messages over {MESSAGE_CHARACTERS} characters too."
        " The rest is in completions/*.parquet; grpox watch shows and searches all of it.",
    )
    return {
        "total": len(rows),
        "is_indexed": True,
        "rows": rows,
        "batches": table,
        "remark": remark if rows else None,
    }
