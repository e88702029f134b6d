"""Models of many kinds in the real vLLM: it samples from the policy after every sync, or says what it lacks.

The other kinds of `support.architectures` are in docs/generation.md, measured by this file's script.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import processes
from support.architectures import perturb, tiny_model
from support.sampling_parity import MODEL, context_of, difference
from support.vllm_serving import NEEDS_VLLM, TOKEN, Served
from transformers import AutoTokenizer, PreTrainedModel

from grpox.config import LoraConfig, SamplingConfig
from grpox.contracts import Generator, Prompt
from grpox.policy.lora.add import add_adapters
from grpox.policy.lora.layers import adapter_parameters
from grpox.policy.rope import fix_rope
from grpox.policy.weight_stream import stream_weights
from grpox_generators.configs import LONGEST_WAIT, VllmServerConfig

pytestmark = NEEDS_VLLM
COLOCATED = ("gpt2", "phi3", "gemma4_text", "mixtral", "glm4_moe")
LONGROPE = {"phi3 long": 12, "phi3 short": 32}
"""Models with factors for long sequences -> tokens from which on these count; the test's sequences have 18."""
ADAPTED = {"llama merged": "merged", "llama adapter": "adapter"}
"""Models that train adapters -> generator.lora_sync."""
SERVED = "glm4_moe"  # with experts and a buffer
REFUSED = "gpt_oss"
SCRIPT = """
import json
import sys
from pathlib import Path

sys.path.insert(0, {here!r})

from support.sampling_parity import context_of
from test_vllm_architectures import ADAPTED, LONGROPE, differences_of, policy_of

from grpox.errors import RunFailed
from grpox.runtime.world import start_world
from grpox_generators.configs import VllmColocateConfig
from grpox_generators.vllm_colocate import VllmColocateGenerator

start_world()
for kind in sys.argv[1:]:
    policy, most = policy_of(kind), None if kind in LONGROPE else 64
    how = ADAPTED.get(kind, "merged")
    config = VllmColocateConfig(max_model_len=most, kv_cache_gib=0.05, lora_sync=how)
    generator = VllmColocateGenerator(config)
    generator.start(context_of(policy))
    try:
        found = differences_of(generator, policy)
    except RunFailed as error:
        found = str(error)
    print("FOUND", json.dumps([kind, found]), flush=True)
    generator.close()
"""


def policy_of(kind: str) -> PreTrainedModel:
    if kind in ADAPTED:
        model = tiny_model("llama")
        add_adapters(model, LoraConfig(r=6, alpha=12), seed=0)
        return model
    if kind not in LONGROPE:
        return tiny_model(kind)
    long = [1.0 + place for place in range(16)]
    factors = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": long,
        "attention_factor": 1.3,
    }
    model = tiny_model("phi3", original_max_position_embeddings=LONGROPE[kind], rope_scaling=factors)
    fix_rope(model, 18)
    return model


def changed(policy: PreTrainedModel, seed: int) -> None:
    """Change the weights that are trained."""
    draw, adapters = torch.Generator().manual_seed(seed), list(adapter_parameters(policy))
    if not adapters:
        perturb(policy, seed)
    for _, weight in adapters:
        weight.data += 0.1 * torch.randn(weight.shape, generator=draw)


def differences_of(generator: Generator, policy: PreTrainedModel) -> list[float]:
    """Return the largest abs(log pi - log mu) after a sync, and after each of two more of changed weights."""
    prompts, found = [Prompt(0, tuple(range(3, 13)), 4)], []
    for version in range(3):
        if version:
            changed(policy, version)
        generator.sync(stream_weights(policy), version)
        rollouts = list(generator.generate(prompts, SamplingConfig(max_completion_length=8), 5))
        found.append(difference(policy, rollouts, 1.0))
    return found


@pytest.fixture(scope="module")
def colocated(folder: Path) -> dict[str, Any]:
    """Kind -> its differences, or why it was refused; one process starts the engines one after the other."""
    (folder / "script.py").write_text(SCRIPT.format(here=str(Path(__file__).parent)))
    done = processes.run("script.py", *COLOCATED, *LONGROPE, *ADAPTED, REFUSED, cwd=folder, vllm=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(
        json.loads(line.removeprefix("FOUND ")) for line in done.stdout.splitlines() if "FOUND " in line
    )


@pytest.mark.parametrize("kind", [*COLOCATED, *LONGROPE, *ADAPTED])
def test_the_engine_in_the_process_samples_from_the_policy_after_every_sync(
    colocated: dict[str, Any], kind: str
) -> None:
    assert len(colocated[kind]) == 3
    assert max(colocated[kind]) < (1e-5 if kind in ADAPTED else 1e-4)


def test_weights_that_vllm_leaves_as_they_were_end_the_sync_by_their_names(colocated: dict[str, Any]) -> None:
    assert "vLLM accepts no new weights for model.layers.0.attn.sinks" in colocated[REFUSED]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    model = tmp_path / "model"
    tiny_model(SERVED, seed=9).save_pretrained(model)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(model)
    started = Served(str(model), "--max-model-len", "64", "--kv-cache-gib", "0.1")
    yield started
    started.stop()


def test_a_server_samples_from_the_policy_after_every_sync(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpox_generators.vllm_server import VllmServerGenerator

    monkeypatch.setenv("GRPOX_SERVER_TOKEN", TOKEN)
    server.wait_until_ready()
    policy = tiny_model(SERVED)
    generator = VllmServerGenerator(VllmServerConfig(urls=[server.url], start_timeout=LONGEST_WAIT))
    generator.preflight(policy.config)
    generator.start(context_of(policy))
    try:
        assert max(differences_of(generator, policy)) < 1e-4
    finally:
        generator.close()
