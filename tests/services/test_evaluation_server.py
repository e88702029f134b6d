"""`grpox eval` with a vLLM server: it is sent the model's weights, and decodes as transformers does."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from importlib import resources, util
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoTokenizer
from support.vllm_serving import TOKEN, Served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed (make vllm)"),
]
GrpoxCommand = Callable[..., "subprocess.CompletedProcess[str]"]
BASE = str(resources.files("grpox.recipes") / "quickstart" / "model")
OF_BASE = 0.332
"""Its accuracy: what a server would find that kept its own weights."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """One that starts with the base, and is not waited for."""
    monkeypatch.setenv("GRPOX_SERVER_TOKEN", TOKEN)
    started = Served(BASE, "--max-model-len", "64", "--kv-cache-gib", "0.1")
    yield started
    assert started.stop() == 130


@pytest.fixture
def other(folder: Path) -> str:
    """A model of the base's shape with other weights."""
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.04 * torch.randn(parameter.shape, generator=draw)
    model.save_pretrained(folder / "other")
    AutoTokenizer.from_pretrained(BASE).save_pretrained(folder / "other")
    return "other"


def evaluated(grpox: GrpoxCommand, folder: Path, *arguments: str) -> tuple[dict[str, float], list[str]]:
    """The figures, and the completions in the order of their prompts."""
    out = ("--out", "figures.json", "--completions", "completions.parquet")
    done = grpox("eval", *arguments, *out)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    table = parquet.read_table(folder / "completions.parquet")
    assert table.column("group").to_pylist() == list(range(500))
    return figures["metrics"], table.column("completion").to_pylist()


def test_a_server_finds_of_any_model_what_transformers_finds(
    grpox: GrpoxCommand, folder: Path, server: Served, other: str
) -> None:
    by_hf, texts_of_hf = evaluated(grpox, folder, other, "quickstart")
    assert abs(by_hf["accuracy"] - OF_BASE) > 0.05
    asked = f"generator={{name: vllm-server, urls: ['{server.url}']}}"
    by_server, texts = evaluated(grpox, folder, other, "quickstart", asked)
    # Greedy: only a tie may be decided in another way.
    assert sum(ours != theirs for ours, theirs in zip(texts, texts_of_hf, strict=True)) <= 2
    assert by_server == pytest.approx(by_hf, abs=0.01)
