"""The table of a run's steps in a notebook."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from grpox.observing.notebook import LAST, StepTable


def filled(steps: int) -> StepTable:
    table = StepTable("runs/<mine>", 20)
    table.add("evaluation", 0, {"accuracy": 0.25})
    for step in range(1, steps + 1):
        table.add("step", step, {"reward": step / 10, "time/update": 1.0})
    return table


def test_the_table_has_the_last_steps_and_only_metrics_of_the_run() -> None:
    page = filled(12)._repr_html_()
    assert "<b>runs/&lt;mine&gt;</b>: step 12 of 20" in page
    assert page.count("<tr>") == 1 + LAST
    assert "<th>reward</th>" in page
    assert "<th>loss</th>" not in page
    assert "<td>3</td><td>0.3</td>" in page
    assert "<td>2</td><td>0.2</td>" not in page
    assert "evaluation after step 0: accuracy 0.25" in page
    assert "step 20 of 20" in StepTable("runs/mine", 20, 20)._repr_html_()  # of a run that goes on


def test_it_is_shown_once_in_a_cell_and_then_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a double of IPython, which is not installed here."""
    happened: list[str] = []
    shell: Any = SimpleNamespace(kernel=object(), execution_count=1)
    ipython: Any = ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    of_display: Any = ModuleType("IPython.display")

    def display(table: StepTable, display_id: bool) -> Any:
        happened.append("shown")
        return SimpleNamespace(update=lambda table: happened.append("renewed"))

    of_display.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", of_display)
    table = filled(1)
    table.show()
    table.show()
    shell.execution_count = 2
    table.show()
    assert happened == ["shown", "renewed", "shown"]
    del shell.kernel  # a shell in a terminal
    table.show()
    assert len(happened) == 3
