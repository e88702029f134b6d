"""The real vLLM in the training process: weights in sync, log-probabilities, seeds, ends."""

import os
import random
from importlib import util
from pathlib import Path

import numpy as np
import pytest
import torch
from support.own_lengths import assert_cut
from support.sampling_parity import SETTINGS, difference, largest_difference
from support.vllm_serving import MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpox.config import SamplingConfig
from grpox.contracts import GeneratorContext, Prompt
from grpox.errors import ConfigError, RunFailed
from grpox.policy.models import architecture_of
from grpox.runtime.world import start_world
from grpox_generators.configs import VllmColocateConfig

pytestmark = [
    pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed (make vllm)"),
]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def environment_before():
    return dict(os.environ)


@pytest.fixture(scope="module")
def generator(policy, environment_before):
    from grpox_generators.vllm_colocate import VllmColocateGenerator

    start_world()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    made = VllmColocateGenerator(VllmColocateConfig(kv_cache_gib=0.25))
    ends = (tokenizer.eos_token_id,)
    build = architecture_of(policy)
    made.start(GeneratorContext(Path(MODEL), build, tokenizer, ends, CPU, 0, 1, 0, policy))
    synced(made, policy, 0)
    yield made
    made.close()


def synced(generator, policy, version):
    generator.sync(((name, p.detach().clone()) for name, p in policy.named_parameters()), version)


def test_the_ranks_of_the_machine_stay_those_that_the_launcher_told(generator, environment_before):
    for name in ("LOCAL_WORLD_SIZE", "LD_PRELOAD"):
        assert os.environ.get(name) == environment_before.get(name)


def prompts(generator, *texts, count=8):
    tokenizer = generator.context.tokenizer
    return [Prompt(g, tuple(tokenizer(text)["input_ids"]), count) for g, text in enumerate(texts)]


def sample(generator, seed=5, **settings):
    sampling = SamplingConfig(**{"max_completion_length": 5, "temperature": 1.3, **settings})
    return list(generator.generate(prompts(generator, "37+48=", "1+1=", "99+9="), sampling, seed))


def text(generator, rollout):
    return generator.context.tokenizer.decode(rollout.completion_ids, skip_special_tokens=True)


def test_log_probabilities_are_the_policys_after_every_sync(generator, policy):
    draw = torch.Generator().manual_seed(0)
    for version in range(1, 6):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=draw)
        synced(generator, policy, version)
        rollouts = sample(generator)
        assert {rollout.policy_version for rollout in rollouts} == {version}
        assert difference(policy, rollouts, 1.3) < 1e-5


def test_a_group_computes_the_whole_blocks_of_its_prompt_once(generator):
    prompt = Prompt(0, tuple(generator.context.tokenizer("12+34=" * 8)["input_ids"]), 4)
    [output] = generator._outputs([(prompt, 1)], SamplingConfig(max_completion_length=2))
    assert 32 <= output.num_cached_tokens < len(prompt.token_ids)


def test_a_seed_repeats_its_draws_whatever_else_is_asked_for(generator):
    assert sample(generator) == sample(generator)
    assert sample(generator, seed=6) != sample(generator)
    sampling = SamplingConfig(max_completion_length=5, temperature=1.3)
    alone = list(generator.generate(prompts(generator, "37+48="), sampling, 5))
    assert [r.completion_ids for r in alone] == [r.completion_ids for r in sample(generator)[:8]]


def test_the_trainers_random_numbers_are_left_alone(generator):
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    sample(generator)
    after = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


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


def test_a_prompt_has_its_own_longest_completion(generator):
    assert_cut(generator, prompts(generator, "37+48=", "1+1=", "99+9=", "5+50="))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_log_probabilities_are_those_of_the_distribution_that_was_asked_for(generator, policy, settings):
    rollouts = sample(generator, **settings)
    sampling = SamplingConfig(**{"max_completion_length": 5, "temperature": 1.3, **settings})
    ends = (generator.context.tokenizer.eos_token_id,)
    assert largest_difference(policy, rollouts, sampling, ends) < 1e-4


def test_structured_outputs_keep_to_their_pattern(generator):
    pattern = {"structured_outputs": {"regex": "[0-9]{2}"}}
    rollouts = sample(generator, temperature=2.0, generation_kwargs=pattern)
    assert all(text(generator, r).isdecimal() and len(text(generator, r)) == 2 for r in rollouts)


def test_a_repetition_is_neither_a_stop_nor_a_cut(generator):
    twice = {"repetition_detection": {"max_pattern_size": 1, "min_count": 2}, "allowed_token_ids": [5]}
    rollouts = sample(generator, generation_kwargs=twice)
    assert {(each.completion_ids, each.finish_reason) for each in rollouts} == {((5, 5), "repetition")}


def test_settings_that_vllm_does_not_take_are_told(generator):
    with pytest.raises(ConfigError, match="vLLM does not accept these settings"):
        sample(generator, generation_kwargs={"allowed_token_ids": []})
    (problem,) = VllmColocateConfig().check_sampling(SamplingConfig(temperature=3.0))
    assert (problem.key, problem.allowed) == ("sampling.temperature", "at most 2")


def test_a_context_that_is_too_short_is_told(generator):
    with pytest.raises(RunFailed, match="exceed the 64 positions"):
        sample(generator, max_completion_length=60)
