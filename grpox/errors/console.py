"""The console of all commands, on which text from outside moves no cursor and changes no colour."""

from __future__ import annotations

from collections.abc import Iterable

from rich import console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from grpox.errors import visible


class Console(console.Console):
    """Shows control characters of texts escaped; those that rich itself writes are no text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
