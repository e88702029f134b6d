"""The terminal shows completions as they are, a few lines for a long run, and a truthful summary."""

from __future__ import annotations

import io
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from support.contexts import context_of, scored
from support.golden import Golden

from grpox.contracts import RunContext, ScoredRollout
from grpox.errors.formatting import pluralize
from grpox.observing.display import TerminalDisplay, answer_column, escaped, sample_rows, shortened
from grpox.observing.notebook import LAST, StepTable


def context(total_steps: int = 10, **logging: int) -> RunContext:
    return context_of(Path("runs/demo"), total_steps, logging=logging)


class Plain(Console):
    """A console of 120 columns that is no terminal."""

    def __init__(self) -> None:
        super().__init__(width=120, file=io.StringIO(), force_terminal=False)

    def read(self) -> str:
        """Return what was written since the last call."""
        written = self.file.getvalue()  # type: ignore[attr-defined]
        self.file = io.StringIO()
        return written


def plain() -> tuple[TerminalDisplay, Plain]:
    console = Plain()
    return TerminalDisplay(console), console


def shown_of(*rollouts: ScoredRollout) -> str:
    """Return what is shown of a generation batch."""
    display, console = plain()
    display.grpox_rollouts_scored(context(), 1, rollouts)
    return console.read()


def started(run: RunContext) -> tuple[TerminalDisplay, Plain]:
    """A display that has told which run it shows, and has nothing else on its console."""
    display, console = plain()
    display.grpox_run_started(run)
    assert console.read() == f"run.yaml: {pluralize(run.total_steps, 'step')} on 1 rank, into runs/demo\n"
    return display, console


def step_lines(total_steps: int) -> list[int]:
    run = context(total_steps)
    display, console = started(run)
    for step in range(1, total_steps + 1):
        display.grpox_step_finished(run, step, {"reward": 0.25})
    return [int(line.split()[1].split("/")[0]) for line in console.read().splitlines()]


def test_a_run_shows_every_step_or_about_twenty_with_the_first_and_the_last() -> None:
    assert step_lines(7) == [1, 2, 3, 4, 5, 6, 7]
    assert step_lines(1001) == [1, *range(51, 1001, 51), 1001]


def test_a_step_shows_its_metrics_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    run = context(total_steps=5)
    display, console = started(run)
    metrics = {"reward": 0.25, "tokens_per_second/generated": 1234.5, "entropy": 9.0}
    # The first step ends after a start-up of 100 s, the third 20 s later: two more take 20 s.
    for step, now in ((1, 100.0), (3, 120.0)):
        monkeypatch.setattr("grpox.observing.display.time.monotonic", lambda now=now: now)
        display.grpox_step_finished(run, step, metrics)
    first, third = console.read().splitlines()
    assert first == "step 1/5  reward 0.250  1,234 tokens/s"
    assert third.endswith("20 s left")


def test_brackets_and_control_characters_of_a_completion_are_shown_not_obeyed() -> None:
    extra = {"judge": "good\n[b]", "length": 12}
    rollout = scored(1.0, "[/red] \x1b[2Jfour\n<4>\u202e", "[bold]2+2[/bold]", extra=extra)
    shown = shown_of(rollout, scored(0.0, extra={"judge": "bad"}))
    assert escaped("Grüße 数学 √2") == "Grüße 数学 √2"
    assert "[bold]2+2[/bold]" in shown
    assert r"[/red] \x1b[2Jfour\n<4>\u202e" in shown
    # Values that rewards logged are beside the completions.
    assert all(text in shown for text in ("judge", "length", r"good\n[b]", "12", "bad"))


def test_samples_come_every_so_many_steps_counted_from_the_last_sample() -> None:
    steps = (1, 4, 7, 11, 13)
    for every, shown in ((4, [1, 7, 11]), (0, [])):
        display, console = plain()
        for step in steps:
            display.grpox_rollouts_scored(context(completions_every=every), step, [scored(1.0)])
        lines = [line.strip() for line in console.read().splitlines()]
        assert [step for step in steps if f"completions for step {step}" in lines] == shown


