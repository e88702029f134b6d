"""A small hub on this machine, which takes a model or refuses it."""

from __future__ import annotations

import base64
import json
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.scoring_server import serving

TOKEN = "hf_secret"
"""The token that the hub knows."""


@dataclass
class FakeHub:
    """Answers of the hub about the token, and the files pushed to it."""

    user: dict[str, Any] = field(default_factory=lambda: user("ada", "write"))
    status: int = 200
    """Answer to everything that is pushed."""
    created: list[dict[str, Any]] = field(default_factory=list)
    branches: list[str] = field(default_factory=list)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Path of the request -> file -> content."""


def user(name: str, role: str, *orgs: str) -> dict[str, Any]:
    return {
        "name": name,
        "orgs": [{"name": org} for org in orgs],
        "auth": {"accessToken": {"role": role}},
    }


def handler_of(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers["authorization"] != f"Bearer {TOKEN}":
                self.answer({"error": "no"}, 401)
            elif self.path == "/api/whoami-v2":
                self.answer(hub.user)
            else:
                self.answer({"siblings": [], "sha": "0"}, hub.status)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if hub.status != 200:
                self.answer({"error": "You don't have the rights"}, hub.status)
            elif self.path == "/api/repos/create":
                hub.created.append(json.loads(body))
                self.answer({"url": f"http://{self.headers['host']}/ada/model"})
            elif "/branch/" in self.path:
                hub.branches.append(self.path.rpartition("/")[2])
                self.answer({})
            elif "/preupload/" in self.path:
                files = [file["path"] for file in json.loads(body)["files"]]
                told = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in files]
                self.answer({"files": told})
            elif self.path == "/api/validate-yaml":  # the model card's front matter
                self.answer({"errors": [], "warnings": []})
            else:
                values = [json.loads(line)["value"] for line in body.splitlines()]
                pushed = {v["path"]: base64.b64decode(v["content"]) for v in values if "path" in v}
                hub.commits[self.path] = pushed
                address = f"http://{self.headers['host']}/ada/model/commit/1"
                self.answer({"commitUrl": address, "commitOid": "1"})

        def answer(self, data: dict[str, Any], status: int = 200) -> None:
            text = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            """Not to the terminal."""

    return Handler


def serve(hub: FakeHub) -> AbstractContextManager[str]:
    """Serve the hub within the block; yields its address."""
    return serving(handler_of(hub))
