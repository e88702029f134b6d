"""The console of all commands, on which text from outside moves no cursor and changes no colour."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box, console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from grpox.errors import visible


class Console(console.Console):
    """Shows control characters of texts escaped; those that rich itself writes are no text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def folding_table(*headings: str) -> Table:
    """Begin a table without frames. Its cells are folded, not cut, so that names and commands can be copied."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
