"""Settings and calls of vLLM's engine by vllm-colocate, with a test double that follows the engine's rules."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpox.config import SamplingConfig
from grpox.contracts import Prompt
from grpox.errors import ConfigError, RunFailed
from grpox.policy.float32_head import Float32Head
from grpox_generators import vllm_colocate
from grpox_generators.configs import ENGINE_OWNED, VllmColocateConfig
from grpox_generators.vllm_colocate import PRECISION, VllmColocateGenerator


class Model(nn.Module):
    """vLLM's model, which loads nothing by itself here."""

    def load_weights(self, weights: Any) -> None: ...


class EngineDouble:
    """vLLM's engine as far as sleep goes.

    Level 2 leaves the weights without meaning; memory that is asleep cannot be written; the scheduler stays
    paused until everything is awake, so that a request before would wait for ever.
    """

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.weight = math.nan
        self.calls: list[str] = []

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        self.asleep, self.weight = {"weights", "kv_cache"}, math.nan

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")
        assert set(tags) <= self.asleep, "vLLM would warn and wake nothing"
        self.asleep -= set(tags)

    def apply_model(self, function: Callable[[nn.Module], bool]) -> list[bool]:
        return [function(Model())]

    def collective_rpc(self, method: str, kwargs: dict[str, Iterator[tuple[str, Tensor]]]) -> None:
        self.calls.append(method)
        assert "weights" not in self.asleep
        self.weight = float(dict(kwargs["weights_iterator"])["w"])

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True

    def sampled_with(self) -> float:
        """The weight that a request is answered with."""
        assert not self.asleep, "the request would wait for ever"
        return self.weight


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


class Sampling:
    """Does what the trainer's sampler does: sync only where the weights are new, wake, sample, sleep."""

    def __init__(
        self,
        config: VllmColocateConfig,
        device: str,
        monkeypatch: pytest.MonkeyPatch,
        head: nn.Module | None = None,
        started: Callable[[], object] = lambda: None,
    ) -> None:
        engine, self.policy = EngineDouble(), Policy(0.0, head)
        self.engine, self.synced = engine, -1.0
        monkeypatch.setattr(vllm_colocate, "ENVIRONMENT", {})
        monkeypatch.setattr(vllm_colocate, "stream_weights", weights_of)

        def start(generator: VllmColocateGenerator, folder: str) -> EngineDouble:
            started()
            return engine

        monkeypatch.setattr(VllmColocateGenerator, "_start_engine", start)
        self.generator = VllmColocateGenerator(config)
        tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
        context: Any = SimpleNamespace(
            policy=self.policy, tokenizer=tokenizer, device=torch.device(device), world_size=1
        )
        self.generator.start(context)

    def sample(self, weight: float) -> float:
        self.policy.weight = weight
        if weight != self.synced:
            self.generator.sync(weights_of(self.policy), int(weight))
            self.synced = weight
        self.generator.wake()
        sampled = self.engine.sampled_with()
        self.generator.sleep()
        return sampled


def weights_of(policy: Any) -> Iterator[tuple[str, Tensor]]:
    yield "w", torch.tensor(policy.weight)


def test_every_sample_is_of_the_current_weights_though_sleep_forgets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Sampling(VllmColocateConfig(), "cuda", monkeypatch)
    # An evaluation in two batches, training on the same weights, then an update, then both again.
    assert [run.sample(weight) for weight in (0.0, 0.0, 0.0, 1.0, 1.0, 2.0)] == [0.0, 0.0, 0.0, 1.0, 1.0, 2.0]
    assert run.generator.version == 2


def test_the_engines_head_is_float32_where_the_policys_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for head, expected in ((nn.Linear(2, 17), None), (Float32Head(2, 17), "float32")):
        run = Sampling(VllmColocateConfig(), "cpu", monkeypatch, head)
        assert [saved.get("head_dtype") for saved in run.policy.saved] == [expected]
        assert not hasattr(run.policy.config, "head_dtype")  # the saved model does not name it


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
        Sampling(VllmColocateConfig(), "cuda", monkeypatch, started=lambda: named.append(os.environ[PRECISION]))
    finally:
        torch.set_float32_matmul_precision(before)
    assert named == [expected]
    assert os.environ.get(PRECISION) == by_user


def test_weights_come_after_their_memory_and_before_that_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Sampling(VllmColocateConfig(), "cuda", monkeypatch)
    run.sample(0.0)
    # Nothing sleeps before the first sync.
    assert run.engine.calls == ["reload_weights", "reset", "sleep 2"]
    for weight in (0.0, 1.0):  # brought by wake, then by sync
        run.engine.calls.clear()
        run.sample(weight)
        assert run.engine.calls == ["wake weights", "reload_weights", "reset", "wake kv_cache", "sleep 2"]


@pytest.mark.parametrize(("device", "sleep"), [("cpu", True), ("cuda", False)])
def test_an_engine_that_stays_awake_takes_each_weight_once(
    device: str, sleep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Sampling(VllmColocateConfig(sleep=sleep), device, monkeypatch)
    assert [run.sample(weight) for weight in (0.0, 0.0, 1.0)] == [0.0, 0.0, 1.0]
    assert run.engine.calls == ["reload_weights", "reset"] * 2


@pytest.mark.parametrize(("size", "ranks"), [(2, 1), (2, 3), (3, 4)])
def test_ranks_that_cannot_be_dealt_are_told_before_the_model_loads(
    size: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(ConfigError) as refused:
        VllmColocateGenerator(VllmColocateConfig(tensor_parallel_size=size))
    (problem,) = refused.value.problems
    assert (problem.key, problem.given) == ("generator.tensor_parallel_size", str(size))
    assert problem.allowed == f"a divisor of the number of ranks, {ranks}"


def test_several_ranks_start_engines_that_know_of_their_launcher() -> None:
    # Else vLLM would put every rank's engine on the machine's first GPU.
    launched = {"tensor_parallel_size": 1, "distributed_executor_backend": "external_launcher"}
    assert vllm_colocate.engine_arguments(1, world_size=4) == launched
    assert vllm_colocate.engine_arguments(1, world_size=1) == {}


@pytest.mark.parametrize(
    ("rank", "mine", "kept"), [(0, ["a"], ["a"]), (1, [], []), (2, ["b", "c"], ["b", "c"])]
)
def test_a_group_asks_together_and_each_rank_keeps_its_own(
    rank: int, mine: Sequence[str], kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(parts: list[list[str]], items: list[str], group: object) -> None:
        parts[:] = [["a"], [], ["b", "c"]]
        assert parts[rank] == items

    group = SimpleNamespace(world_size=3, rank_in_group=rank, cpu_group=None)
    state = SimpleNamespace(get_tp_group=lambda: group)
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    monkeypatch.setattr(vllm_colocate.dist, "all_gather_object", gather)
    asked, own = vllm_colocate.ask_together(mine)
    assert asked == ["a", "b", "c"]
    assert asked[own] == kept


@pytest.mark.parametrize("name", ENGINE_OWNED)
def test_what_grpox_sets_is_no_argument_of_the_engine(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is set by grpox"):
        VllmColocateConfig(engine={name: 1})


@pytest.mark.parametrize("reason", ["stop", "length", "repetition", "abort", "error"])
def test_the_end_of_a_completion_is_vllms_own(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    generator = Sampling(VllmColocateConfig(), "cpu", monkeypatch).generator
    generator._engine.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=999))
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
