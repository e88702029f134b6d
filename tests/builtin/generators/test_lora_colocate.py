"""Transfers of a policy with adapters by vllm-colocate, with a test double in place of vLLM's engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from grpox.config import LoraConfig
from grpox.errors import ConfigError
from grpox.policy.lora.add import add_adapters
from grpox.policy.lora.layers import adapter_parameters
from grpox.policy.weight_stream import stream_weights
from grpox_generators import vllm_colocate
from grpox_generators.configs import VllmColocateConfig
from grpox_generators.vllm_colocate import AdapterFiles, VllmColocateGenerator

pytest.importorskip("peft")


@dataclass
class Request:
    """vLLM's LoRARequest."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False


class Model(nn.Module):
    """vLLM's model, which loads nothing by itself here."""

    def load_weights(self, weights: Any) -> None: ...


class EngineDouble:
    """vLLM's engine: keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.base: dict[str, Tensor] = {}
        self.adapter: dict[str, Tensor] = {}
        self.llm_engine = SimpleNamespace(add_lora=self.add_lora)

    def apply_model(self, function: Any) -> list[bool]:
        return [function(Model())]

    def collective_rpc(self, method: str, kwargs: dict[str, Iterator[tuple[str, Tensor]]]) -> None:
        self.calls.append("base")
        self.base = {name: weight.clone() for name, weight in kwargs["weights_iterator"]}

    def add_lora(self, request: Request) -> None:
        assert request.load_inplace, "vLLM would keep the adapter of the sync before"
        self.calls.append("adapter")
        self.adapter = load_file(Path(request.lora_path) / "adapter_model.safetensors")

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True

    def sleep(self, level: int) -> None:
        self.calls.append("sleep")

    def wake_up(self, tags: list[str]) -> None: ...


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=Request))
    ranks = SimpleNamespace(MaxLoRARanks=Literal[1, 8, 16, 32])
    monkeypatch.setitem(sys.modules, "vllm.config.lora", ranks)
    monkeypatch.setattr(vllm_colocate, "ENVIRONMENT", {})


def plain_model() -> LlamaForCausalLM:
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=17, tie_word_embeddings=False, **small))


def policy(r: int = 3, **settings: Any) -> LlamaForCausalLM:
    model = plain_model()
    add_adapters(model, LoraConfig(r=r, **settings), seed=0)
    return model


def started(
    model: Any,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    lora_sync: Literal["merged", "adapter"] = "adapter",
) -> tuple[VllmColocateGenerator, EngineDouble]:
    engine = EngineDouble()
    monkeypatch.setattr(VllmColocateGenerator, "_start_engine", lambda generator, folder: engine)
    generator = VllmColocateGenerator(VllmColocateConfig(lora_sync=lora_sync))
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    context: Any = SimpleNamespace(policy=model, tokenizer=tokenizer, device=torch.device(device), world_size=1)
    generator.start(context)
    return generator, engine


def test_frozen_weights_come_once_and_then_the_adapter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    frozen = {name: weight.clone() for name, weight in stream_weights(model)}  # B is 0 at first
    generator, engine = started(model, "cpu", monkeypatch)
    for version in range(3):
        with torch.no_grad():
            for _, parameter in adapter_parameters(model):
                parameter += 1
        generator.sync(stream_weights(model), version)
        for name, parameter in adapter_parameters(model):
            assert torch.equal(engine.adapter[f"base_model.model.{name}"], parameter), name
    assert engine.calls == ["base", *["adapter", "reset"] * 3]
    assert engine.base.keys() == frozen.keys()
    assert all(torch.equal(engine.base[name], frozen[name]) for name in frozen)
    assert generator.version == 2


def test_a_buffer_that_has_changed_is_brought_with_the_frozen_weights_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = policy()
    scale = torch.ones(1)
    model.model.layers[0].register_buffer("scale", scale)
    generator, engine = started(model, "cpu", monkeypatch)
    for version in range(3):
        if version == 2:
            scale += 1
        generator.sync(stream_weights(model), version)
        assert torch.equal(engine.base["model.layers.0.scale"], scale)
    assert engine.calls == ["base", "adapter", "reset", "adapter", "reset", "base", "adapter", "reset"]


def test_an_engine_that_forgets_its_weights_gets_the_frozen_ones_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    generator, engine = started(model, "cuda", monkeypatch)
    generator.sync(stream_weights(model), 0)
    generator.sleep()
    engine.calls.clear()
    generator.wake()
    generator.sync(stream_weights(model), 1)
    assert engine.calls == ["base", "adapter", "reset", "adapter", "reset"]


def test_without_being_told_so_it_takes_all_weights_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    generator, engine = started(model, "cpu", monkeypatch, "merged")
    with torch.no_grad():
        for _, parameter in adapter_parameters(model):
            parameter += 1
    generator.sync(stream_weights(model), 0)
    assert engine.calls == ["base", "reset"]
    expected = dict(stream_weights(model))
    assert all(torch.equal(engine.base[name], expected[name]) for name in expected)


def test_a_model_whose_adapters_were_merged_is_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain_model()
    generator, engine = started(model, "cpu", monkeypatch)
    generator.sync(stream_weights(model), 0)
    assert engine.calls == ["base", "reset"]


def test_room_is_set_apart_for_the_rank_and_the_layers_that_have_adapters() -> None:
    files = AdapterFiles(policy(r=9, target_modules=["q_proj", "up_proj"]))
    assert files.arguments == {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": 16,
        "lora_target_modules": ["q_proj", "up_proj"],
    }


@pytest.mark.parametrize(
    ("settings", "told"), [({"r": 33}, "rank 32 at most"), ({"target_modules": ["lm_head"]}, "the head")]
)
def test_what_vllm_has_no_room_for_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        AdapterFiles(policy(**settings))
    assert (refused.value.problems[0].key, refused.value.problems[0].allowed) == (
        "generator.lora_sync",
        "merged",
    )


def test_the_files_are_gone_when_the_engine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    files = AdapterFiles(policy())
    engine = EngineDouble()
    files.send(engine)
    folder = Path(files.request().lora_path)
    assert (folder / "adapter_config.json").is_file()
    assert folder.stat().st_mode & 0o077 == 0  # nobody else's
    files.close()
    assert not folder.exists()
