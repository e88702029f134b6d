"""The README's own examples, taken from its text."""

import json
import shlex
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_a_run_is_begun_checked_and_trained_as_the_commands_stand(grpox, folder):
    (script,) = [code for code in README.split("```")[1::2] if "grpox init mine" in code]
    commands = script.strip().splitlines()
    assert len(commands) == 7
    [loss] = [code for code in README.split("```")[1::2] if "class Reinforce" in code]
    assert len(loss.strip().splitlines()) <= 16  # its language and the loss in 15 lines
    for command in commands:
        *launcher, _, words = command.partition("grpox ")
        done = grpox(*shlex.split(words, comments=True), ranks=2 if "torchrun" in launcher[0] else 1)
        assert done.returncode == 0, (command, done.stderr)
    assert json.loads((folder / "runs" / "mine" / "summary.json").read_text())["steps"] == 3
