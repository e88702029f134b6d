"""The server of `grpox watch`: the page, and its answers as JSON, for this machine's user alone.

It listens on 127.0.0.1. Other users of the machine, and pages of other sites in the user's browser, reach that
address too: every request needs the token, and the name of this machine in its Host header.

    python -m grpox.observing.page.server LIFELINE

serves beside a run, for `grpox train --watch`: a process of its own, of low priority, so that no answer takes
time from a step. It ends with the run, also when that is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, ValidationError, validate_call

from grpox.errors import ConfigError, GrpoxError, describe, nearest
from grpox.errors.redaction import redact
from grpox.observing.page.data import CONFIG, METRICS, VERSIONS, compare
from grpox.observing.page.source import RunSource
from grpox.runtime.files import readable
from grpox.runtime.logs import get_logger
from grpox.runtime.workers import Child, connect_to_parent

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn import Server

logger = get_logger(__name__)
ADDRESS = "127.0.0.1"
HOSTS = (ADDRESS, "localhost", "[::1]")
"""Names of this machine in a Host header, also through a tunnel. Others are refused: a site may give its own
name this address."""
MOST_NEIGHBOURS = 200
"""Largest number of runs beside the given ones that are offered."""
THREADS = 4
"""Number of requests that are answered at a time."""
NICE = 10
"""Lower priority of the process beside a run."""
STALL = 10.0
"""Seconds that this process may take to read its message."""
_HEADERS = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


_ANSWERS = ("run", "metrics", "phases", "completions", "tokens")
"""Methods of `RunSource` that answer the page."""


class WatchedRuns:
    """The runs that the page shows, and those beside them in the same folders, which it offers.

    Args:
        folders: folders of the shown runs; they may still be empty.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.pool = ThreadPoolExecutor(THREADS, "answers")
        """Threads that answer."""
        self._given = list(dict.fromkeys(folder.absolute() for folder in folders))
        self._names: dict[str, Path] = {}
        self._sources: dict[str, RunSource] = {}
        self._lock = threading.Lock()
        for folder in self._given:
            self._name(folder)

    def runs(self) -> list[dict[str, Any]]:
        """List the runs, those shown first."""
        with self._lock:
            for parent in dict.fromkeys(folder.parent for folder in self._given):
                for folder in islice(runs_below(parent), MOST_NEIGHBOURS):
                    self._name(folder)
            there = [each for each in self._names.items() if each[1] in self._given or each[1].is_dir()]
        return [{"name": name, "shown": folder in self._given} for name, folder in there]

    def source(self, name: str = "") -> RunSource:
        """Return a run of the list; by default the first.

        Raises:
            ConfigError: there is none of this name.
        """
        with self._lock:
            name = name or next(iter(self._names))
            if name not in self._names:
                near = nearest(name, self._names)
                raise ConfigError("there is no run of this name", "run", given=name, nearest=near)
            if name not in self._sources:
                self._sources[name] = RunSource(self._names[name], name)
            return self._sources[name]

    def prepare(self) -> None:
        """Begin to read the shown runs, before the page asks for them."""
        for name, folder in list(self._names.items()):
            if folder in self._given:
                self.source(name).prepare()

    def close(self) -> None:
        """Wait for the last answers, and stop the searches."""
        self.pool.shutdown()
        for source in self._sources.values():
            source.close()

    def _name(self, folder: Path) -> None:
        """Add a folder under a name that no other one has."""
        if folder not in self._names.values():
            paths = (folder.name, f"{folder.parent.name}/{folder.name}", str(folder))
            names = map(readable, paths)
            self._names[next(name for name in names if name not in self._names)] = folder


def runs_below(root: Path, depth: int = 1) -> Iterator[Path]:
    """Yield the folders of runs below a folder, so many levels deep.

    Those in a run are not searched, nor are links, which may lead anywhere.
    """
    try:
        with os.scandir(root) as entries:
            names = sorted(each.name for each in entries if each.is_dir(follow_symlinks=False))
    except OSError:  # a folder that may not be read has no runs to show
        return
    for name in names:
        if name.startswith("."):
            continue
        if is_run(root / name):
            yield root / name
        elif depth > 1:
            yield from runs_below(root / name, depth - 1)


def is_run(folder: Path) -> bool:
    """Return True if a run has begun to write its record into the folder."""
    # os.path, because a Path raises OSError in another user's folder.
    return os.path.isfile(folder / METRICS) or all(os.path.isfile(folder / name) for name in (CONFIG, VERSIONS))


