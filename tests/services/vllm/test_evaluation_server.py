"""A vLLM server for `grpox eval`: it is sent the model's weights, decodes as transformers does, and ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from support import services
from support.fixtures import GrpoxCommand
from support.vllm_serving import MODEL, NEEDS_VLLM, TOKEN, Served
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpox_generators.configs import LONGEST_WAIT

pytestmark = NEEDS_VLLM
OF_BASE = 0.332
"""Its accuracy: what a server would find that kept its own weights."""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """One that starts with the base, and is not waited for."""
    started = Served(MODEL, "--max-model-len", "64", "--kv-cache-gib", "0.1")
    yield started
    started.stop()


@pytest.fixture
def other(folder: Path) -> str:
    """A model of the base's shape with other weights."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.04 * torch.randn(parameter.shape, generator=draw)
    model.save_pretrained(folder / "other")
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder / "other")
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
    grpox: GrpoxCommand, folder: Path, server: Served, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPOX_SERVER_TOKEN", TOKEN)
    by_hf, texts_of_hf = evaluated(grpox, folder, other, "quickstart")
    assert abs(by_hf["accuracy"] - OF_BASE) > 0.05
    asked = f"generator={{name: vllm-server, urls: ['{server.url}'], start_timeout: {LONGEST_WAIT}}}"
    by_server, texts = evaluated(grpox, folder, other, "quickstart", asked)
    # Greedy: only a tie may be decided in another way.
    assert sum(ours != theirs for ours, theirs in zip(texts, texts_of_hf, strict=True)) <= 2
    assert by_server == pytest.approx(by_hf, abs=0.01)


def test_ctrl_c_ends_all_of_a_server(server: Served) -> None:
    children = server.wait_until_ready().processes()[1:]
    assert len(children) >= 2
    server.interrupt()
    services.wait_until(lambda: server.poll() is not None, "grpox serve ends", 60)
    assert server.poll() == 130
    services.wait_until(lambda: not any(services.is_running(child.pid) for child in children), "all end", 5)
