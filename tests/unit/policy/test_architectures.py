"""Models of many kinds: what of them is streamed, sampled from and saved is all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import OWN, WITH_BUFFERS, perturb, tiny_model
from support.sampling_parity import MODEL, context_of, difference
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpox.checkpoint.save_model import save_model
from grpox.config import SamplingConfig
from grpox.contracts import Prompt
from grpox.errors import RunFailed
from grpox.policy import weight_stream
from grpox.policy.model_folder import lost_parts
from grpox.policy.weight_stream import _buckets, _lasting, persistent_buffers, stream_weights
from grpox.rollout.sampler import FixedPolicy
from grpox.runtime.world import World
from grpox_generators import packed_linear
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator
from grpox_generators.packed_linear import PackedLinear
from grpox_generators.server_weights import NcclSender
from grpox_generators.vllm_weights import as_stored

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]])


@pytest.fixture(scope="module", params=list(OWN))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def started(model: PreTrainedModel) -> HfGenerator:
    generator = HfGenerator(HfConfig())
    generator.start(context_of(model))
    return generator


def save(model: PreTrainedModel, folder: Path, weights: Any = stream_weights) -> Path:
    engine: Any = SimpleNamespace(weights=lambda: weights(model), module=model)
    save_model(engine, AutoTokenizer.from_pretrained(MODEL), None, folder, World(0, 1, CPU))
    return folder


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    made: torch.Tensor = model(IDS).logits
    return made


def test_what_is_streamed_is_the_state_dict_with_tied_weights_once(kind: str) -> None:
    model = tiny_model(kind)
    state = model.state_dict()
    for weights in (stream_weights(model), FixedPolicy(model).weights()):
        streamed = dict(weights)
        places = {tensor.data_ptr() for tensor in streamed.values()}
        assert len(places) == len(streamed)
        assert places == {tensor.data_ptr() for tensor in state.values()}
        assert all(torch.equal(tensor, state[name]) for name, tensor in streamed.items())


@pytest.mark.parametrize("packs", [True, False])
def test_the_hf_generator_samples_from_the_policy_after_every_sync(
    kind: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 8, 3 and 1 tokens, and completions of up to 16, where windows are of 8."""
    if packs:
        monkeypatch.setattr(packed_linear, "LEAST_WEIGHTS", 1)
        monkeypatch.setattr(packed_linear, "LARGEST_FROM", 1)
    model = tiny_model(kind)
    generator = started(model)
    assert any(isinstance(module, PackedLinear) for module in generator.model.modules()) == packs
    prompts = [Prompt(group, tuple(IDS[0, :length].tolist()), 4) for group, length in enumerate((8, 3, 1))]
    rollouts: list[Any] = []
    for version in range(2):
        if version:
            perturb(model, version)
            assert difference(model, rollouts, 1.0) > 0.01  # the sync to come has something to bring
        generator.sync(stream_weights(model), version)
        rollouts = list(generator.generate(prompts, SamplingConfig(max_completion_length=16), 7))
        assert version or len({len(rollout.completion_ids) for rollout in rollouts}) > 1  # some rows have left
        assert difference(model, rollouts, 1.0) < 2e-5


def test_what_is_saved_is_loaded_again_as_it_was(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    loaded = AutoModelForCausalLM.from_pretrained(save(model, tmp_path / "model"))
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-6, rtol=0)
    state = loaded.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in stream_weights(model))


def test_vllm_gets_the_content_of_the_files_and_a_server_is_told_to_expect_it(
    kind: str, tmp_path: Path
) -> None:
    model = tiny_model(kind)
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    for each in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):  # one knows how it was loaded
        sent = dict(as_stored(each, stream_weights(each)))
        assert sent.keys() == files.keys()
        assert all(torch.equal(weight, files[name]) for name, weight in sent.items())
        expected = NcclSender(None, each, 0).shapes()  # type: ignore[arg-type]
        assert [(name, of.shape) for name, of in expected] == [(name, of.shape) for name, of in sent.items()]


@pytest.mark.parametrize("kind", WITH_BUFFERS)
def test_a_buffer_that_is_changed_alone_is_sampled_from_and_saved(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    generator = started(model)
    generator.sync(stream_weights(model), 0)
    before = logits(model)
    with torch.no_grad():
        for _, buffer in persistent_buffers(model):
            buffer += torch.linspace(1, -3, buffer.numel())
    assert not torch.allclose(logits(model), before)
    generator.sync(stream_weights(model), 1)
    assert torch.equal(logits(generator.model), logits(model))
    loaded = AutoModelForCausalLM.from_pretrained(save(model, tmp_path / "model"))
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-6, rtol=0)


