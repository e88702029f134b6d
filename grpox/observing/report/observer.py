"""The observer that writes a run's report when the run ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpox.observing.display import escaped
from grpox.plugins.hookspecs import hookimpl
from grpox.runtime.logs import get_logger

if TYPE_CHECKING:
    from grpox.contracts import RunContext


logger = get_logger(__name__)


class RunReport:
    """Writes ``report.html`` from what the local record holds, and tells where it is.

    A run that fails has one once an optimizer step is recorded.
    """

    def __init__(self) -> None:
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

        logger.info("report: %s", escaped(str(write_report(run.output_dir))))
