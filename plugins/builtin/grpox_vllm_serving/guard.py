"""Lets nobody past without the token: ASGI middleware, outermost, over every path but /health.

vLLM's own ``--api-key`` leaves open the routes that replace weights and call methods of the workers.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from grpox_vllm_serving.token import VARIABLE

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATH = "/health"


class TokenGuard:
    """Asks for ``Authorization: Bearer TOKEN``; the token is in the environment of the server's process."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[VARIABLE]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "wrong or missing token"})
        else:
            await self._refuse(send)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] == OPEN_PATH and scope["method"] in ("GET", "HEAD"):
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)

    @staticmethod
    async def _refuse(send: Send) -> None:
        body = b'{"error": "wrong or missing token"}'
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"www-authenticate", b"Bearer"),
        ]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})
