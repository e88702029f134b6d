"""The metrics of a run's steps as lists, and as a table that a notebook shows and renews after each step."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from html import escape
from typing import Any

LAST = 10
"""Number of steps in the table."""
COLUMNS = ("reward", "loss", "entropy", "kl", "grad_norm", "completions/mean_length", "step_time")
"""Metrics in the table, where the run has them."""
RESULTS = ("accuracy", "reward", "success")
"""Metrics of an evaluation that the table shows."""


class StepTable:
    """Holds what happened on this rank since the run was opened.

    Args:
        title: name of the run.
        total_steps: planned steps.
        steps: steps before the run was opened.
    """

    def __init__(self, title: str, total_steps: int, steps: int = 0) -> None:
        self.history: list[dict[str, float]] = []
        """``step`` and the metrics of each step."""
        self.evaluations: list[dict[str, float]] = []
        """``step`` and the metrics of each evaluation."""
        self._title = title
        self._total_steps = total_steps
        self._steps = steps
        self._cell: int | None = None
        self._handle: Any = None

    def add(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step, or an evaluation if that is its kind."""
        rows = self.history if kind == "step" else self.evaluations
        rows.append({"step": step, **metrics})

    def show(self) -> None:
        """Show the table below the notebook's running cell, or renew it there; nothing outside a notebook."""
        # No dependency: a notebook's kernel has imported it.
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if shell is None or not hasattr(shell, "kernel"):
            return
        if self._cell != shell.execution_count or self._handle is None:
            from IPython.display import display

            self._cell, self._handle = shell.execution_count, display(self, display_id=True)
        else:
            self._handle.update(self)

    def _repr_html_(self) -> str:
        """Format the last steps and the last evaluation for a notebook."""
        done = self.history[-1]["step"] if self.history else self._steps
        lines = [f"<p><b>{escape(self._title)}</b>: step {done} of {self._total_steps}</p>"]
        shown = self.history[-LAST:]
        if shown:
            names = ["step", *(name for name in COLUMNS if any(name in row for row in shown))]
            head = "".join(f"<th>{escape(name)}</th>" for name in names)
            rows = ("".join(f"<td>{_number(row.get(name))}</td>" for name in names) for row in shown)
            body = "".join(f"<tr>{row}</tr>" for row in rows)
            lines.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        if self.evaluations:
            last = self.evaluations[-1]
            values = ", ".join(f"{name} {_number(last[name])}" for name in RESULTS if name in last)
            lines.append(f"<p>evaluation after step {last['step']}: {values}</p>")
        return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
