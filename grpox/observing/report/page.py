"""Renders the report of a run: one HTML file that needs no network and runs only its own script.

Prompts, completions, labels and config are untrusted text: jinja2 escapes every value, and the page's content
security policy, which names its one script by hash, refuses any other.
"""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from grpox.errors.formatting import duration
from grpox.errors.redaction import redact, redacted
from grpox.observing.early_stop import describe_early_stop
from grpox.observing.report.charts import COLOURS, MOST_POINTS, charts_of, draw, left_out, marked_evaluations
from grpox.observing.report.data import (
    COMPLETION_CHARACTERS,
    MOST_BATCHES,
    MOST_SAMPLES,
    PROMPT_CHARACTERS,
    RunRecord,
    read_record,
    read_samples,
)
from grpox.runfile.yaml_lines import Dumper
from grpox.runtime.files import write_atomically

REPORT = "report.html"
"""Name of the report in a run's folder."""
_HERE = Path(__file__).parent


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Write the report of the run in `folder`, whole or not at all, and return its path.

    Args:
        output: the file to write; default: ``report.html`` in `folder`.

    Raises:
        ConfigError: `folder` is not a run's folder, or one of its files cannot be read.
    """
    path = output or folder / REPORT
    write_atomically(path, render(read_record(folder)))
    return path


def render(record: RunRecord) -> str:
    """Return the report of a run as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "duration": duration, "moment": moment}
    batches, saved = read_samples(record.folder)
    config = redacted(record.config)
    text = record.config_text
    if config != record.config:  # another program has written secrets into it
        text = yaml.dump(config, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
    stopped = record.summary.get("stopped_early")
    script = (_HERE / "report.js").read_text(encoding="utf-8")
    return environment.get_template("report.html.j2").render(
        run=record,
        model=(config.get("model") or {}).get("path"),
        tiles=list(_tiles(record)),
        charts=[(chart, left_out(chart, record), Markup(draw(chart, record))) for chart in charts_of(record)],
        colours=COLOURS,
        marked=marked_evaluations(record),
        steps_per_point=math.ceil(len(record.steps) / MOST_POINTS),
        batches=batches,
        saved=saved,
        limits=(MOST_BATCHES, MOST_SAMPLES, PROMPT_CHARACTERS, COMPLETION_CHARACTERS),
        metrics=list(_metric_rows(record)),
        components=list(_components(config)),
        config=text,
        error=redact(record.error),
        style=Markup((_HERE / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        now=time.time(),
        stopped_early=describe_early_stop(stopped) if isinstance(stopped, Mapping) else "",
    )


def number(value: float | None) -> str:
    """Format a number with four digits, and whole numbers in full; None becomes a dash."""
    if value is None:
        return "\N{EN DASH}"
    text = f"{value:,.0f}" if abs(value) >= 1e4 and math.isfinite(value) else f"{value:.4g}"
    return text.replace("-", "\N{MINUS SIGN}") if value < 0 else text


def moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _tiles(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, remark) for the numbers at the top of the page."""
    for name, recorded in (("accuracy", record.evaluations), ("reward", record.steps)):
        having = [entry for entry in recorded if name in entry.values]
        if having:
            first, last = having[0], having[-1]
            values = dict.fromkeys(f"{entry.values[name]:.3g}" for entry in (first, last))
            when = dict.fromkeys(
                f"at step {entry.step}" if entry.step else "before training" for entry in (first, last)
            )
            yield name, " \N{RIGHTWARDS ARROW} ".join(values), " and ".join(when)
    yield "steps", number(record.steps[-1].step if record.steps else 0), "of the optimizer"
    yield "time", duration(record.seconds), "of training"
    tokens = [entry.values["num_tokens"] for entry in record.steps if "num_tokens" in entry.values]
    if tokens:
        yield "tokens", number(tokens[-1]), "prompts and completions"
    trained, total = (record.summary.get(name) for name in ("trained_parameters", "parameters"))
    if trained and total and trained != total:
        yield "trained", f"{trained / total:.2%}", f"{trained:,} of {total:,} parameters, in adapters"


def _metric_rows(record: RunRecord) -> Iterator[tuple[str, tuple[float, float, float, float]]]:
    """Yield (name, (first, last, lowest, highest)) of every metric, evaluations last."""
    for prefix, recorded in (("", record.steps), ("evaluation/", record.evaluations)):
        for name in dict.fromkeys(name for entry in recorded for name in entry.values):
            values = [entry.values[name] for entry in recorded if name in entry.values]
            finite = [value for value in values if not math.isnan(value)] or [math.nan]
            yield prefix + name, (values[0], values[-1], min(finite), max(finite))


def _components(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, name, parameters) of each component of the run."""
    evaluation, train, data = (config.get(section) or {} for section in ("evaluation", "train", "data"))
    refs = [("reward", ref) for ref in config.get("rewards") or ()]
    refs += [("reward of evaluations", ref) for ref in evaluation.get("rewards") or ()]
    refs += [(kind, config.get(kind)) for kind in ("generator", "advantage", "loss", "correction")]
    refs += [(kind, train.get(kind)) for kind in ("optimizer", "scheduler")]
    refs += [("dataset", data.get("source"))]
    refs += [("observer", {"name": name, **ref}) for name, ref in (config.get("tracking") or {}).items()]
    for kind, ref in refs:
        if isinstance(ref, Mapping):
            values = {key: value for key, value in ref.items() if key not in ("name", "path")}
            parameters = ", ".join(f"{key}: {value}" for key, value in values.items() if value is not None)
            yield kind, str(ref.get("name") or ref.get("path")), parameters