def test_the_summary_tells_accuracy_and_success_before_and_after() -> None:
    display, console = plain()
    run = context()
    display.grpox_evaluated(0, {"accuracy": 0.125, "success": 0.25, "turns/mean": 3.0, "info/guesses": 5.0})
    display.grpox_evaluated(5, {"accuracy": 0.9})
    display.grpox_step_finished(run, 10, {})
    display.grpox_evaluated(10, {"accuracy": 0.5, "success": 0.875, "mean_length": 12.0})
    display.grpox_run_finished(run, {})
    shown = console.read()
    assert "evaluation after step 0: accuracy 0.125  success 0.25  info/guesses 5\n" in shown
    assert "evaluation after step 10: accuracy 0.5  success 0.875  mean_length 12\n" in shown
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if "│" in line]
    assert [row for row in rows if row[0] != "time"] == [
        ["accuracy before training", "0.1250"], ["accuracy after step 10", "0.5000"],
        ["success before training", "0.2500"], ["success after step 10", "0.8750"], ["steps", "10"],
        ["folder", "runs/demo"],
    ]  # fmt: skip


def test_the_line_of_an_evaluation_holds_its_main_values(golden: Golden) -> None:
    display, console = started(context())
    metrics = {"accuracy": 0.5, "pass_at_4": 0.75, "reward": 0.5, "reward_std": 0.5, "rewards/a/mean": 0.5}
    metrics |= {"rewards/a/std": 0.5, "rewards/a/abstained": 0.0, "completions/mean_length": 3.0}
    display.grpox_evaluated(0, metrics)
    golden(console.read())
    display.grpox_evaluated(0, metrics | {"rewards/b/mean": 1.0})
    assert "reward 0.5  rewards/a/mean 0.5  rewards/b/mean 1\n" in console.read()
    # Of each set the line and the summary hold the result.
    sets = {"hard": {"path": "hard.jsonl"}, "easy": {"path": "easy.jsonl"}}
    run = context_of(Path("runs/demo"), evaluation={"sets": sets})
    display, console = started(run)
    of_all = {"accuracy": 0.5, "rewards/a/mean": 0.5, "completions/mean_length": 3.0}
    of_sets = {f"{name}/{metric}": value for name in sets for metric, value in of_all.items()}
    display.grpox_evaluated(0, of_all | of_sets | {"judge/accuracy": 0.25})
    line = "accuracy 0.5  rewards/a/mean 0.5  judge/accuracy 0.25  hard/accuracy 0.5  easy/accuracy 0.5\n"
    assert f"evaluation after step 0: {line}" in console.read()
    display.grpox_run_finished(run, {})
    assert "hard/accuracy before training │ 0.5000" in console.read()


def test_the_summary_tells_why_a_run_stopped_early_and_which_checkpoint_is_the_best(
    golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: 60.0, time=lambda: now)
    monkeypatch.setattr("grpox.observing.display.time", clock)
    display, console = plain()
    run = replace(context(), started=900.0)
    display.grpox_run_started(run)
    display.grpox_step_finished(run, 5, {"step_time": 20.0})
    now = 1250.0
    display.grpox_step_finished(run, 6, {"step_time": 40.0})
    stopped = {"step": 6, "metric": "evaluation/accuracy", "best": 0.5, "best_step": 2}
    best = {"metric": "reward", "value": 0.25, "step": 4, "checkpoint": "runs/demo/checkpoints/step-00000004"}
    summary = {"stopped_early": stopped | {"evaluations_without_gain": 2}, "best_checkpoint": best}
    display.grpox_run_finished(run, summary)
    golden(console.read())


@pytest.mark.parametrize(
    ("width", "shown"),
    [(70, "reward 0.250  loss -1.234e-05  12.3 s/step"), (50, "reward 0.250  12.3 s/step")],
)
def test_the_live_line_cuts_no_part_and_ends_with_the_run(width: int, shown: str) -> None:
    metrics = {"reward": 0.25, "loss": -0.00001234, "tokens_per_second/generated": 1e6, "step_time": 12.3}
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    display = TerminalDisplay(console)
    run = context(total_steps=10_000)
    display.grpox_run_started(run)
    display.grpox_step_finished(run, 9_999, metrics)
    display.grpox_run_failed(run)
    line = console.export_text().splitlines()[-1]
    assert f" 9999/10000 {shown}" in line
    assert "…" not in line
    console.print("after")  # a live display still running would draw its line again
    assert console.export_text() == "after\n"


