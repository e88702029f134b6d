"""Set-up for all tests: variables, the session's folder, plugins."""

import os
import shutil
import signal
from collections.abc import Iterator

import pytest
from support import processes, services, session

pytest_plugins = [
    "support.fixtures",
    "support.golden",
    "support.logs",
    "support.order",
    "support.leaks",
    "support.skips",
]

# A shell that starts a job in the background has it ignore Ctrl-C, which the commands under test would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A test's tensors are small, and all workers together have as many cores as there are.
os.environ["OMP_NUM_THREADS"] = "1"
# Most tests start processes: without bytecode, each would compile all of grpox anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

OWNS_SESSION = session.VARIABLE not in os.environ
session.session_folder()
processes.remember_environment()  # before libraries set variables of their own


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"processes started: {processes.started()}")


def pytest_sessionfinish() -> None:
    # Not later: xdist gives a worker ten seconds from here on, and then kills it.
    services.leave_services()


def pytest_unconfigure() -> None:
    if OWNS_SESSION:
        services.end_services()
        shutil.rmtree(session.session_folder(), ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def environment_kept() -> Iterator[None]:
    """Remove variables that libraries set in this process during a module's tests, for the processes of the
    next one."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
