"""Writes the listings of the pages Contracts and Hooks from the sources: ``python docs/hooks/listings.py``.

The listings are part of the pages, so that they can be read without building the site.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {"docs/contracts.md": "grpox/contracts.py", "docs/hooks.md": "grpox/plugins/hookspecs.py"}
"""Page -> the source that it lists."""
BEGIN = "<!-- listing: written by docs/hooks/listings.py -->"
SECTION = re.compile(r"^# -- (.+?) -+$", re.MULTILINE)


def page_of(page: str) -> str:
    """Return the whole text of a page: its introduction as it stands, and a new listing."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return text[: text.index(BEGIN)] + BEGIN + "\n" + listing((ROOT / PAGES[page]).read_text(encoding="utf-8"))


def listing(source: str) -> str:
    """Return a section for each ``# -- Title ---`` of a source, and in it each public name with its code."""
    marks = [(match.start(), match[1]) for match in SECTION.finditer(source)]
    lines, parts = source.splitlines(), []
    starts = [(source.count("\n", 0, at) + 1, title) for at, title in marks]
    body = ast.parse(source).body
    for number, (name, begin, end) in enumerate(entries(body)):
        reached = [title for line, title in starts if line < begin]
        if number == 0 and not reached:
            parts.append("\n## General\n")
        while starts and starts[0][0] < begin:
            parts.append(f"\n## {starts.pop(0)[1]}\n")
        code = "\n".join(lines[begin - 1 : end])
        parts.append(f"\n### `{name}`\n\n```python\n{code}\n```\n")
    return "".join(parts)


def entries(body: list[ast.stmt]) -> list[tuple[str, int, int]]:
    """List the public classes, functions and constants: name, first line and last line with the docstring."""
    listed: list[tuple[str, int, int]] = []
    for place, node in enumerate(body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            name = node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            begin, name = node.lineno, ast.unparse(target)
        else:
            continue
        if name.startswith("_") or name in ("hookspec", "hookimpl"):
            continue
        after = body[place + 1] if place + 1 < len(body) else None
        is_doc = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        last = after if is_doc and after is not None else node
        listed.append((name, begin, last.end_lineno or begin))
    return listed


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(page_of(page), encoding="utf-8")