def test_a_sample_shows_the_question_the_right_answer_and_each_reward_once_at_80_columns() -> None:
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=False)
    rewards = {"math": 1.0, "a_reward_with_a_very_long_name": None, "format": 0.5}
    columns = {"level": "hard", "solution": "four", "answer": "4"}
    rollout = scored(1.25, "It is 4.", "<|user|>What is 2+2?<|end|>", rewards=rewards, columns=columns)
    rollout = replace(rollout, question="What is 2+2?", advantage=-0.125)
    TerminalDisplay(console).grpox_rollouts_scored(context(), 1, [rollout])
    shown = console.export_text()
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert not re.search(r"<\|user\|>|hard", shown)
    rows = [[cell.strip() for cell in re.split("[│┃]", line.strip("│┃"))] for line in shown.splitlines()]
    assert ["prompt", "completion", "answer", "scores"] in rows
    assert ["What is 2+2?", "It is 4.", "4", "reward              1.250"] in rows
    scores = [" ".join(row[-1].split()) for row in rows if len(row) == 4][2:]
    assert scores == ["math 1.000", "a_rewa ... _name none", "format 0.500", "advantage -0.125"]
    # One reward that is the sum is told as such, and two of equal shortened names both.
    shown = shown_of(scored(1.0))
    assert ("reward     1.000" in shown, "math" in shown) == (True, False)
    shown = shown_of(scored(rewards={"judge_of_style_of_answers": 0.25, "judge_of_facts_of_answers": 0.75}))
    assert [f"judge_ ... swers  {score}" in shown for score in ("0.250", "0.750")] == [True, True]


def test_the_column_with_the_right_answer_is_that_of_a_reward_or_one_of_its_usual_names() -> None:
    run = context()
    assert answer_column(run, {"level": 1, "solution": 2}) == "solution"
    assert answer_column(run, {"level": 1}) is None
    run = context_of(Path(), rewards=["math", {"name": "exact", "column": "level"}])
    assert answer_column(run, {"answer": 1, "level": 2}) == "level"
    assert answer_column(run, {"answer": 1}) == "answer"


def test_samples_span_best_to_worst_with_unscored_last_and_keep_start_and_end_of_a_text() -> None:
    rollouts = [scored(reward) for reward in (0.0, 1.0, math.nan, 0.5, 0.25, 0.75, -1.0)]
    # Ranked: 1, .75, .5, .25, 0, -1, nan; the ranks 0, 2, 4, 6 of seven.
    rewards = [row.reward for row in sample_rows(rollouts)]
    assert rewards == pytest.approx([1.0, 0.5, 0.0, math.nan], nan_ok=True)
    assert shortened("start" + "x" * 100 + "answer", 21) == "startxxx ... xxanswer"
    assert shortened("x" * 21, 21) == "x" * 21


# -- The table of a notebook -----------------------------------------------------------------------------


def test_the_table_of_a_notebook_has_the_last_steps_and_only_metrics_of_the_run() -> None:
    table = StepTable("runs/<mine>", 20)
    table.add("evaluation", 0, {"accuracy": 0.25})
    for step in range(1, 13):
        table.add("step", step, {"reward": step / 10, "time/update": 1.0})
    page = table._repr_html_()
    assert "<b>runs/&lt;mine&gt;</b>: step 12 of 20" in page
    assert page.count("<tr>") == 1 + LAST
    assert "<th>reward</th>" in page
    assert "<th>loss</th>" not in page
    assert "<td>3</td><td>0.3</td>" in page
    assert "<td>2</td><td>0.2</td>" not in page
    assert "evaluation after step 0: accuracy 0.25" in page
    assert "step 20 of 20" in StepTable("runs/mine", 20, 20)._repr_html_()  # of a run that goes on


def test_the_table_is_shown_once_in_a_cell_and_then_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
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
    table = StepTable("runs/mine", 20)
    table.show()
    table.show()
    shell.execution_count = 2
    table.show()
    assert happened == ["shown", "renewed", "shown"]
    del shell.kernel  # a shell in a terminal
    table.show()
    assert len(happened) == 3
