"""The real vLLM with a policy that trains adapters: merged, and the adapter by itself."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources, util
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sampling_parity import difference
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpox.config import LoraConfig, SamplingConfig
from grpox.contracts import GeneratorContext, Prompt
from grpox.policy.lora.add import add_adapters
from grpox.policy.lora.layers import adapter_parameters
from grpox.policy.models import architecture_of
from grpox.policy.weight_stream import stream_weights
from grpox.runtime.world import start_world
from grpox_generators.configs import VllmColocateConfig

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed (make vllm)"),
]
MODEL = str(resources.files("grpox.runfile.recipes") / "quickstart" / "model")
CPU = torch.device("cpu")
TEMPERATURE = 1.3


@pytest.fixture(scope="module", params=["merged", "adapter"])
def generator(request: pytest.FixtureRequest) -> Iterator[Any]:
    from grpox_generators.vllm_colocate import VllmColocateGenerator

    start_world()
    policy: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    build = architecture_of(policy)
    add_adapters(policy, LoraConfig(r=6, alpha=12), seed=0)
    made = VllmColocateGenerator(VllmColocateConfig(kv_cache_gib=0.25, lora_sync=request.param))
    made.start(GeneratorContext(Path(MODEL), build, tokenizer, (tokenizer.eos_token_id,), CPU, 0, 1, 0, policy))
    yield made
    made.close()


def test_log_probabilities_are_the_policys_after_every_sync(generator: Any) -> None:
    policy, tokenizer = generator.context.policy, generator.context.tokenizer
    draw = torch.Generator().manual_seed(0)
    texts = ("37+48=", "1+1=", "99+9=")
    prompts = [Prompt(g, tuple(tokenizer(text)["input_ids"]), 8) for g, text in enumerate(texts)]
    sampled = []
    for version in range(4):
        generator.sync(stream_weights(policy), version)
        sampling = SamplingConfig(max_completion_length=5, temperature=TEMPERATURE)
        rollouts = list(generator.generate(prompts, sampling, 5))
        assert {rollout.policy_version for rollout in rollouts} == {version}
        assert difference(policy, rollouts, TEMPERATURE) < 1e-5
        sampled.append([rollout.sampler_logprobs for rollout in rollouts])
        with torch.no_grad():
            for _, parameter in adapter_parameters(policy):
                parameter += 0.05 * torch.randn(parameter.shape, generator=draw)
    assert all(one != other for one, other in pairwise(sampled))
