"""A step waits for a GPU no more often than it may, and the counter of these waits sees every kind."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run
from support.small_models import model_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpox.config import SamplingConfig
from grpox.contracts import GeneratorContext, Prompt
from grpox.policy.attention import VARLEN
from grpox.policy.models import architecture_of
from grpox_generators import decoding, sampling
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import sync_counter  # noqa: E402
from host_syncs import CASES, MICRO_BATCH_LIMIT, STEP_LIMIT  # noqa: E402
from random_model import QUICKSTART  # noqa: E402
from sync_counter import GPU, HOST, Marks, Waits, counting  # noqa: E402


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Tensor, Tensor], object]], Waits]:
    """Count a function of a tensor of the GPU and one of the host, as if it were code of grpox."""
    monkeypatch.setattr(sync_counter, "OURS", (__file__,))

    def count(function: Callable[[Tensor, Tensor], object]) -> Waits:
        counts = Waits()
        with counting(counts, Marks()):
            function(torch.ones(3, device=GPU), torch.ones(3))
        return counts

    return count


WAITING: dict[str, Callable[[Tensor, Tensor], object]] = {
    "item": lambda gpu, host: gpu[0].item(),
    "float": lambda gpu, host: float(gpu.sum()),
    "condition": lambda gpu, host: 1 if (gpu > 0).all() else 2,
    "tolist": lambda gpu, host: gpu.tolist(),
    "nonzero": lambda gpu, host: gpu.nonzero(),
    "boolean index": lambda gpu, host: gpu[gpu > 0],
    "copy to the host": lambda gpu, host: gpu.cpu(),
    "copy into a tensor of the host": lambda gpu, host: host.copy_(gpu),
    "copy to the device of a result": lambda gpu, host: host.to((gpu * 2).device),
    "tensor of numbers": lambda gpu, host: torch.tensor([1.0], device=gpu.device),
    "index of the host": lambda gpu, host: gpu[torch.tensor([0])],
    "string": lambda gpu, host: f"{gpu[0]}",
}
FREE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "values of the host": lambda gpu, host: (host.tolist(), float(host[0]), host.nonzero(), host[host > 0]),
    "values that came back": lambda gpu, host: (torch.zeros(2, device=HOST) + 1).tolist(),
    "products": lambda gpu, host: gpu * 2 + gpu.new_zeros(3),
    "filled tensors": lambda gpu, host: torch.full((2,), 0.5, device=gpu.device),
    "copies on one device": lambda gpu, host: (gpu.to(GPU), host.to(HOST), gpu.double()),
    "shapes": lambda gpu, host: (len(gpu), gpu.shape, gpu.numel()),
}


@pytest.mark.parametrize("name", WAITING)
def test_the_counter_sees_a_wait(waits: Callable[..., Waits], name: str) -> None:
    assert waits(WAITING[name]).own.total() == 1


@pytest.mark.parametrize("name", FREE)
def test_what_needs_no_value_of_the_gpu_is_free(waits: Callable[..., Waits], name: str) -> None:
    counts = waits(FREE[name])
    assert not counts.own
    assert not counts.mixed


def test_an_operation_on_both_devices_is_told(waits: Callable[..., Waits]) -> None:
    assert waits(lambda gpu, host: gpu + host).mixed.total() == 1


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        gradients[0].tolist()
        return gradients[0] * 2


def test_the_counter_sees_a_wait_in_a_backward_pass(waits: Callable[..., Waits]) -> None:
    counts = waits(lambda gpu, host: ReadsInBackward.apply(gpu.requires_grad_()).sum().backward())
    assert counts.own.total() == 1


def test_what_a_read_computes_is_what_it_computes_without_the_counter() -> None:
    with counting(Waits(), Marks()):
        gpu = torch.arange(3.0, device=GPU)
        assert gpu.tolist() == [0, 1, 2]
        assert gpu.cpu().tolist() == [0, 1, 2]
        assert gpu.to(torch.float64).dtype == torch.float64


WINDOWS = {"sliding_window": 8, "head_dim": 8}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
POLICIES: dict[str, Callable[[], Any]] = {
    "copy": lambda: AutoModelForCausalLM.from_pretrained(os.fspath(QUICKSTART), dtype=torch.float32),
    "policy itself, with lengths": lambda: AutoModelForCausalLM.from_pretrained(
        os.fspath(QUICKSTART), dtype=torch.float32, attn_implementation=VARLEN
    ),
    "windows": lambda: model_of("mistral", torch.float32, **WINDOWS),
    "windows and whole layers": lambda: model_of("gemma3_text", torch.float32, **WINDOWS | LAYERS),
}


@pytest.mark.parametrize("lengths", [(3, 3), (3, 12)], ids=["one length", "padded"])
@pytest.mark.parametrize("name", POLICIES)
def test_hf_waits_once_in_16_tokens(
    monkeypatch: pytest.MonkeyPatch, name: str, lengths: tuple[int, int]
) -> None:
    """Completions of 18 and of 31 tokens have two looks, of 47 three; uniform numbers come without a wait."""
    monkeypatch.setattr(decoding, "LOOK_EVERY_ON_CPU", decoding.LOOK_EVERY)
    monkeypatch.setattr(sampling, "AT_A_TIME", 8)
    policy = POLICIES[name]()
    tokenizer = AutoTokenizer.from_pretrained(os.fspath(QUICKSTART))  # type: ignore[call-overload]
    generator = HfGenerator(HfConfig(gather_weights=not name.startswith("policy")))
    place = Path(os.fspath(QUICKSTART)), architecture_of(policy), tokenizer, ()
    generator.start(GeneratorContext(*place, GPU, 0, 1, 0, policy))
    generator.sync(((name, weight.detach()) for name, weight in policy.named_parameters()), 0)

    def count(length: int) -> tuple[int, int]:
        waits, marks = Waits(), Marks()
        for each in (*generator.model.parameters(), *generator.model.buffers()):
            marks.set(each, True)
        prompts = [
            Prompt(group, tuple(range(3, 3 + size)), 4, seed=group) for group, size in enumerate(lengths)
        ]
        whole = SamplingConfig(max_completion_length=length, min_completion_length=length)
        with counting(waits, marks):
            rollouts = list(generator.generate(prompts, whole, 7))
        assert {len(rollout.completion_ids) for rollout in rollouts} == {length}
        assert not waits.mixed
        return waits.own.total(), waits.others.total()

    (own, others), second, third = count(18), count(31), count(47)
    assert second == (own, others)
    assert third == (own + 1, others)


def test_a_step_stays_within_the_limits(tmp_path: Path) -> None:
    done = run(BENCHMARKS / "host_syncs.py", "--quick", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures["cases"]) == set(CASES)
    assert figures["per_micro_batch"] <= figures["goals"]["per_micro_batch"] < MICRO_BATCH_LIMIT
    assert figures["per_step"] <= figures["goals"]["per_step"] < STEP_LIMIT
    assert figures["mixed"] == 0
    for name, case in figures["cases"].items():
        assert case["per_micro_batch"] == 0
        # The entropies of all tokens decide which of them the loss is made of.
        assert case["per_step"] == (2 if name == "entropy" else 1)
        assert case["micro_batches"] == [2, 5]
        assert case["others"]  # DeepSpeed's own reads are seen too
