"""The real vLLM as a generator, in the training process and as servers: weights, draws, ends, refusals."""

import os
import random
from contextlib import ExitStack
from importlib import import_module

import numpy as np
import pytest
import torch
from support.own_lengths import assert_cut
from support.sampling_parity import SETTINGS, context_of, difference, largest_difference
from support.vllm_serving import MODEL, NEEDS_VLLM, TOKEN, Served, borrowed
from transformers import AutoModelForCausalLM

from grpox.config import SamplingConfig
from grpox.contracts import Prompt
from grpox.errors import ConfigError, RunFailed
from grpox.runtime.world import start_world
from grpox_generators.configs import LONGEST_WAIT, VllmColocateConfig, VllmServerConfig
from grpox_generators.vllm_server import VllmServerGenerator

pytestmark = NEEDS_VLLM
TEXTS = ("37+48=", "1+1=", "99+9=")


@pytest.fixture(scope="module")
def policy():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def environment_before():
    return dict(os.environ)


def colocated(**settings):
    start_world()
    kind = import_module("grpox_generators.vllm_colocate").VllmColocateGenerator
    return kind(VllmColocateConfig(kv_cache_gib=0.25, **settings))


@pytest.fixture(scope="module", params=["colocate", "server"])
def generator(request, policy, environment_before):
    with ExitStack() as stack:
        if request.param == "colocate":
            made = colocated()
        else:
            urls = [server.url for server in stack.enter_context(borrowed(2))]
            made = VllmServerGenerator(VllmServerConfig(urls=urls, start_timeout=LONGEST_WAIT))
            made.preflight(policy.config)
        made.start(context_of(policy))
        synced(made, policy, 0)
        yield made
        made.close()


def synced(generator, policy, version):
    generator.sync(((name, p.detach().clone()) for name, p in policy.named_parameters()), version)


def prompts(generator, *texts, count=8):
    tokenizer = generator.context.tokenizer
    return [Prompt(g, tuple(tokenizer(text)["input_ids"]), count) for g, text in enumerate(texts)]


def sampling(**settings):
    return SamplingConfig(**{"max_completion_length": 5, "temperature": 1.3, **settings})


def sample(generator, *texts, seed=5, **settings):
    rollouts = generator.generate(prompts(generator, *(texts or TEXTS)), sampling(**settings), seed)
    return sorted(rollouts, key=lambda rollout: (rollout.group_id, rollout.sample))


def text(generator, rollout):
    return generator.context.tokenizer.decode(rollout.completion_ids, skip_special_tokens=True)


def check_syncs(generator, policy, most, *texts, noise, **settings):
    draw = torch.Generator().manual_seed(0)
    rollouts = []
    for version in range(1, 5):
        with torch.no_grad():
            for weight in policy.parameters():
                weight += noise * weight.std(correction=0) * torch.randn(weight.shape, generator=draw)
        if rollouts:
            assert difference(policy, rollouts, 1.0) > 0.05  # the sync to come has something to bring
        synced(generator, policy, version)
        rollouts = sample(generator, *texts, temperature=1.0, **settings)
        assert {rollout.policy_version for rollout in rollouts} == {version}
        assert difference(policy, rollouts, 1.0) < most


def test_log_probabilities_are_the_policys_after_every_sync(generator, policy):
    check_syncs(generator, policy, 1e-5, noise=0.1)


@pytest.mark.parametrize("kind", ["colocate", "server"])
def test_a_real_model_with_tied_embeddings_agrees_after_every_sync(kind, smollm2, monkeypatch):
    """In several buckets, on the server."""
    policy = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    assert policy.config.tie_word_embeddings
    with ExitStack() as stack:
        if kind == "colocate":
            made = colocated(max_model_len=256)
        else:
            monkeypatch.setenv("GRPOX_SERVER_TOKEN", TOKEN)
            server = Served(str(smollm2), "--max-model-len", "256", "--kv-cache-gib", "0.5")
            stack.callback(server.stop)
            server.wait_until_ready()
            made = VllmServerGenerator(VllmServerConfig(urls=[server.url], bucket_mib=128))
        made.start(context_of(policy, smollm2))
        stack.callback(made.close)
        texts = ("The capital of France is", "7 * 8 =", "Once upon a time")
        check_syncs(made, policy, 2e-4, *texts, noise=0.03, max_completion_length=24)


def test_the_trainer_keeps_its_variables_and_random_numbers(generator, environment_before):
    for name in ("LOCAL_WORLD_SIZE", "LD_PRELOAD"):
        assert os.environ.get(name) == environment_before.get(name)
    states = []
    for _ in range(2):
        states.append((torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())))
        sample(generator)
    assert states[0] == states[1]


def test_a_group_computes_the_whole_blocks_of_its_prompt_once(generator):
    if isinstance(generator, VllmServerGenerator):
        return
    prompt = Prompt(0, tuple(generator.context.tokenizer("12+34=" * 8)["input_ids"]), 4)
    [output] = generator._outputs([(prompt, 1)], SamplingConfig(max_completion_length=2))
    assert 32 <= output.num_cached_tokens < len(prompt.token_ids)


def test_a_seed_repeats_its_draws_whatever_else_is_asked_for(generator):
    """Also on either of two servers, between which three prompts are dealt in another way than one."""
    every, again, other = sample(generator), sample(generator), sample(generator, seed=6)
    assert isinstance(generator, VllmServerGenerator) or again == every
    drawn = [[r.completion_ids for r in each] for each in (every, again, sample(generator, TEXTS[0]), other)]
    assert drawn[0] == drawn[1]
    assert drawn[0][:8] == drawn[2]
    assert drawn[0] != drawn[3]


def test_what_ends_a_completion(generator):
    eos = generator.context.tokenizer.eos_token_id
    for rollout in sample(generator, max_completion_length=3):
        ended = rollout.completion_ids[-1] == eos
        assert rollout.finish_reason == ("stop" if ended else "length")
        assert ended or len(rollout.completion_ids) == 3
    for rollout in sample(generator, min_completion_length=4):
        assert len(rollout.completion_ids) == 5
    for rollout in sample(generator, stop=["5"]):
        assert "5" not in text(generator, rollout)[:-1]
    pattern = {"structured_outputs": {"regex": "[0-9]{2}"}}
    for rollout in sample(generator, temperature=2.0, generation_kwargs=pattern):
        assert text(generator, rollout).isdecimal()
        assert len(text(generator, rollout)) == 2
    twice = {"repetition_detection": {"max_pattern_size": 1, "min_count": 2}, "allowed_token_ids": [5]}
    rollouts = sample(generator, generation_kwargs=twice)
    assert {(each.completion_ids, each.finish_reason) for each in rollouts} == {((5, 5), "repetition")}


def test_a_prompt_has_its_own_longest_completion(generator):
    assert_cut(generator, prompts(generator, *TEXTS, "5+50="))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_log_probabilities_are_those_of_the_distribution_that_was_asked_for(generator, policy, settings):
    rollouts = sample(generator, **settings)
    assert len(rollouts) == 24
    ends = (generator.context.tokenizer.eos_token_id,)
    assert largest_difference(policy, rollouts, sampling(**settings), ends) < 1e-4


def test_settings_that_vllm_does_not_take_are_refused(generator):
    with pytest.raises(ConfigError, match="vLLM does not accept these settings"):
        sample(generator, generation_kwargs={"allowed_token_ids": []})
    with pytest.raises(RunFailed, match="exceed the 64 positions"):
        sample(generator, max_completion_length=60)
