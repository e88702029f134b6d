"""Commands of grpox in the test's process; signal handlers are put back for the tests that come after."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from unittest.mock import patch


@dataclass(frozen=True)
class Ended:
    """The outcome of a command."""

    code: int
    output: str
    errors: str


def invoke(words: Sequence[str], ranks: int = 1) -> Ended:
    """Run `grpox` with these words in this process, which stands for the first of `ranks`, as the console
    script does."""
    from grpox.cli.app import app
    from grpox.cli.errors import run_command

    output, errors = StringIO(), StringIO()
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
    with patch.dict("os.environ", place), redirect_stdout(output), redirect_stderr(errors), handlers_kept():
        code = run_command(lambda arguments: app(arguments, prog_name="grpox"), list(words))
    return Ended(code, output.getvalue(), errors.getvalue())


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Put the handlers of Ctrl-C and of an order to end, and the umask, back when the block ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    os.umask(mask := os.umask(0o022))
    try:
        yield
    finally:
        os.umask(mask)
        for number, handler in before.items():
            signal.signal(number, handler)
