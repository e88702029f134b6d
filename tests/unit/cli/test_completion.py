"""The shell completes commands and options of grpox, and of plugins, without anything heavy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import sys
from grpox.cli import main
try:
    main()
finally:
    print(sorted({'torch', 'transformers', 'mlflow', 'datasets'} & set(sys.modules)), file=sys.stderr)
"""


def completed(variables: dict[str, str]) -> str:
    """Return the answer to a shell; it may import nothing heavy, because the user waits."""
    command = [sys.executable, "-c", CODE]
    environment = os.environ | variables
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == "[]\n"
    return done.stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("grpox pl", ["plan", "plugins"]),
        ("grpox run", ["runs"]),  # a plugin's command
        ("grpox plugins sh", ["show"]),
        ("grpox train --re", ["--resume"]),
        ("grpox runs list --la", ["--last"]),
        ("grpox train no-such-", []),  # the shell goes on with the names of files
    ],
)
def test_bash_is_answered_with_the_words_that_fit(line: str, words: list[str]) -> None:
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_GRPOX_COMPLETE": "complete_bash"}
    assert completed(asked).split() == words
