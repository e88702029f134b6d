"""Lets nobody past without the token: ASGI middleware, outermost, over every path but /health.

vLLM's own ``--api-key`` leaves open the routes that replace weights and call methods of the workers.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from grpox_vllm_serving.token import VARIABLE

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATH = "/health"
MOST_HEADERS = 17 << 10
"""Bytes of a request's headers: 16 KiB, as of a proxy's long token, and what every client adds.

The server's own limit is 4 MiB or none, by the parser that is installed.
"""


class TokenGuard:
    """Asks for ``Authorization: Bearer TOKEN``; the token is in the environment of the server's process."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[VARIABLE]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"] if scope["type"] == "http" else ()
        if sum(len(name) + len(value) for name, value in headers) > MOST_HEADERS:
            await _answer(send, 431, f"the headers are longer than {MOST_HEADERS} bytes")
        elif scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "wrong or missing token"})
        else:
            await _answer(send, 401, "wrong or missing token", (b"www-authenticate", b"Bearer"))

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] == OPEN_PATH and scope["method"] in ("GET", "HEAD"):
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


async def _answer(send: Send, status: int, error: str, *more: tuple[bytes, bytes]) -> None:
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
