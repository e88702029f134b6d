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

WAITING: tuple[Callable[[Tensor, Tensor], object], ...] = (
    lambda gpu, host: gpu[0].item(),
    lambda gpu, host: gpu.tolist(),
    lambda gpu, host: gpu[gpu > 0],
    lambda gpu, host: host.to((gpu * 2).device),
    lambda gpu, host: torch.tensor([1.0], device=gpu.device),
    lambda gpu, host: gpu[torch.tensor([0])],
    lambda gpu, host: ReadsInBackward.apply(gpu.requires_grad_()).sum().backward(),
)
FREE: tuple[Callable[[Tensor, Tensor], object], ...] = (
    lambda gpu, host: (host.tolist(), float(host[0]), host.nonzero(), host[host > 0]),
    lambda gpu, host: (torch.zeros(2, device=HOST) + 1).tolist(),
    lambda gpu, host: (gpu * 2 + gpu.new_zeros(len(gpu)), gpu.to(GPU), gpu.double()),
)


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        gradients[0].tolist()
        return gradients[0] * 2


def test_the_counter_sees_waits_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_counter, "OURS", (__file__,))

    def counted(function: Callable[[Tensor, Tensor], object]) -> tuple[int, int]:
        counts = Waits()
        with counting(counts, Marks()):
            function(torch.ones(3, device=GPU), torch.ones(3))
        return counts.own.total(), counts.mixed.total()

    assert [counted(function)[0] for function in WAITING] == [1] * len(WAITING)
    assert [counted(function) for function in FREE] == [(0, 0)] * len(FREE)
    assert counted(lambda gpu, host: gpu + host)[1] == 1
    with counting(Waits(), Marks()):
        assert torch.arange(3.0, device=GPU).tolist() == [0, 1, 2]


WINDOWS = {"sliding_window": 8, "head_dim": 8}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
POLICIES: dict[str, Callable[[], Any]] = {
    "copy": lambda: quickstart(),
    "policy itself, with lengths": lambda: quickstart(attn_implementation=VARLEN),
    "windows": lambda: model_of("mistral", torch.float32, **WINDOWS),
    "windows and whole layers": lambda: model_of("gemma3_text", torch.float32, **WINDOWS | LAYERS),
}


def quickstart(**settings: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(os.fspath(QUICKSTART), dtype=torch.float32, **settings)


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
