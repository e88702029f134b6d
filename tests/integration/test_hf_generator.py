"""The hf generator on the real quickstart model: tokens, log-probabilities, groups, seeds, versions."""

import importlib.resources
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpox.config import SamplingConfig
from grpox.contracts import GeneratorContext, Prompt
from grpox.errors import RunFailed
from grpox.logprobs import completion_logprobs
from grpox.models import architecture_of
from grpox.rollout import collate
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator

MODEL = importlib.resources.files("grpox.recipes") / "quickstart" / "model"
CPU = torch.device("cpu")
SAMPLING = SamplingConfig(max_completion_length=4)


@pytest.fixture(scope="module")
def policy():
    return AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(MODEL))


def started(policy, tokenizer, **config):
    generator = HfGenerator(HfConfig(**config))
    context = GeneratorContext(
        Path(str(MODEL)), architecture_of(policy), tokenizer, (tokenizer.eos_token_id,), CPU, 0, 1, 0
    )
    generator.start(context)
    generator.sync(((name, p.detach()) for name, p in policy.named_parameters()), version=3)
    return generator


@pytest.fixture(scope="module")
def generator(policy, tokenizer):
    return started(policy, tokenizer)


def prompts(tokenizer, texts=("37+48=", "1+2=", "12+5="), samples=8):
    return [Prompt(g, tuple(tokenizer(text)["input_ids"]), samples) for g, text in enumerate(texts)]


def test_returns_whole_groups_in_order_with_the_synced_version(generator, tokenizer):
    rollouts = list(generator.generate(prompts(tokenizer), SAMPLING, seed=0))
    assert [(r.group_id, r.sample) for r in rollouts] == [(g, s) for g in range(3) for s in range(8)]
    assert {r.policy_version for r in rollouts} == {3}
    for rollout in rollouts:
        ended = rollout.completion_ids[-1] == tokenizer.eos_token_id
        assert rollout.finish_reason == ("stop" if ended else "length")
        assert tokenizer.eos_token_id not in rollout.completion_ids[:-1]
        assert ended or len(rollout.completion_ids) == 4


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_are_those_of_the_model_at_the_sampling_temperature(generator, policy, tokenizer, temperature):
    sampling = SamplingConfig(max_completion_length=4, temperature=temperature)
    rollouts = list(generator.generate(prompts(tokenizer), sampling, seed=1))
    batch = collate(rollouts, [0.0] * len(rollouts), tokenizer.pad_token_id, CPU)
    with torch.no_grad():
        expected, _ = completion_logprobs(policy, batch, temperature)
    mask = batch.token_mask
    torch.testing.assert_close(batch.sampler_logprobs[mask], expected[mask], atol=2e-5, rtol=0)


@pytest.mark.parametrize("kept", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}], ids=str)
def test_filtered_sampling_reports_the_renormalised_distribution(generator, policy, tokenizer, kept):
    """At temperature 3 the model is unsure; what a filter drops is never sampled, what it keeps gains."""
    sampling = SamplingConfig(max_completion_length=1, temperature=3.0, **kept)
    one = Prompt(0, tuple(tokenizer("37+48=")["input_ids"]), 512)
    rollouts = list(generator.generate([one], sampling, seed=0))
    with torch.no_grad():
        logits = policy(torch.tensor([one.token_ids])).logits[0, -1].double()
    p, order = torch.softmax(logits / 3, -1).sort(descending=True)
    if "top_k" in kept:
        count = 2
    elif "top_p" in kept:
        count = int((p.cumsum(0) < 0.6).sum()) + 1
    else:
        count = int((p >= 0.5 * p[0]).sum())
    allowed = dict(zip(order[:count].tolist(), (p[:count] / p[:count].sum()).log().tolist(), strict=True))
    seen = {rollout.completion_ids[0] for rollout in rollouts}
    assert seen <= set(allowed)
    for rollout in rollouts:
        assert rollout.sampler_logprobs[0] == pytest.approx(allowed[rollout.completion_ids[0]], abs=1e-5)


def test_samples_follow_the_reported_distribution(generator, tokenizer):
    """4,096 draws of one token: frequencies within five standard errors of exp(log-probability)."""
    sampling = SamplingConfig(max_completion_length=1, temperature=3.0)
    one = Prompt(0, tuple(tokenizer("37+48=")["input_ids"]), 4096)
    rollouts = list(generator.generate([one], sampling, seed=0))
    chances = {r.completion_ids[0]: torch.tensor(r.sampler_logprobs[0]).exp().item() for r in rollouts}
    drawn = [r.completion_ids[0] for r in rollouts]
    for token, p in chances.items():
        assert abs(drawn.count(token) / 4096 - p) < 5 * (p * (1 - p) / 4096) ** 0.5


def test_prompt_is_prefilled_once_per_group(generator, tokenizer):
    """Rows that the model computes: one per prompt for all but its last token, then one per sample."""
    sizes = []
    hook = generator.model.get_decoder().register_forward_pre_hook(
        lambda _, __, inputs: sizes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    list(generator.generate(prompts(tokenizer), SAMPLING, seed=0))
    hook.remove()
    assert sizes[0] == (3, 5)
    assert sizes[1] == (24, 1)


def test_a_seed_repeats_and_leaves_the_global_random_state(generator, tokenizer):
    unsure = SamplingConfig(max_completion_length=4, temperature=3.0)

    def sample(seed):
        return list(generator.generate(prompts(tokenizer), unsure, seed))

    state = torch.random.get_rng_state()
    first = sample(5)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sample(5) == first
    assert sample(6) != first


def test_batches_cut_whole_groups(policy, tokenizer):
    generator = started(policy, tokenizer, batch_size=10)
    rollouts = list(generator.generate(prompts(tokenizer), SAMPLING, seed=0))
    assert [(r.group_id, r.sample) for r in rollouts] == [(g, s) for g in range(3) for s in range(8)]


def test_temperature_zero_is_greedy(generator, policy, tokenizer):
    greedy = SAMPLING.model_copy(update={"temperature": 0.0})
    for rollout in generator.generate(prompts(tokenizer, samples=1), greedy, seed=0):
        ids = list(rollout.prompt_ids)
        for token in rollout.completion_ids:
            with torch.no_grad():
                assert int(policy(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)


def test_no_prompts_give_no_rollouts(generator):
    assert list(generator.generate([], SAMPLING, seed=0)) == []


def test_sync_changes_what_is_sampled(policy, tokenizer):
    generator = started(policy, tokenizer)
    zeros = ((name, torch.zeros_like(p)) for name, p in policy.named_parameters())
    generator.sync(zeros, version=4)
    rollouts = list(generator.generate(prompts(tokenizer), SAMPLING, seed=0))
    uniform = -torch.tensor(float(policy.config.vocab_size)).log().item()
    assert all(x == pytest.approx(uniform) for r in rollouts for x in r.sampler_logprobs)
    assert {r.policy_version for r in rollouts} == {4}


def test_a_policy_without_finite_probabilities_is_told(policy, tokenizer):
    generator = started(policy, tokenizer)
    broken = ((name, torch.full_like(p, torch.nan)) for name, p in policy.named_parameters())
    generator.sync(broken, version=5)
    with pytest.raises(RunFailed, match="version 5 gives no finite probabilities"):
        list(generator.generate(prompts(tokenizer), SAMPLING, seed=0))
