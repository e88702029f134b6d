"""The commands of the pages that look at what a run has left, after a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support import processes
from support.docs_blocks import COMMANDS, Command
from support.handlers import Ended

NOT_RUN = {
    r"replay ": "needs a fault; test_numerical_faults.py replays one",
    r"runs compare ": "needs two runs; test_run_folders.py compares two",
    r"watch ": "serves until it is stopped; test_watch_run.py stops one",
    r"eval .*generator=vllm-server": "needs a server of vLLM's; test_vllm_server.py has one",
}
"""Commands that are only parsed, by how they begin, and why."""
CODES = {"plugins diff before.json runs/b": 1}
"""Command -> its exit code, if that is not 0: these differ."""
BEFORE = "plugins lock quickstart --output before.json"
"""Needs no run, but one of the others needs what it makes."""
COMMANDS_AFTER = [
    command
    for command in COMMANDS
    if (command.needs_a_run or command.line == BEFORE)
    and not command.block.is_done_by_the_tutorial
    and not any(re.match(pattern, command.line) for pattern in NOT_RUN)
]
SCRIPT = Path(__file__).with_name("docs_after_a_run.py")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """Return the outcome of each command, run one after the other in one process."""
    folder = tmp_path_factory.mktemp("reader")
    done = processes.run(SCRIPT, folder, env={"MLFLOW_TRACKING_URI": None})
    assert done.returncode == 0, done.stderr[-4000:]
    return [Ended(**each) for each in json.loads((folder / "ended.json").read_text(encoding="utf-8"))]


@pytest.mark.parametrize("place", range(len(COMMANDS_AFTER)), ids=lambda place: COMMANDS_AFTER[place].line)
def test_a_command_after_a_run_ends_as_its_page_says(place: int, ended: list[Ended]) -> None:
    command: Command = COMMANDS_AFTER[place]
    found = ended[place]
    assert found.code == CODES.get(command.line, 0), f"{command.block.place}\n{found.output}{found.errors}"


def test_what_is_not_run_is_still_on_a_page() -> None:
    lines = {command.line for command in COMMANDS}
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, line) for line in lines)] == []
    assert CODES.keys() | {BEFORE} <= lines
