"""A step and the hf generator wait for a GPU no more often than they may."""

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

from host_syncs import CASES, MICRO_BATCH_LIMIT, STEP_LIMIT  # noqa: E402
from random_model import QUICKSTART  # noqa: E402
from sync_counter import GPU, Marks, Waits, counting  # noqa: E402

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
