"""The program that judges one completion: it runs the code in a confined child process, and the tests in
itself.

The completion can reach nothing that decides: tests and verdict are in this process, which the child cannot
inspect, and are read only after the child has been created.
"""

from __future__ import annotations

import atexit
import fcntl
import importlib
import json
import math
import os
import signal
import site
import sys
import time
from types import FunctionType, ModuleType
from typing import Any, NoReturn

sys.path.append(sys.argv[1])

from grpox_rewards.code_confine import confine, die_with_parent, fork_apart, hide, limit_memory
from grpox_rewards.code_remote import Channel, Closed, RemoteProcess, serve

sys.path.remove(sys.argv[1])

LONGEST = 1 << 30
"""Largest size in bytes of a message with the code or its tests."""
MOST_OUTPUT = 1 << 20
"""Largest output in bytes; with more, the test has failed."""


class OutOfTime(BaseException):
    """The time limit, as a separate exception so that no test expects it from the code."""


def main() -> None:
    """Read the code and, unless it is a program, its tests; send the verdict.

    All are messages through the socket that is the standard input.
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
    os.waitpid(child, 0)  # ends all that it started, too: at the verdict nothing of it runs
    trainer.send(json.dumps(verdict).encode())


def _sealed_file(text: str) -> int:
    """Return an open file in memory, at the beginning of `text`, that nobody can change or extend."""
    file = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(file, "wb", closefd=False) as writing:
        writing.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(file, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def _silence() -> None:
    """Discard the output of tests: a completion could print a false verdict there, or fill the memory."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(nowhere, file)


def _out_of_time(*_: Any) -> NoReturn:
    raise OutOfTime


# -- The child -------------------------------------------------------------------------------------------


def _run(code: dict[str, Any], is_program: bool, pipes: tuple[int, int], standard: tuple[int, int]) -> NoReturn:
    """Confine this process, run the code, and answer the tests; never returns.

    Args:
        pipes: file descriptors for the tests' questions and for the answers.
        standard: file descriptors of a program's input and output.
    """
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        stdin, stdout = standard if is_program else (nowhere, nowhere)
        for place, file in enumerate((stdin, stdout, nowhere, *pipes)):
            os.dup2(file, place)  # `main` opened lower numbers before: none is overwritten too early
        os.closerange(5, 1024)
        channel = Channel(3, 4)
        os.environ.clear()
        os.chdir(code["folder"])
        sys.argv[:] = ["completion.py"]
        lacking = confine(code["folder"], int(code["seconds"]) + 1, code["memory"])
        channel.send(json.dumps(lacking).encode())
        site.setquit()  # defines exit() and quit(), missing without site-packages
        namespace = _module("__main__" if is_program else "completion")
        status = 0
        try:
            # dont_inherit: without this module's own `from __future__ import annotations`, as in `_passes`.
            if code["functions"]:  # their tasks give a signature with List[int], and no imports
                exec("from typing import *", namespace)
            exec(compile(code["code"], "completion.py", "exec", dont_inherit=True), namespace)
            # Under a name that is not Python's own, which `serve` would not send.
            namespace |= {f"called {name}": namespace[name] for name in code["functions"] if name in namespace}
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
    """End as Python does, with the exit functions and written output, but without this module's own cleanup."""
    atexit._run_exitfuncs()
    if sys.stdout is not None and not getattr(sys.stdout, "closed", False):
        sys.stdout.flush()
    namespace.clear()  # closes the code's files
    os._exit(status)


def _module(name: str) -> dict[str, Any]:
    """Return the names of a new module, imported as `name`, where dataclasses and pickle look it up."""
    module = sys.modules[name] = ModuleType(name)
    return vars(module)


# -- The judge -------------------------------------------------------------------------------------------


def _test(completion: RemoteProcess, tests: list[Any], passed: list[bool], end: float) -> None:
    """Set in `passed` the tests that run to their end in time while the completion's process answers.

    Raises:
        OutOfTime: a test has not ended by `end`.
    """
    try:
        names = completion.names()
        for place, test in enumerate(tests):
            is_passed = _passes(test, names)
            if time.monotonic() >= end:  # a bare `except` of the test has caught OutOfTime
                raise OutOfTime
            if not completion.is_open:
                return
            passed[place] = is_passed
    except Closed:
        return


def _passes(test: Any, names: dict[str, Any]) -> bool:
    """Return whether statements, or the call of a function with arguments and accepted results, pass."""
    _module("solution").update(names)
    namespace = _module("test")
    namespace.update(names)
    try:
        if not isinstance(test, str):
            name, arguments, accepted = test
            own = f"called {name}"
            called = names[own] if own in names else getattr(names["Solution"](), name)
            result = json.loads(json.dumps(called(*json.loads(arguments))))
            return any(_equal(result, each) for each in json.loads(accepted))
        if "unittest" in test:
            vars(importlib.import_module("unittest"))["main"] = lambda *_, **__: None  # the cases run below
        exec(compile(test, "test.py", "exec", dont_inherit=True), namespace)
        _run_cases(namespace)
    except (OutOfTime, Closed):
        raise
    except BaseException:  # noqa: BLE001 - a test that raises has failed
        return False
    return True


def _equal(value: Any, wanted: Any) -> bool:
    """Return whether values of JSON are equal, numbers with a fraction to five decimals; NaN equals NaN."""
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_equal, value, wanted))
    return [value] == [wanted] or (isinstance(wanted, float) and math.isclose(value, wanted, abs_tol=1e-5))


def _run_cases(namespace: dict[str, Any]) -> None:
    """Call what pytest and unittest would: functions without parameters and methods named test."""
    for name, value in [*namespace.items()]:
        if getattr(value, "__module__", "") == "test" and hasattr(value, "assertEqual"):
            for method in (each for each in vars(value) if each.startswith("test")):
                value(method).debug()
        elif name.startswith("test") and isinstance(value, FunctionType) and not value.__code__.co_argcount:
            value()


def _output(child: int, output: int) -> str | None:
    """Return the output of the program; None if it failed or wrote too much."""
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
