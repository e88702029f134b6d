"""The observer that writes a run's report when the run ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from grpox.observing.display import escaped
from grpox.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from grpox.contracts import RunContext


class RunReport:
    """Writes ``report.html`` from what the local record holds, and tells where it is.

    A run that fails has one once an optimizer step is recorded.

    Args:
        console: where to tell it; default: standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._steps = self._evaluations = 0

    @hookimpl
    def grpox_step_finished(self) -> None:
        self._steps += 1

    @hookimpl
    def grpox_evaluated(self) -> None:
        self._evaluations += 1

    @hookimpl
    def grpox_run_failed(self, run: RunContext) -> None:
        if self._steps:
            self._write(run)

    @hookimpl
    def grpox_run_finished(self, run: RunContext) -> None:
        if self._steps or self._evaluations:
            self._write(run)

    def _write(self, run: RunContext) -> None:
        # Imported here because it takes half a second, which a run's start need not.
        from grpox.observing.report.page import write_report

        path = write_report(run.output_dir)
        text = f"report: {escaped(str(path))}"
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
