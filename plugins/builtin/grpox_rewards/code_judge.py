"""The program that judges one completion: it runs the code in a confined child, and the tests in itself.

Nothing that decides is where the completion could reach it: tests and verdict are in this process, which the
child may not look into, and are read after the child has been made.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

sys.path.append(sys.argv[1])

from grpox_rewards.code_confine import confine, hide, limit_memory
from grpox_rewards.code_remote import Asked, Closed, serve

sys.path.remove(sys.argv[1])

MOST_OUTPUT = 1 << 20
"""Bytes of output that are read; beyond, the test has failed."""


class OutOfTime(BaseException):
    """So that no test catches it."""


def main() -> None:
    """Two messages in, the code and then the tests, and the verdict out."""
    hide()
    verdicts = os.dup(1)
    code = _read()
    near, far = socket.socketpair()
    stdin, feed = os.pipe()
    output, stdout = os.pipe()
    child = os.fork()
    if child == 0:
        _run(code, far, stdin, stdout)
    far.close()
    os.close(stdin)
    os.close(stdout)
    limit_memory(code["memory"])
    verdict: dict[str, Any] = {"lacking": _said(near)}
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.setitimer(signal.ITIMER_REAL, code["seconds"])
    try:
        if code["program"]:
            near.close()
            verdict |= _output(child, _read()["input"], feed, output)
        else:
            verdict |= _tested(Asked(near), _read()["tests"])
    except OutOfTime:
        verdict["late"] = True
    signal.setitimer(signal.ITIMER_REAL, 0)
    _write(verdicts, verdict)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def _out_of_time(*_: Any) -> NoReturn:
    raise OutOfTime


# -- The child -------------------------------------------------------------------------------------------


def _run(code: dict[str, Any], end: socket.socket, stdin: int, stdout: int) -> NoReturn:
    """Confine this process, run the code, and answer the tests; never returns."""
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(stdin if code["program"] else nowhere, 0)
        os.dup2(stdout if code["program"] else nowhere, 1)
        os.dup2(nowhere, 2)
        os.closerange(3, end.fileno())
        os.closerange(end.fileno() + 1, 1024)
        os.environ.clear()
        os.chdir(code["folder"])
        sys.argv[:] = ["completion.py"]
        lacking = confine(code["folder"], int(code["seconds"]) + 1, code["memory"])
        end.sendall(json.dumps(lacking).ljust(64).encode())
        name = "__main__" if code["program"] else "completion"
        namespace: dict[str, Any] = {"__name__": name, "__builtins__": __builtins__}
        exec(compile(code["code"], "completion.py", "exec"), namespace)
        if not code["program"]:
            serve(end, namespace)
        sys.stdout.flush()
        os._exit(0)
    except SystemExit as error:
        sys.stdout.flush()
        os._exit(0 if error.code in (None, 0) else 1)
    except BaseException:  # noqa: BLE001 - whatever the code raises: it has failed
        os._exit(1)
    finally:
        os._exit(1)


# -- The judge -------------------------------------------------------------------------------------------


def _said(end: socket.socket) -> list[str]:
    """What could not be taken from the child, as it said before it ran the code."""
    said = b""
    while len(said) < 64:
        part = end.recv(64 - len(said))
        if not part:
            raise SystemExit("the child was not confined")
        said += part
    lacking: list[str] = json.loads(said)
    return lacking


def _tested(completion: Asked, tests: list[str]) -> dict[str, Any]:
    """Which tests pass: those that run to their end."""
    passed = [False] * len(tests)
    verdict = {"passed": passed, "late": False}
    try:
        names = completion.names()
        for place, test in enumerate(tests):
            passed[place] = _passes(test, names)
    except OutOfTime:
        verdict["late"] = True
    except Closed:
        pass
    return verdict


def _passes(test: str, names: dict[str, Any]) -> bool:
    try:
        exec(compile(test, "test.py", "exec"), {"__name__": "test", **names})
    except (OutOfTime, Closed):
        raise
    except BaseException:  # noqa: BLE001 - a test that raises has failed
        return False
    return True


def _output(child: int, text: str, feed: int, output: int) -> dict[str, Any]:
    """What the program wrote, given `text`; None if it failed or wrote too much."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.set_blocking(feed, False)
    os.set_blocking(output, False)
    waiting, written = text.encode("utf-8", "surrogatepass"), bytearray()
    while True:
        if waiting:
            try:
                waiting = waiting[os.write(feed, waiting) :]
            except BlockingIOError:
                pass
            except OSError:
                waiting = b""
        if not waiting and feed >= 0:
            os.close(feed)
            feed = -1
        try:
            part = os.read(output, 1 << 16)
        except BlockingIOError:
            time.sleep(0.001)
            continue
        written += part
        if len(written) > MOST_OUTPUT:
            return {"output": None}
        if not part:
            break
    _, status = os.waitpid(child, 0)
    return {"output": written.decode("utf-8", "replace") if status == 0 else None}


def _read() -> dict[str, Any]:
    (length,) = struct.unpack("=I", _exactly(4))
    message: dict[str, Any] = json.loads(_exactly(length))
    return message


def _exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            raise SystemExit("the trainer has gone")
        data += part
    return data


def _write(file: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    while data:
        data = data[os.write(file, data) :]


if __name__ == "__main__":
    main()
