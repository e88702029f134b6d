"""A run whose push is refused: it has finished, keeps its model, and says so with exit code 1."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.fixtures import GrpoxCommand


class Refuses(BaseHTTPRequestHandler):
    """A hub that knows the token and takes nothing."""

    def do_GET(self) -> None:
        self.answer({"name": "ada", "auth": {"accessToken": {"role": "write"}}}, 200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.answer({"error": "no space left for ada"}, 403)

    def answer(self, data: dict[str, object], status: int) -> None:
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Not to the terminal."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    serving = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    serving.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.mark.usefixtures("hub")
def test_a_refused_push_loses_nothing(grpox: GrpoxCommand, folder: Path) -> None:
    done = grpox(
        "train", "quickstart", "train.max_steps=1", "evaluation=null", "tracking={}",
        "hub.repo=ada/model", "output_dir=out",
    )  # fmt: skip
    assert done.returncode == 1
    stderr = done.stderr
    for fact in ("trained and lies in out/model", "push to ada/model failed: "):
        assert fact in stderr
    assert "hf upload ada/model out/model" in stderr
    assert "Traceback" not in stderr
    output = folder / "out"
    assert json.loads((output / "summary.json").read_text())["steps"] == 1
    assert {"model.safetensors", "tokenizer.json", "README.md"} <= {
        f.name for f in (output / "model").iterdir()
    }