def test_a_buffer_that_loading_keeps_in_float32_is_sampled_from_in_float32(tmp_path: Path) -> None:
    save(tiny_model("glm4_moe"), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    generator = started(model)
    generator.sync(stream_weights(model), 0)
    copied = dict(persistent_buffers(generator.model))
    for name, buffer in persistent_buffers(model):
        assert buffer.dtype == torch.float32
        assert torch.equal(copied[name], buffer)
    assert generator.model.dtype == torch.bfloat16


def test_a_buffer_is_told_once_and_not_where_the_state_dict_lacks_it() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.ones(2))
    module.register_buffer("own", torch.ones(2), persistent=False)
    module.register_buffer("again", module.kept)
    module.inner = nn.BatchNorm1d(2, affine=False)
    wanted = ["kept", "inner.running_mean", "inner.running_var", "inner.num_batches_tracked"]
    assert [name for name, _ in persistent_buffers(module)] == wanted


def lost_after(kind: str, folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> list[str]:
    """The parts that are lost where a model is loaded whose weights were edited."""
    model = tiny_model(kind)
    file = save(model, folder) / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file, metadata={"format": "pt"})
    return list(lost_parts(model, folder))


@pytest.mark.parametrize(
    ("kind", "lost", "told"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("gemma4_text", "model.layers.0.layer_scalar", "model.layers.0.layer_scalar"),
        ("mixtral", "model.layers.1.block_sparse_moe.gate.weight", "model.layers.1.mlp.gate.weight"),
    ],
)
def test_a_part_that_a_reload_would_miss_is_named(kind: str, lost: str, told: str, tmp_path: Path) -> None:
    [line] = lost_after(kind, tmp_path / "model", lambda weights: weights.pop(lost))
    assert line.startswith("weights not in its files, 1 in all: ")
    assert told in line


def test_weights_of_another_shape_and_of_no_use_are_named(tmp_path: Path) -> None:
    more = {"model.norm.weight": torch.ones(3), "model.more": torch.ones(1)}
    of_no_use, misshapen = lost_after("llama", tmp_path / "model", lambda weights: weights.update(more))
    assert "unknown to a model" in of_no_use
    assert of_no_use.endswith("1 in all: model.more")
    assert misshapen.endswith("1 in all: model.norm.weight is [3], not [64]")


def test_a_save_that_loses_a_part_fails_and_leaves_what_was_written(tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as failed:
        save(tiny_model("glm4_moe"), tmp_path / "model", lambda model: iter(model.named_parameters()))
    told = str(failed.value)
    assert "1 in all: model.layers.1.mlp.gate.e_score_correction_bias" in told
    assert str(tmp_path / "model.unfinished") in told
    assert [path.name for path in tmp_path.iterdir()] == ["model.unfinished"]


def parameters(*sizes: int) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{place}", nn.Parameter(torch.zeros(size))) for place, size in enumerate(sizes)]


def names(weights: list[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[list[str]]:
    return [[name for name, _ in bucket] for bucket in _buckets(weights, bucket_bytes)]


def test_a_bucket_is_filled_and_never_overfilled() -> None:
    """Four bytes a weight: 8 + 8 fill 16 bytes, 12 do not fit to 8, and 20 are a bucket of their own."""
    assert names(parameters(2, 2, 2, 3, 5, 1), 16) == [["p0", "p1"], ["p2"], ["p3"], ["p4"], ["p5"]]
    weights = parameters(1, 1)
    weights[0][1].ds_numel = 4  # type: ignore[attr-defined] # its shard has the size of the whole
    assert names(weights, 16) == [["p0"], ["p1"]]
    weights = parameters(1, 1, 1)
    for _, weight in weights:
        weight.nvme_swapper = object()  # type: ignore[attr-defined]
    assert names(weights, 1000) == [["p0"], ["p1"], ["p2"]]


def test_nothing_of_a_bucket_is_left_when_the_next_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(4)])
    given: list[weakref.ref[torch.Tensor]] = []
    left: list[int] = []

    def gathered(parameter: nn.Parameter) -> torch.Tensor:
        left.append(sum(tensor() is not None for tensor in given))
        return _lasting(parameter)

    monkeypatch.setattr(weight_stream, "_lasting", gathered)
    for _, tensor in stream_weights(module, bucket_bytes=16):
        given.append(weakref.ref(tensor))
        del tensor
    assert left == [0, 0, 0, 0]
    assert len(given) == 4


def test_what_is_gathered_is_not_copied_but_out_of_a_buffer_that_is_used_again() -> None:
    whole = nn.Parameter(torch.ones(4))
    assert _lasting(whole).data_ptr() == whole.data_ptr()
    whole.nvme_swapper = object()  # type: ignore[attr-defined]
    assert _lasting(whole).data_ptr() != whole.data_ptr()