class _Guard:
    """Refuses requests without the token, from other sites, and other methods than GET."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token
        self._cookie = f"grpox_{sha256(token.encode()).hexdigest()[:16]}"
        # Not the token: a browser sends cookies to every port of this address, also to other users' servers.
        self._page = sha256(f"page {token}".encode()).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cookie = b""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), *_HEADERS]
                message["headers"] = [*headers, (b"set-cookie", cookie)] if cookie else headers
            await send(message)

        from starlette.requests import Request

        request = Request(scope)
        if re.sub(r":\d+$", "", request.headers.get("host", "")) not in HOSTS:
            response = answer({"error": "this server answers under the name of its own machine only"}, 403)
        elif request.method not in ("GET", "HEAD"):
            response = answer({"error": "this server changes nothing: GET only"}, 405)
        elif not self._is_allowed(request):
            response = answer({"error": "the token is missing: open the address that grpox watch printed"}, 401)
        else:
            if request.url.path == "/" and "token" in request.query_params:
                # For a reload, whose address no longer has the token. It opens the page alone, no answers.
                cookie = f"{self._cookie}={self._page}; Path=/; HttpOnly; SameSite=Strict".encode()
            await self._app(scope, receive, send_guarded)
            return
        await response(scope, receive, send_guarded)

    def _is_allowed(self, request: Request) -> bool:
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        sent = [(credentials, self._token)] if scheme.lower() == "bearer" else []
        if request.url.path == "/":
            sent += [(request.query_params.get("token", ""), self._token)]
            sent += [(request.cookies.get(self._cookie, ""), self._page)]
        return any(secrets.compare_digest(each.encode(), secret.encode()) for each, secret in sent)


def answer(content: Any, status: int = 200) -> Response:
    """Return a response of JSON."""
    from starlette.responses import Response

    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Response(text, status, media_type="application/json")


def _answer(runs: WatchedRuns, request: Request) -> Response:
    """Answer a question of the page."""
    name, query = request.path_params["name"], request.query_params
    try:
        if name == "runs":
            return answer(runs.runs())
        if name == "compare":
            return answer(compare({each: runs.source(each).folder for each in query.getlist("run")}))
        if name not in _ANSWERS:
            return answer({"error": f"there is no answer {name!r}"}, 404)
        source = runs.source(query.get("run", ""))
        parameters: dict[str, Any] = {key: value for key, value in query.items() if key != "run"}
        checked = validate_call(config=ConfigDict(allow_inf_nan=False))
        return answer(checked(getattr(source, name))(**parameters))
    except ValidationError as error:
        wrong = error.errors()[0]
        return answer({"error": f"{wrong['loc'][0]} = {wrong['input']}: {wrong['msg']}"}, 400)
    except GrpoxError as error:
        return answer({"error": redact(str(error))}, 400)
    except Exception as error:  # noqa: BLE001 - the page shows it
        logger.warning("%s cannot be answered: %s", name, describe(error))
        return answer({"error": redact(describe(error))}, 500)


def open_listener(port: int = 0) -> socket.socket:
    """Return a socket that listens on 127.0.0.1.

    Args:
        port: 0: a free one.

    Raises:
        OSError: the port is in use, or reserved.
    """
    return socket.create_server((ADDRESS, port))


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(24)


def address_of(listener: socket.socket, token: str) -> str:
    """Return the page's address, with the token."""
    return f"http://{ADDRESS}:{listener.getsockname()[1]}/?token={token}"


def serve(listener: socket.socket, token: str, folders: Sequence[Path]) -> None:
    """Serve the runs in these folders until SIGINT or SIGTERM, which is then raised again."""
    # Read by pyarrow when it is imported: its own allocators keep memory that they no longer need.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    runs = WatchedRuns(folders)
    runs.prepare()
    try:
        build_server(runs, token).run(sockets=[listener])
    finally:
        runs.close()


def build_server(runs: WatchedRuns, token: str) -> Server:
    """Build the server, which serves once it has a socket."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.responses import HTMLResponse
    from starlette.routing import Route

    from grpox.observing.page.document import document

    async def page(request: Request) -> Response:
        return HTMLResponse(document())

    async def api(request: Request) -> Response:
        return await asyncio.get_running_loop().run_in_executor(runs.pool, _answer, runs, request)

    async def nothing(request: Request, error: Exception) -> Response:
        return answer({"error": f"there is no page {request.url.path}"}, 404)

    app = Starlette(
        routes=[Route("/", page), Route("/api/{name}", api)],
        middleware=[Middleware(_Guard, token=token), Middleware(GZipMiddleware, compresslevel=1)],
        exception_handlers={404: nothing},
    )
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


@contextmanager
def serve_beside(folder: Path, port: int = 0) -> Iterator[str]:
    """Serve a run's page within the block, and yield its address.

    Args:
        folder: the run's folder; the run may not have begun.

    Raises:
        OSError: no process can be started, or the port is in use.
    """
    token = new_token()
    with open_listener(port) as listener:
        number = listener.fileno()
        child = Child(["-m", __spec__.name], STALL, pass_fds=(number,))
        address = address_of(listener, token)
    try:
        message = {"listener": number, "token": token, "folder": str(folder.absolute())}
        child.send(json.dumps(message).encode())
        yield address
    finally:
        child.kill()


def main() -> None:
    """Serve the run that the parent process names."""
    message = json.loads(connect_to_parent().recv_bytes())
    os.nice(NICE)
    with socket.socket(fileno=message["listener"]) as listener:
        serve(listener, message["token"], [Path(message["folder"])])


if __name__ == "__main__":
    main()
