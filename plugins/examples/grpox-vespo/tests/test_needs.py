"""That a run without what the loss needs is refused before anything loads, and told what would do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SILENT = '''
class Silent:
    """A generator that does not tell the log-probabilities of what it samples."""

    def start(self, context): ...
    def generate(self, prompts, sampling, seed): ...
    def sync(self, weights, version): ...
    def sleep(self): ...
    def wake(self): ...
    def close(self): ...
'''


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["correction=none"], "needs 'token-weights', which nothing in this run provides; correction"),
        (["correction=sequence-truncate"], "needs 'token-weights'"),  # its R is that of the whole sequence
        (["correction=vespo", "generator={path: silent.py:Silent}"], "needs 'logprobs'"),
        (["correction=vespo"], ""),
        (["correction=token-truncate"], ""),
    ],
)
def test_a_run_without_weights_of_tokens_is_refused(changes: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text(SILENT)
    done = subprocess.run(
        [sys.executable, "-m", "grpox", "validate", "quickstart", "loss=vespo", *changes],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told in done.stderr
    assert done.returncode == (2 if told else 0), done.stderr
