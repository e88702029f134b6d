"""Precision by the device, TensorFloat-32 where it rounds no positions, and DeepSpeed without probes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_models import model_of
from torch import Tensor, nn

from grpox.config import ModelConfig
from grpox.observing.record import recorded_choices
from grpox.policy.deepspeed_config import deepspeed_config
from grpox.policy.deepspeed_import import deepspeed
from grpox.policy.models import load_model
from grpox.policy.precision import CUDNN_ORDER, dtype_here, float32_precision, prepare_cuda, rotary_products
from grpox.runfile.load import load_run
from grpox.runfile.lock.differences import changes


@pytest.fixture(autouse=True)
def matmul_precision() -> Iterator[None]:
    before, takes_cudnn = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.set_float32_matmul_precision(before)
    torch.backends.cuda.enable_cudnn_sdp(takes_cudnn)


@pytest.mark.parametrize("gpu", [False, True])
def test_weights_are_bfloat16_and_their_masters_float32_on_a_gpu_alone(
    gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    config = load_run("quickstart", ["model.dtype=auto"]).config
    assert dtype_here(ModelConfig(path="x")) == dtype_here(config.model) == ("bfloat16" if gpu else "float32")
    assert load_model(config.model).dtype == (torch.bfloat16 if gpu else torch.float32)
    assert deepspeed_config(config, 1)["bf16"]["enabled"] == gpu
    for named in ("bfloat16", "float32"):
        config.model.dtype = named
        assert dtype_here(config.model) == named
    assert not deepspeed_config(config, 1)["bf16"]["enabled"]


TOKENS = "train.max_tokens_per_micro_batch"


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("model: {path: x, dtype: bfloat16}", {"model.dtype": "bfloat16"}),
        ("train: {max_tokens_per_micro_batch: null}", {TOKENS: None}),
        ("{model: {dtype: auto}, train: {max_tokens_per_micro_batch: auto}}", {}),
        ("model: {dtype: float16}", {}),
        ("model: [", {}),
        ("a text", {}),
    ],
)
def test_a_record_tells_what_auto_was_in_its_run(tmp_path: Path, text: str, chosen: dict[str, Any]) -> None:
    assert recorded_choices(tmp_path) == {}
    (tmp_path / "config.yaml").write_text(text)
    assert recorded_choices(tmp_path) == chosen


@pytest.mark.parametrize(
    ("key", "saved", "other"), [("model.dtype", "bfloat16", "float32"), (TOKENS, 64, "null")]
)
def test_auto_is_the_run_of_the_recorded_value_and_a_named_one_may_be_another(
    key: str, saved: str | int, other: str
) -> None:
    """As in a sweep that goes on, which asks this of its finished runs."""
    record = load_run("quickstart", [f"{key}={saved}"]).config.model_dump(mode="json")
    found = {
        value: [each.what for each in changes(record, load_run("quickstart", [f"{key}={value}"]).config)]
        for value in ("auto", saved, other)
    }
    assert found == {"auto": [], saved: [], other: [key]}


class Elementwise(nn.Module):
    """Angles of positions, computed elementwise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(4), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return positions[:, None].float() * self.inv_freq


class Product(Elementwise):
    """As older models of transformers compute them."""

    def forward(self, positions: Tensor) -> Tensor:
        return (self.inv_freq[:, None] @ positions[None].float()).T


def test_a_model_that_multiplies_positions_in_a_product_is_named() -> None:
    assert rotary_products(nn.Sequential(nn.Linear(2, 2), Product())) == "Product"
    assert rotary_products(nn.Sequential(nn.Linear(2, 2), Elementwise())) == ""
    assert rotary_products(model_of("llama")) == ""


@pytest.mark.parametrize(
    ("rotary", "device", "before", "precision"),
    [
        (Elementwise, "cuda", "highest", "high"),
        (Product, "cuda", "highest", "highest"),
        (Elementwise, "cpu", "highest", "highest"),
        (Elementwise, "cuda", "medium", "medium"),  # lowered by the user
    ],
)
def test_tensorfloat_is_for_cuda_and_for_models_whose_positions_it_leaves_alone(
    rotary: type[nn.Module], device: str, before: str, precision: str
) -> None:
    torch.set_float32_matmul_precision(before)
    prepare_cuda(rotary(), torch.device(device))
    assert torch.get_float32_matmul_precision() == precision


def test_a_precision_set_by_the_newer_of_torchs_settings_stays() -> None:
    """The older setting refuses to be read then."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    prepare_cuda(Elementwise(), torch.device("cuda"))
    assert float32_precision() == "high"


@pytest.mark.parametrize(
    ("device", "variable", "is_left"),
    [("cuda", None, False), ("cuda", "0", True), ("cpu", None, True)],
    ids=["cuda", "cuda, set by the user", "cpu"],
)
def test_attention_on_cuda_builds_no_graph_of_cudnn_for_each_length(
    monkeypatch: pytest.MonkeyPatch, device: str, variable: str | None, is_left: bool
) -> None:
    monkeypatch.delenv(CUDNN_ORDER, raising=False)
    if variable is not None:
        monkeypatch.setenv(CUDNN_ORDER, variable)
    torch.backends.cuda.enable_cudnn_sdp(True)
    prepare_cuda(Elementwise(), torch.device(device))
    assert torch.backends.cuda.cudnn_sdp_enabled() is is_left


def test_deepspeed_asks_no_compiler_which_of_its_ops_it_could_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> None:
        raise AssertionError("every op is probed, which starts compilers in each rank")

    monkeypatch.setattr(deepspeed.ops, "_probe_compatible_ops", probe)
    assert deepspeed.ops.__compatible_ops__ == {}
    assert import_module("deepspeed.comm.torch").build_shm_op() is None
