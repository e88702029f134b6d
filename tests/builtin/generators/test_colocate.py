"""Settings and calls of vLLM's engine by vllm-colocate, with a test double that follows the engine's rules."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from support.problems import problem_of
from support.small_models import model_of
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpox.config import LoraConfig, SamplingConfig
from grpox.contracts import Prompt
from grpox.errors import RunFailed
from grpox.policy.float32_head import Float32Head
from grpox.policy.lora.add import add_adapters
from grpox.policy.lora.layers import adapter_parameters
from grpox.policy.weight_stream import stream_weights
from grpox_generators import vllm_colocate
from grpox_generators.configs import ENGINE_OWNED, VllmColocateConfig
from grpox_generators.vllm_colocate import AdapterFiles, VllmColocateGenerator
from grpox_vllm_serving.launch import PRECISION


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
    """vLLM's engine as far as weights and sleep go.

    Level 2 leaves the weights without meaning; memory that is asleep cannot be written; the scheduler stays
    paused until everything is awake, so that a request before would wait for ever.
    """

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.calls: list[str] = []
        self.base: dict[str, Tensor] = {}
        self.adapter: dict[str, Tensor] = {}
        self.llm_engine = SimpleNamespace(add_lora=self.add_lora)

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        self.asleep, self.base = {"weights", "kv_cache"}, {"w": torch.tensor(math.nan)}

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")
        assert set(tags) <= self.asleep, "vLLM would warn and wake nothing"
        self.asleep -= set(tags)

    def apply_model(self, function: Callable[[nn.Module], bool]) -> list[bool]:
        return [function(Model())]

    def collective_rpc(self, method: str, kwargs: dict[str, Iterator[tuple[str, Tensor]]]) -> None:
        self.calls.append(method)
        assert "weights" not in self.asleep
        self.base = {name: weight.clone() for name, weight in kwargs["weights_iterator"]}

    def add_lora(self, request: Request) -> None:
        assert request.load_inplace, "vLLM would keep the adapter of the sync before"
        self.calls.append("adapter")
        self.adapter = load_file(Path(request.lora_path) / "adapter_model.safetensors")

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True

    def sampled_with(self) -> float:
        """The weight that a request is answered with."""
        assert not self.asleep, "the request would wait for ever"
        return float(self.base["w"])


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=Request))
    ranks = SimpleNamespace(MaxLoRARanks=Literal[1, 8, 16, 32])
    monkeypatch.setitem(sys.modules, "vllm.config.lora", ranks)
    monkeypatch.setattr(vllm_colocate, "ENVIRONMENT", {})


def started(
    policy: Any,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    begun: Callable[[], object] = lambda: None,
    **settings: Any,
) -> tuple[VllmColocateGenerator, EngineDouble]:
    engine = EngineDouble()

    def start(generator: VllmColocateGenerator, folder: str) -> EngineDouble:
        begun()
        return engine

    monkeypatch.setattr(VllmColocateGenerator, "_start_engine", start)
    generator = VllmColocateGenerator(VllmColocateConfig(**settings))
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    place: Any = SimpleNamespace(policy=policy, tokenizer=tokenizer, device=torch.device(device), world_size=1)
    generator.start(place)
    return generator, engine


class Policy(SimpleNamespace):
    """A policy of one weight, as the generator sees it."""

    dtype = torch.float32
    _weight_conversions = ()
    """Its files hold the weight under the name that it has in memory."""

    def __init__(self, weight: float, head: nn.Module | None = None) -> None:
        super().__init__(weight=weight, saved=[])
        text, saved = SimpleNamespace(tie_word_embeddings=False, vocab_size=17), self.saved

        class Config(SimpleNamespace):
            def save_pretrained(self, folder: str) -> None:
                saved.append(vars(self))

        self.config = Config(architectures=["Own"], get_text_config=lambda: text)
        self.get_output_embeddings = lambda: head


def weights_of(policy: Any) -> Iterator[tuple[str, Tensor]]:
    yield "w", torch.tensor(policy.weight)


FIRST = ["reload_weights", "reset"]
ANEW = ["wake weights", "reload_weights", "reset", "wake kv_cache", "sleep 2"]


@pytest.mark.parametrize(
    ("device", "sleep", "calls"),
    [
        ("cuda", True, [[*FIRST, "sleep 2"], ANEW, ANEW, ANEW, ANEW]),  # nothing sleeps before the first sync
        ("cpu", True, [FIRST, [], [], FIRST, []]),
        ("cuda", False, [FIRST, [], [], FIRST, []]),
    ],
)
def test_every_sample_is_of_the_current_weights_though_sleep_forgets_them(
    device: str, sleep: bool, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights come after their memory and before that of the cache; an engine that is awake takes each once."""
    policy, synced = Policy(0.0), -1.0
    monkeypatch.setattr(vllm_colocate, "stream_weights", weights_of)
    generator, engine = started(policy, device, monkeypatch, sleep=sleep)
    # An evaluation in two batches, training on the same weights, then an update, then both again.
    for weight, expected in zip((0.0, 0.0, 0.0, 1.0, 1.0), calls, strict=True):
        engine.calls.clear()
        policy.weight = weight
        if weight != synced:
            generator.sync(weights_of(policy), int(weight))
            synced = weight
        generator.wake()
        assert engine.sampled_with() == weight
        generator.sleep()
        assert engine.calls == expected
    assert generator.version == 1


