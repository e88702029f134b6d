"""A draft as the text of a run file: values, comments, and commented lines for what is to be filled in."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from grpox.config import RunConfig, Section
from grpox.errors import plain
from grpox.runfile.from_trl.draft import Blank, Draft
from grpox.runfile.from_trl.fields import Verdict
from grpox.runfile.yaml_lines import Dumper

WIDTH = 110
_LOST = (Verdict.UNSUPPORTED, Verdict.UNKNOWN)


def run_file_text(draft: Draft) -> str:
    """The whole file."""
    blocks = ["\n".join(_heading(draft))]
    for key in RunConfig.model_fields:
        blanks = [blank for blank in draft.blanks if re.split(r"[.[]", blank.key)[0] == key]
        lines = list(_block(draft, key, blanks))
        if lines:
            blocks.append("\n".join(lines))
    return "\n".join(blocks) + "\n"


def inline(value: Any) -> str:
    """A value on one line."""
    text: str = yaml.dump(
        [value], Dumper=Dumper, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True
    )
    return text.strip()[1:-1]


def _heading(draft: Draft) -> Iterator[str]:
    yield f"# From {plain(draft.setup.source)}, a set-up for TRL's GRPOTrainer, by `grpox import-trl`."
    lost = [row for row in draft.rows if row.verdict in _LOST]
    if lost:
        yield "# Not carried over:"
    for row in lost:
        yield from _comment(f"{row.name} {plain(row.given, 60)}: {row.message}", "#   ")


def _comment(text: str, prefix: str) -> list[str]:
    return textwrap.wrap(
        plain(text, 400), WIDTH, initial_indent=prefix, subsequent_indent=f"{prefix}  ", break_long_words=False
    )


def _block(draft: Draft, key: str, blanks: list[Blank]) -> Iterator[str]:
    """The lines of a top-level key: of a section and of rewards, one a value; else one."""
    value = draft.values.get(key)
    kind = RunConfig.model_fields[key].annotation
    if isinstance(kind, type) and issubclass(kind, Section) and (value or key in ("model", "data")):
        yield f"{key}:"
        for name, part in (value or {}).items():
            yield _line(f"  {name}: {inline(part)}", draft.comments.get(f"{key}.{name}", ""))
        yield from (line for blank in blanks for line in _blank(blank, "  "))
        return
    if key == "rewards":
        yield from _rewards(value, blanks)
        return
    yield from (line for blank in blanks for line in _blank(blank, ""))
    if value is not None:
        yield _line(f"{key}: {inline(value)}", draft.comments.get(key, ""))


def _rewards(value: Any, blanks: list[Blank]) -> Iterator[str]:
    if not value:
        yield "# rewards:"
    else:
        yield "rewards:"
        for entry in value:
            yield f"  - {inline(entry)}"
    for blank in blanks:
        yield from _comment(blank.why, "  # ")
        entry = "-" if blank.key == "rewards" else f"{blank.key}:"
        yield f"  # {entry} {plain(blank.example)}"


def _blank(blank: Blank, indent: str) -> Iterator[str]:
    """What is to be filled in, and above it why."""
    name = blank.key.partition(".")[2] if indent else blank.key
    yield from _comment(blank.why, f"{indent}# ")
    yield f"{indent}# {name}: {plain(blank.example)}"


def _line(text: str, comment: str) -> str:
    return f"{text}  # {plain(comment, WIDTH)}" if comment else text
