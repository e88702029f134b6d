"""A run whose push is refused: it has finished, keeps its model, and says so with exit code 1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fixtures import GrpoxCommand
from support.hub import TOKEN, FakeHub, serve


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that knows the token and takes nothing."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serve(FakeHub(status=403)) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield


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
