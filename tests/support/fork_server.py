"""Forks the runs that tests start from one process that has imported the heavy libraries already.

    python fork_server.py SOCKET [MODULE ...]

Each connection asks for one process: JSON with its arguments, folder and variables, and with it three open
files, its standard streams. The answers are two lines: the process's id, then its return code as `subprocess`
gives it (minus the signal that ended it). A connection that closes before has its process killed. A connection
that asks for nothing is a user: when the last connection has closed, the server ends. It also ends if nobody
connects at all.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

ENCODING = struct.Struct("!I")
"""The length of a request, before it."""
ALONE = 60.0
"""Seconds that the server waits for its first user, which may have died meanwhile."""


class ForkServer:
    """Forks on request until its last connection has closed.

    Args:
        listener: where it is asked.
        variables: environment variables set by the imports, for each child that does not set them itself.
    """

    def __init__(self, listener: socket.socket, variables: Mapping[str, str]) -> None:
        self._listener = listener
        self._variables = variables
        self._selector = selectors.DefaultSelector()
        self._connections: dict[socket.socket, int | None] = {}
        """Each connection, and the id of the process that it asked for."""
        self._wakeup, woken = socket.socketpair()
        for end in (self._wakeup, woken):
            end.setblocking(False)
        signal.set_wakeup_fd(woken.fileno())
        self._woken = woken
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which close their connections.

    def serve(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        had_users = False
        while not had_users or self._connections:
            ready = self._selector.select(None if had_users else ALONE)
            if not ready and not had_users:
                return
            for key, _ in ready:
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._connections[connection] = None
                    self._selector.register(connection, selectors.EVENT_READ)
                    had_users = True
                elif key.fileobj is self._wakeup:
                    self._wakeup.recv(4096)
                    self._reap()
                else:
                    self._hear(key.fileobj)  # type: ignore[arg-type]

    def _hear(self, connection: socket.socket) -> None:
        """Start what is asked for, or take note that nobody waits any more."""
        try:
            head, files, _, _ = socket.recv_fds(connection, ENCODING.size, 3)
        except ConnectionError:
            head, files = b"", []
        if not head:
            self._forget(connection)
            return
        request = json.loads(_exactly(connection, ENCODING.unpack(head)[0]))
        try:
            threads = os.listdir("/proc/self/task")
            assert len(threads) == 1, f"the fork server has {len(threads)} threads, so it must not fork"
            pid = os.fork()
            if pid == 0:
                self._become(request, files)
            self._connections[connection] = pid
            connection.sendall(f"{pid}\n".encode())
        except (AssertionError, OSError) as error:
            connection.sendall(f"refused: {error}\n".encode())
        finally:
            for file in files:
                os.close(file)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for connection, child in self._connections.items():
                if child == pid:
                    self._connections[connection] = None
                    with contextlib.suppress(OSError):  # the one that asked may have gone
                        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                    break

    def _forget(self, connection: socket.socket) -> None:
        pid = self._connections.pop(connection)
        self._selector.unregister(connection)
        connection.close()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    def _become(self, request: dict[str, Any], files: Sequence[int]) -> None:
        """In the child: be a fresh interpreter with these arguments. Does not return."""
        code = 1
        try:
            for number, file in enumerate(files):
                os.dup2(file, number)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._selector.close()
            for file in files:
                os.close(file)
            for each in (self._listener, self._wakeup, self._woken, *self._connections):
                each.close()
            if request["new_session"]:
                os.setsid()
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(self._variables | request["environment"])
            # As grpox/policy/deepspeed_import.py did in this server, for the ranks of this child.
            os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
            if os.environ.get("COVERAGE_PROCESS_START"):
                importlib.import_module("coverage").process_startup(force=True)
            tempfile.tempdir = None
            random.seed()
            numpy, torch = (sys.modules.get(name) for name in ("numpy", "torch"))
            if numpy is not None:
                numpy.random.seed()
            if torch is not None:
                torch.default_generator.seed()
            gc.unfreeze()
            gc.enable()
            code = _run(request["arguments"])
        except BaseException:  # noqa: BLE001 # told like any other, since nobody else will
            traceback.print_exc()
        finally:
            os._exit(code)


def _run(arguments: Sequence[str]) -> int:
    """Run ``-m MODULE ...``, ``-c CODE ...`` or ``SCRIPT ...`` to its end and return the exit code."""
    try:
        _execute(arguments)
        code: object = 0
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt as interrupt:
        _show(interrupt)
        _finish()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:  # noqa: BLE001 # as an interpreter does at its end
        _show(error)
        code = 1
    _finish()
    return int(code or 0) & 0xFF  # type: ignore[call-overload]


def _show(error: BaseException) -> None:
    """Print the traceback without this file's frames, which a fresh interpreter has not."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    sys.excepthook(type(error), error.with_traceback(frames), frames)


def _execute(arguments: Sequence[str]) -> None:
    first, *rest = arguments
    sys.orig_argv = [sys.executable, *arguments]
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    if first == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined] # as the interpreter itself does
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[0] = ""
        exec(compile(rest[0], "<string>", "exec", dont_inherit=True), main.__dict__)
    else:
        sys.argv = list(arguments)
        sys.path[0] = os.path.dirname(os.path.realpath(first))
        main.__file__ = os.path.abspath(first)
        with open(first, "rb") as script:
            code = compile(script.read(), main.__file__, "exec", dont_inherit=True)
        exec(code, main.__dict__)


def _finish() -> None:
    """Do at the end what an interpreter does there that others can see."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException:  # noqa: BLE001 # Ctrl-C while it waits for a thread
        traceback.print_exc()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionError("a request that broke off")
        parts += part
    return bytes(parts)


def main(address: str, modules: Sequence[str]) -> None:
    before = dict(os.environ)
    sys.path[0] = os.path.dirname(sys.path[0])  # of `support`; each child has its own here
    for module in modules:
        importlib.import_module(module)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    gc.collect()
    gc.disable()
    gc.freeze()  # a collection in a child would copy every page
    os.rename(f"{address}.new", address)  # whoever sees it can connect
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    set_by_imports.pop("LOCAL_SIZE", None)
    ForkServer(listener, set_by_imports).serve()
    os.unlink(address)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
