"""transformers' continuous batching on the quickstart model: log-probabilities, ends, groups, seeds, draws."""

from dataclasses import replace

import pytest
import torch
from test_hf_generator import CPU, MODEL, filtered, prompts, started
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpox.config import SamplingConfig
from grpox.contracts import Prompt
from grpox.errors import RunFailed
from grpox.policy.batch import collate, samples_of
from grpox.policy.logprobs import completion_logprobs


@pytest.fixture(scope="module")
def policy():
    return AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(MODEL))


@pytest.fixture(scope="module")
def generator(policy, tokenizer):
    """Five completions at a time, so that later ones join while others go on."""
    return started(policy, tokenizer, continuous_batching=True, batch_size=5)


def unsure(**settings):
    return SamplingConfig(**{"max_completion_length": 6, "temperature": 2.0, **settings})


def sampled(generator, tokenizer, sampling, seed=0):
    rollouts = list(generator.generate(prompts(tokenizer), sampling, seed))
    return sorted(rollouts, key=lambda rollout: (rollout.group_id, rollout.sample))


def test_logprobs_are_the_models_and_completions_end_as_they_should(generator, policy, tokenizer):
    """Also at a stop token. A seed repeats, and leaves the global random state."""
    state, sampling = torch.random.get_rng_state(), unsure(stop_token_ids=[10])
    rollouts = sampled(generator, tokenizer, sampling)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sampled(generator, tokenizer, sampling) == rollouts
    assert sampled(generator, tokenizer, sampling, seed=6) != rollouts
    assert [(r.group_id, r.sample) for r in rollouts] == [(g, s) for g in range(3) for s in range(8)]
    assert [r.prompt_ids for r in rollouts[::8]] == [p.token_ids for p in prompts(tokenizer)]
    assert {r.policy_version for r in rollouts} == {3}
    batch = collate(samples_of(rollouts, [0.0] * len(rollouts)), CPU)
    with torch.no_grad():
        expected, _ = completion_logprobs(policy, batch, 2.0)
    torch.testing.assert_close(
        batch.sampler_logprobs[batch.token_mask], expected[batch.token_mask], atol=2e-5, rtol=0
    )
    ends = {tokenizer.eos_token_id, 10}
    assert ends <= {r.completion_ids[-1] for r in rollouts}
    for rollout in rollouts:
        ended = rollout.completion_ids[-1] in ends
        assert rollout.finish_reason == ("stop" if ended else "length")
        assert not ends & set(rollout.completion_ids[:-1])
        assert ended or len(rollout.completion_ids) == 6


def test_a_prompt_has_its_own_longest_completion(generator, tokenizer):
    limits = [1, 3, None]
    asked = [replace(p, max_tokens=m) for p, m in zip(prompts(tokenizer), limits, strict=True)]
    rollouts = list(generator.generate(asked, unsure(temperature=3.0), 0))
    assert len(rollouts) == 24
    for rollout in rollouts:
        length, most = len(rollout.completion_ids), limits[rollout.group_id] or 6
        assert length == most if rollout.finish_reason == "length" else length <= most
    assert {len(r.completion_ids) for r in rollouts if r.group_id == 0} == {1}
    assert max(len(r.completion_ids) for r in rollouts if r.group_id == 2) > 3


def test_greedy_completions_are_those_of_generate(generator, policy, tokenizer):
    greedy = unsure().model_copy(update={"temperature": 0.0})
    plain = sampled(started(policy, tokenizer), tokenizer, greedy)
    assert [r.completion_ids for r in sampled(generator, tokenizer, greedy)] == [
        r.completion_ids for r in plain
    ]


@pytest.mark.parametrize("kept", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}], ids=str)
def test_filters_apply_and_their_distribution_is_reported(generator, policy, tokenizer, kept):
    for rollout in sampled(generator, tokenizer, unsure(max_completion_length=1, **kept)):
        expected = filtered(policy, rollout.prompt_ids, 2.0, **kept)[rollout.completion_ids[0]]
        assert rollout.sampler_logprobs[0] == pytest.approx(expected, abs=1e-5)


def test_samples_of_one_prompt_are_drawn_apart(policy, tokenizer):
    """1,024 draws of one token: frequencies within five standard errors of exp(log-probability)."""
    generator = started(policy, tokenizer, continuous_batching=True, batch_size=256)
    one = Prompt(0, tuple(tokenizer("37+48=")["input_ids"]), 1024)
    rollouts = list(generator.generate([one], unsure(max_completion_length=1), seed=0))
    drawn = [r.completion_ids[0] for r in rollouts]
    chances = {r.completion_ids[0]: torch.tensor(r.sampler_logprobs[0]).exp().item() for r in rollouts}
    assert len(chances) > 3
    for token, p in chances.items():
        assert abs(drawn.count(token) / 1024 - p) < 5 * (p * (1 - p) / 1024) ** 0.5


def test_groups_of_unequal_size_and_no_prompts(generator, tokenizer):
    ids = tuple(tokenizer("1+2=")["input_ids"])
    rollouts = list(generator.generate([Prompt(0, ids, 3), Prompt(1, ids, 1)], unsure(), seed=0))
    assert sorted((r.group_id, r.sample) for r in rollouts) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert list(generator.generate([], unsure(), seed=0)) == []


def test_weights_that_are_synced_are_used(policy, tokenizer):
    generator = started(policy, tokenizer, continuous_batching=True)
    generator.sync(((name, torch.zeros_like(p)) for name, p in policy.named_parameters()), version=4)
    uniform = -torch.tensor(float(policy.config.vocab_size)).log().item()
    for rollout in sampled(generator, tokenizer, unsure()):
        assert rollout.policy_version == 4
        assert rollout.sampler_logprobs == pytest.approx([uniform] * len(rollout.completion_ids))


def test_a_policy_without_finite_probabilities_ends_the_run(policy, tokenizer):
    generator = started(policy, tokenizer, continuous_batching=True)
    generator.sync(((name, torch.full_like(p, torch.nan)) for name, p in policy.named_parameters()), version=5)
    with pytest.raises(RunFailed, match="continuous batching"):
        list(generator.generate(prompts(tokenizer), unsure(), seed=0))