def test_the_engines_head_is_float32_where_the_policys_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for head, expected in ((nn.Linear(2, 17), None), (Float32Head(2, 17), "float32")):
        policy = Policy(0.0, head)
        started(policy, "cpu", monkeypatch)
        assert [saved.get("head_dtype") for saved in policy.saved] == [expected]
        assert not hasattr(policy.config, "head_dtype")  # the saved model does not name it


@pytest.mark.parametrize(("by_user", "expected"), [(None, "high"), ("highest", "highest")])
def test_the_engine_leaves_the_trainers_precision_of_products(
    monkeypatch: pytest.MonkeyPatch, by_user: str | None, expected: str
) -> None:
    """vLLM's worker, in this process, sets the precision that its variable names."""
    monkeypatch.delenv(PRECISION, raising=False)
    if by_user is not None:
        monkeypatch.setenv(PRECISION, by_user)
    before, named = torch.get_float32_matmul_precision(), list[str]()
    torch.set_float32_matmul_precision("high")
    try:
        started(Policy(0.0), "cuda", monkeypatch, lambda: named.append(os.environ[PRECISION]))
    finally:
        torch.set_float32_matmul_precision(before)
    assert named == [expected]
    assert os.environ.get(PRECISION) == by_user


@pytest.mark.parametrize(("size", "ranks"), [(2, 1), (2, 3), (3, 4)])
def test_ranks_that_cannot_be_dealt_are_refused_before_the_model_loads(
    size: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    problem = problem_of(VllmColocateGenerator, VllmColocateConfig(tensor_parallel_size=size))
    assert (problem.key, problem.given) == ("generator.tensor_parallel_size", str(size))
    assert problem.allowed == f"a divisor of the number of ranks, {ranks}"


def test_engines_know_of_their_launcher_and_a_group_asks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else vLLM would put every rank's engine on the machine's first GPU.
    launched = {"tensor_parallel_size": 1, "distributed_executor_backend": "external_launcher"}
    assert vllm_colocate.engine_arguments(1, world_size=4) == launched
    assert vllm_colocate.engine_arguments(1, world_size=1) == {}
    dealt = [["a"], [], ["b", "c"]]

    def gather(parts: list[list[str]], items: list[str], **_: object) -> None:
        assert items == dealt[group.rank_in_group]
        parts[:] = dealt

    group = SimpleNamespace(world_size=3, cpu_group=None)
    state = SimpleNamespace(get_tp_group=lambda: group)
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    monkeypatch.setattr(vllm_colocate.dist, "all_gather_object", gather)
    for group.rank_in_group, mine in enumerate(dealt):
        asked, own = vllm_colocate.ask_together(mine)
        assert (asked, asked[own]) == (["a", "b", "c"], mine)


@pytest.mark.parametrize("name", ENGINE_OWNED)
def test_what_grpox_sets_is_no_argument_of_the_engine(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is set by grpox"):
        VllmColocateConfig(engine={name: 1})


@pytest.mark.parametrize("reason", ["stop", "length", "repetition", "abort", "error"])
def test_the_end_of_a_completion_is_vllms_own(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    generator, engine = started(Policy(0.0), "cpu", monkeypatch)
    engine.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=999))
    logprobs = [{5: SimpleNamespace(logprob=-0.5)}]
    completion = SimpleNamespace(index=0, token_ids=[5], logprobs=logprobs, finish_reason=reason)
    monkeypatch.setattr(vllm_colocate, "ask_together", lambda asked: (asked, slice(None)))
    monkeypatch.setattr(generator, "_outputs", lambda *_: [SimpleNamespace(outputs=[completion])])
    rollouts = generator.generate([Prompt(7, (1,), 1)], SamplingConfig(), 0)
    if reason in ("abort", "error"):
        with pytest.raises(RunFailed, match=f"broke off a completion of group 7: {reason}"):
            list(rollouts)
    else:
        assert [rollout.finish_reason for rollout in rollouts] == [reason]


def plain_model() -> PreTrainedModel:
    return model_of("llama", torch.float32)


def adapted_model(r: int = 3, **settings: Any) -> PreTrainedModel:
    pytest.importorskip("peft")
    model = plain_model()
    add_adapters(model, LoraConfig(r=r, **settings), seed=0)
    return model


def train(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for _, parameter in adapter_parameters(model):
            parameter += 1


def test_frozen_weights_come_once_and_then_the_adapter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a buffer has changed, which is brought with the frozen weights anew."""
    model = adapted_model()
    scale = torch.ones(1)
    model.model.layers[0].register_buffer("scale", scale)
    frozen = {name: weight.clone() for name, weight in stream_weights(model)}  # B is 0 at first
    generator, engine = started(model, "cpu", monkeypatch, lora_sync="adapter")
    for version in range(4):
        train(model)
        if version == 3:
            scale += 1
            frozen["model.layers.0.scale"] = scale
        generator.sync(stream_weights(model), version)
        for name, parameter in adapter_parameters(model):
            assert torch.equal(engine.adapter[f"base_model.model.{name}"], parameter), name
        assert engine.base.keys() == frozen.keys()
        assert all(torch.equal(engine.base[name], frozen[name]) for name in frozen)
    first, later = ["reload_weights", "adapter", "reset"], ["adapter", "reset"]
    assert engine.calls == [*first, *later, *later, *first]
    assert generator.version == 3


def test_an_engine_that_forgets_its_weights_gets_the_frozen_ones_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted_model()
    generator, engine = started(model, "cuda", monkeypatch, lora_sync="adapter")
    generator.sync(stream_weights(model), 0)
    generator.sleep()
    engine.calls.clear()
    generator.wake()
    generator.sync(stream_weights(model), 1)
    calls = [call for call in engine.calls if not call.startswith("wake")]
    assert calls == ["reload_weights", "adapter", "reset", "adapter", "reset"]


@pytest.mark.parametrize(("make", "how"), [(adapted_model, "merged"), (plain_model, "adapter")])
def test_weights_are_sent_whole_where_that_is_asked_for_or_there_is_no_adapter(
    make: Callable[[], PreTrainedModel], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    generator, engine = started(model, "cpu", monkeypatch, lora_sync=how)
    train(model)
    generator.sync(stream_weights(model), 0)
    assert engine.calls == ["reload_weights", "reset"]
    expected = dict(stream_weights(model))
    assert all(torch.equal(engine.base[name], expected[name]) for name in expected)


def test_room_is_set_apart_for_the_rank_and_the_layers_that_have_adapters() -> None:
    files = AdapterFiles(adapted_model(r=9, target_modules=["q_proj", "up_proj"]))
    assert files.arguments == {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": 16,
        "lora_target_modules": ["q_proj", "up_proj"],
    }


@pytest.mark.parametrize("settings", [{"r": 33}, {"target_modules": ["lm_head"]}])
def test_what_vllm_has_no_room_for_is_refused(settings: dict[str, Any]) -> None:
    problem = problem_of(AdapterFiles, adapted_model(**settings))
    assert (problem.key, problem.allowed) == ("generator.lora_sync", "merged")


def test_the_files_are_gone_when_the_engine_is() -> None:
    files = AdapterFiles(adapted_model())
    files.send(EngineDouble())
    folder = Path(files.request().lora_path)
    assert (folder / "adapter_config.json").is_file()
    assert folder.stat().st_mode & 0o077 == 0  # nobody else's
    files.close()
    assert not folder.exists()
