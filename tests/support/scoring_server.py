"""A small HTTP server on 127.0.0.1 that scores completions, or fails as a test asks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

from support.ports import free_port

Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]
"""Status, content (bytes as they are, else as JSON), further headers."""


@dataclass
class ScoringServer:
    """A running server, and the requests that it has received."""

    url: str
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


@contextmanager
def scoring_server(answer: Callable[[Any, int], Answer]) -> Iterator[ScoringServer]:
    """Serve until the block ends.

    Args:
        answer: of the JSON of a request and the number of requests before it.
    """
    lock = Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                place = len(server.bodies)
                server.bodies.append(body)
                server.headers.append(dict(self.headers))
                server.paths.append(self.path)
            status, content, *more = answer(body, place)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in (more[0] if more else {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with serving(Handler) as url:
        server = ScoringServer(url)
        yield server


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Have a handler answer requests within the block; yields the server's address."""
    port = free_port()
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as running:
        thread = Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            running.shutdown()
            thread.join()


def chat(reply: str | None, tokens_in: int = 100, tokens_out: int = 20) -> dict[str, Any]:
    """An answer of /v1/chat/completions."""
    usage = {"prompt_tokens": tokens_in, "completion_tokens": tokens_out}
    return {"choices": [{"message": {"role": "assistant", "content": reply}}], "usage": usage}
