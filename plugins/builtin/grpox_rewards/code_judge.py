"""The program that judges one completion: it runs the code in a confined child, and the tests in itself.

Nothing that decides is where the completion could reach it: tests and verdict are in this process, which the
child may not look into, and are read after the child has been made.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import signal
import site
import sys
import time
from types import ModuleType
from typing import Any, NoReturn

sys.path.append(sys.argv[1])

from grpox_rewards.code_confine import confine, die_with_parent, fork_apart, hide, limit_memory
from grpox_rewards.code_remote import Channel, Closed, RemoteProcess, serve

sys.path.remove(sys.argv[1])

LONGEST = 1 << 30
"""Bytes of a message with the code or its tests."""
MOST_OUTPUT = 1 << 20
"""Bytes of output that are read; beyond, the test has failed."""


class OutOfTime(BaseException):
    """So that no test catches it by what it expects of the code."""


def main() -> None:
    """Two messages in, the code and then its tests, which a program has none of; one out, the verdict.

    They come and go over the socket that standard input is.
    """
    hide()
    die_with_parent()
    trainer = Channel(0, os.dup(0), most=LONGEST)
    code = json.loads(trainer.receive())
    is_program = code["input"] is not None
    questions, ask = os.pipe()
    answers, answer = os.pipe()
    output, stdout = os.pipe()
    stdin = _sealed_file(code["input"] or "")
    child = fork_apart()
    if child == 0:
        _run(code, is_program, (questions, answer), (stdin, stdout))
    for file in (questions, answer, stdin, stdout):
        os.close(file)
    limit_memory(code["memory"])
    channel = Channel(answers, ask)
    try:
        verdict: dict[str, Any] = {"lacking": json.loads(channel.receive())}
    except Closed:
        raise SystemExit("the code could not be confined") from None
    tests = [] if is_program else json.loads(trainer.receive())
    _silence()
    signal.signal(signal.SIGALRM, _out_of_time)
    end = time.monotonic() + code["seconds"]
    signal.setitimer(signal.ITIMER_REAL, code["seconds"])
    try:
        if is_program:
            verdict["output"] = _output(child, output)
        else:
            passed = verdict["passed"] = [False] * len(tests)
            _test(RemoteProcess(channel), tests, passed, end)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except OutOfTime:
        verdict["late"] = True
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)  # and with it all that it started: there is a verdict when nothing of it runs
    trainer.send(json.dumps(verdict).encode())


def _sealed_file(text: str) -> int:
    """Return a file in memory, open at the begin of `text`, that nobody can change or lengthen."""
    file = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(file, "wb", closefd=False) as writing:
        writing.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(file, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def _silence() -> None:
    """Have tests print to nowhere: what a completion gets them to print is no verdict, and fills no memory."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(nowhere, file)


def _out_of_time(*_: Any) -> NoReturn:
    raise OutOfTime


# -- The child -------------------------------------------------------------------------------------------


def _run(code: dict[str, Any], is_program: bool, pipes: tuple[int, int], standard: tuple[int, int]) -> NoReturn:
    """Confine this process, run the code, and answer the tests; never returns.

    Args:
        pipes: of the tests' questions and of the answers.
        standard: a program's input and output.
    """
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        stdin, stdout = standard if is_program else (nowhere, nowhere)
        for place, file in enumerate((stdin, stdout, nowhere, *pipes)):
            os.dup2(file, place)  # `main` has opened others before each of these: none is overwritten too early
        os.closerange(5, 1024)
        channel = Channel(3, 4)
        os.environ.clear()
        os.chdir(code["folder"])
        sys.argv[:] = ["completion.py"]
        lacking = confine(code["folder"], int(code["seconds"]) + 1, code["memory"])
        channel.send(json.dumps(lacking).encode())
        site.setquit()  # exit() and quit(), which Python has not without its site-packages
        namespace = _module("__main__" if is_program else "completion")
        status = 0
        try:
            # Without this module's own `from __future__ import annotations`, here and in `_passes`.
            exec(compile(code["code"], "completion.py", "exec", dont_inherit=True), namespace)
            if not is_program:
                serve(channel, namespace)
        except SystemExit as error:
            status = 0 if error.code in (None, 0) else 1
        _leave(status, namespace)
    except BaseException:  # noqa: BLE001 - whatever the code raises: it has failed
        os._exit(1)
    finally:
        os._exit(1)


def _leave(status: int, namespace: dict[str, Any]) -> NoReturn:
    """End as Python does, but for what belongs to the judge: what has been written by then is written."""
    atexit._run_exitfuncs()
    if sys.stdout is not None and not getattr(sys.stdout, "closed", False):
        sys.stdout.flush()
    namespace.clear()  # closes its files
    os._exit(status)


def _module(name: str) -> dict[str, Any]:
    """Return the names of a new module that is imported as `name`: dataclasses and pickle look it up there."""
    module = sys.modules[name] = ModuleType(name)
    return vars(module)


# -- The judge -------------------------------------------------------------------------------------------


def _test(completion: RemoteProcess, tests: list[str], passed: list[bool], end: float) -> None:
    """Set in `passed` which tests run to their end, and in time, with a completion that answers.

    Raises:
        OutOfTime: a test has not ended by `end`.
    """
    try:
        names = completion.names()
        for place, test in enumerate(tests):
            is_passed = _passes(test, names)
            if time.monotonic() >= end:  # a bare `except` of the test's has caught it
                raise OutOfTime
            if not completion.is_open:
                return
            passed[place] = is_passed
    except Closed:
        return


def _passes(test: str, names: dict[str, Any]) -> bool:
    namespace = _module("test")
    namespace.update(names)
    try:
        exec(compile(test, "test.py", "exec", dont_inherit=True), namespace)
    except (OutOfTime, Closed):
        raise
    except BaseException:  # noqa: BLE001 - a test that raises has failed
        return False
    return True


def _output(child: int, output: int) -> str | None:
    """Return what the program wrote; None if it failed or wrote too much."""
    written = bytearray()
    while part := os.read(output, 1 << 16):
        written += part
        if len(written) > MOST_OUTPUT:
            return None
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    is_good = ended is not None and (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0)
    return written.decode("utf-8", "replace") if is_good else None


if __name__ == "__main__":
    main()
