"""The hf generator on the real quickstart model, beyond what the conformance suite checks."""

import copy
import importlib.resources
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.own_lengths import assert_cut
from support.small_models import model_of
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from grpox.config import SamplingConfig
from grpox.contracts import GeneratorContext, Prompt
from grpox.errors import ConfigError, RunFailed
from grpox.policy.batch import collate, samples_of
from grpox.policy.models import architecture_of
from grpox_generators import decoding
from grpox_generators.configs import HfConfig
from grpox_generators.hf import GROUPED, HfGenerator

MODEL = importlib.resources.files("grpox.runfile.recipes") / "quickstart" / "model"
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
        Path(str(MODEL)), architecture_of(policy), tokenizer, (tokenizer.eos_token_id,), CPU, 0, 1, 0, policy
    )
    generator.start(context)
    generator.sync(((name, p.detach()) for name, p in policy.named_parameters()), version=3)
    return generator


@pytest.fixture(scope="module")
def generator(policy, tokenizer):
    return started(policy, tokenizer)


def prompts(tokenizer, texts=("37+48=", "1+2=", "12+5="), samples=8):
    return [Prompt(g, tuple(tokenizer(text)["input_ids"]), samples) for g, text in enumerate(texts)]


WINDOWED = {
    "windows": ("mistral", {"sliding_window": 4}),
    "windows and whole layers": (
        "gemma3_text",
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8},
    ),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_rows_with_padding_see_the_windows_of_the_model(tokenizer, name):
    kind, settings = WINDOWED[name]
    model = model_of(kind, torch.float32, **settings)
    generator, masks = started(model, tokenizer), []
    generator.model.register_forward_pre_hook(
        lambda _, __, inputs: masks.append(inputs["attention_mask"]), with_kwargs=True
    )
    asked = [Prompt(0, tuple(range(3, 12)), 2), Prompt(1, (5, 6), 2)]
    sampling = SamplingConfig(max_completion_length=8, min_completion_length=8)
    rollouts = list(generator.generate(asked, sampling, seed=1))
    batch = collate(samples_of(rollouts, [0.0] * 4), CPU)
    with torch.no_grad():
        logits = model(**batch.model_inputs(), use_cache=False).logits[:, -9:-1]
    logits[..., tokenizer.eos_token_id] = -torch.inf
    expected = logits.log_softmax(dim=-1).gather(-1, batch.input_ids[:, -8:].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(batch.sampler_logprobs, expected, atol=2e-5, rtol=0)
    each = [mask for one in masks[1:] for mask in (one.values() if isinstance(one, dict) else [one])]
    assert {mask.ndim for mask in each} == {4}  # transformers looks into masks of two dimensions
    assert len(each) == 8 * len(set(settings.get("layer_types", [kind])))


def test_layers_in_chunks_are_left_to_transformers(policy):
    """Their cache looks like one of windows."""
    config = policy.config.__class__(**policy.config.to_dict() | {"attention_chunk_size": 4})
    cache = DynamicCache(config=config)
    model = SimpleNamespace(config=config)
    assert type(cache.layers[0]) is DynamicSlidingWindowLayer
    assert decoding.mask_windows(model, cache) == {}


def unsure(**settings):
    """At temperature 3 the model writes almost anything."""
    return SamplingConfig(**{"max_completion_length": 6, "temperature": 3.0, **settings})


def filtered(policy, prompt_ids, temperature, top_k=math.inf, top_p=1.0, min_p=0.0):
    """Return the log-probability of each next token that filters keep, by hand from a plain forward."""
    with torch.no_grad():
        logits = policy(torch.tensor([prompt_ids])).logits[0, -1].double()
    p, order = torch.softmax(logits / temperature, -1).sort(descending=True)
    by_top_p, by_min_p = int((p.cumsum(0) < top_p).sum()) + 1, int((p >= min_p * p[0]).sum())
    count = min(by_top_p, by_min_p, top_k, len(p))
    return dict(zip(order[:count].tolist(), (p[:count] / p[:count].sum()).log().tolist(), strict=True))


@pytest.mark.parametrize("kept", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}], ids=str)
def test_filtered_sampling_reports_the_renormalised_distribution(generator, policy, tokenizer, kept):
    """At temperature 3 the model is unsure; what a filter drops is never sampled, what it keeps gains."""
    one = Prompt(0, tuple(tokenizer("37+48=")["input_ids"]), 512)
    allowed = filtered(policy, one.token_ids, 3.0, **kept)
    for rollout in generator.generate([one], unsure(max_completion_length=1, **kept), seed=0):
        assert rollout.sampler_logprobs[0] == pytest.approx(allowed[rollout.completion_ids[0]], abs=1e-5)


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


def test_only_the_copy_that_generates_has_attention_of_its_own(generator, policy):
    assert generator.model.config._attn_implementation == GROUPED
    assert policy.config._attn_implementation == "sdpa"


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


def expected_logprobs(policy, rollout, sampling, change):
    """log softmax(change(logits, tokens so far) / temperature) of each token, from one plain forward."""
    ids = [*rollout.prompt_ids, *rollout.completion_ids]
    with torch.no_grad():
        logits = policy(torch.tensor([ids])).logits[0].double()
    told = []
    for place in range(len(rollout.prompt_ids), len(ids)):
        changed = change(logits[place - 1].clone(), ids[:place])
        told.append(torch.log_softmax(changed / sampling.temperature, -1)[ids[place]].item())
    return told


def penalised(logits, ids):
    for token in set(ids):
        logits[token] = logits[token] / 1.5 if logits[token] > 0 else logits[token] * 1.5
    return logits


def forbidden(tokens):
    def change(logits, ids):
        logits[tokens] = -torch.inf
        return logits

    return change


def biased(logits, ids):
    logits[7] += 2.0
    return logits


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"repetition_penalty": 1.5}, penalised),
        ({"generation_kwargs": {"bad_words_ids": [[5], [9]]}}, forbidden([5, 9])),
        ({"generation_kwargs": {"sequence_bias": [[[7], 2.0]]}}, biased),
        ({"temperature": 1.5, "stop": ["85"]}, lambda logits, ids: logits),
    ],
    ids=["repetition_penalty", "bad_words_ids", "sequence_bias", "stop"],
)
def test_logprobs_are_those_of_the_processed_distribution(generator, policy, tokenizer, settings, change):
    """By hand from a plain forward; the prompts are of unequal length, so that padding would show."""
    sampling, one_token = unsure(**settings), Prompt(3, (10,), 8)
    for rollout in generator.generate([*prompts(tokenizer), one_token], sampling, seed=2):
        expected = expected_logprobs(policy, rollout, sampling, change)
        assert rollout.sampler_logprobs == pytest.approx(expected, abs=2e-5)


def test_the_minimum_of_tokens_comes_before_the_ending_one(generator, tokenizer):
    free = list(generator.generate(prompts(tokenizer, samples=128), unsure(), seed=0))
    assert min(len(r.completion_ids) for r in free) < 4
    sampling = unsure(min_completion_length=4, stop_token_ids=[5])
    rollouts = list(generator.generate(prompts(tokenizer, samples=128), sampling, seed=0))
    lengths = {len(r.completion_ids) for r in rollouts}
    assert lengths == {5, 6}
    ends = {tokenizer.eos_token_id, 5}
    assert {r.completion_ids[-1] for r in rollouts if r.finish_reason == "stop"} == ends
    for rollout in rollouts:
        assert not ends & set(rollout.completion_ids[:-1])
        assert (rollout.completion_ids[-1] in ends) == (rollout.finish_reason == "stop")


def test_a_stop_text_over_two_tokens_ends_a_completion(generator, tokenizer):
    """85 is the answer to 37+48; where it is written, the completion ends with it, and nowhere else."""
    free = list(generator.generate(prompts(tokenizer, samples=128), unsure(temperature=1.5), seed=0))
    sampling = unsure(temperature=1.5, stop=["85", "never"])
    rollouts = list(generator.generate(prompts(tokenizer, samples=128), sampling, seed=0))
    texts = [tokenizer.decode(r.completion_ids) for r in rollouts]
    assert sum(text == "85" for text in texts) > 10
    for before, after, text in zip(free, rollouts, texts, strict=True):
        assert "85" not in text[:-2]
        assert len(after.sampler_logprobs) == len(after.completion_ids)
        if text.endswith("85"):
            assert after.finish_reason == "stop"
            continue
        assert after.finish_reason == (
            "stop" if after.completion_ids[-1] == tokenizer.eos_token_id else "length"
        )
        assert (
            "85" not in tokenizer.decode(before.completion_ids) or after.completion_ids != before.completion_ids
        )


@pytest.mark.parametrize("token", [17, -1])
def test_a_stop_token_outside_the_vocabulary_is_refused(generator, tokenizer, token):
    with pytest.raises(ConfigError, match=rf"sampling\.stop_token_ids.*\n.*{token}\n.*0 to 16"):
        list(generator.generate(prompts(tokenizer), unsure(stop_token_ids=[token]), seed=0))


def test_eos_as_padding_is_told_apart_by_place(policy, tokenizer):
    """Rows that end early are filled with EOS then: a completion still has one EOS, its last token."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    rollouts = list(started(policy, tokenizer).generate(prompts(tokenizer), unsure(stop=["8"]), seed=0))
    assert {r.completion_ids.count(tokenizer.eos_token_id) for r in rollouts} == {0, 1}
    for rollout in rollouts:
        text = tokenizer.decode(rollout.completion_ids)
        assert "8" not in text or text.index("8") == len(text) - 1


def computed_rows(generator, given, sampling):
    """Rollouts, and the rows of each forward but the prefill."""
    rows = []
    hook = generator.model.get_decoder().register_forward_pre_hook(
        lambda _, __, inputs: rows.append(len(inputs["input_ids"])), with_kwargs=True
    )
    rollouts = list(generator.generate(given, sampling, seed=7))
    hook.remove()
    return rollouts, rows[1:]


LEAVING = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "penalised": {"repetition_penalty": 1.3},
    "stopped": {"stop": ["8", "12"], "min_completion_length": 2},
    "without ngrams": {"generation_kwargs": {"no_repeat_ngram_size": 2}},
}


@pytest.mark.parametrize("settings", LEAVING.values(), ids=LEAVING)
def test_rows_that_have_ended_leave_and_change_nothing(generator, tokenizer, monkeypatch, settings):
    """Looked for after each token, or every 16 tokens as on CUDA."""
    sampling = unsure(max_completion_length=24).model_copy(update=settings)
    given = prompts(tokenizer, samples=16)
    rollouts, rows = computed_rows(generator, given, sampling)
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "LOOK_EVERY_ON_CPU", decoding.LOOK_EVERY)
        rarely, rare_rows = computed_rows(generator, given, sampling)
    assert 0 < len(set(rare_rows[:16])) <= 1
    assert set(rare_rows[16:]) != {48}  # rows leave at a look
    monkeypatch.setattr(decoding, "CUT_COST", math.inf)
    whole, all_rows = computed_rows(generator, given, sampling)
    assert set(all_rows) == {48}
    assert len(rows) == len(all_rows)
    assert rows == sorted(rows, reverse=True)
    lengths = [len(rollout.completion_ids) for rollout in whole]
    assert sum(rows) < 0.5 * (sum(lengths) + sum(all_rows))
    for expected, *others in zip(whole, rollouts, rarely, strict=True):
        for other in others:
            assert other.completion_ids == expected.completion_ids
            assert other.finish_reason == expected.finish_reason
            assert other.sampler_logprobs == pytest.approx(expected.sampler_logprobs, abs=1e-5)


@pytest.mark.parametrize(
    "kept", [{"encoder_repetition_penalty": 1.3}, {"encoder_no_repeat_ngram_size": 2}], ids=str
)
def test_no_row_leaves_a_processor_that_remembers_it(generator, tokenizer, kept):
    sampling = unsure(max_completion_length=24, generation_kwargs=kept)
    rollouts, rows = computed_rows(generator, prompts(tokenizer, samples=16), sampling)
    assert set(rows) == {48}
    assert len({len(rollout.completion_ids) for rollout in rollouts}) > 3


@pytest.mark.parametrize("compiled", [False, True])
def test_a_static_cache_gives_what_a_dynamic_one_gives(generator, policy, tokenizer, compiled):
    """Also with a forward that is compiled, as on CUDA, for which the shapes of each token are the same."""
    static, shapes = started(policy, tokenizer, cache_implementation="static"), set()

    def forward(**inputs):
        mask = inputs["attention_mask"]
        shapes.add((inputs["input_ids"].is_contiguous(), tuple(mask.shape)))
        return static.model(**inputs)

    if compiled:
        static.model._valid_auto_compile_criteria = lambda made, config: not config.disable_compile
        static.model.get_compiled_call = lambda config: forward
    first = list(generator.generate(prompts(tokenizer), unsure(), seed=4))
    second = list(static.generate(prompts(tokenizer), unsure(), seed=4))
    assert shapes == ({(True, (24, 1, 1, 11))} if compiled else set())
    assert [r.completion_ids for r in first] == [r.completion_ids for r in second]
    for one, other in zip(first, second, strict=True):
        assert one.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=1e-5)


@pytest.mark.parametrize("kept", ["offloaded", "offloaded_static"])
def test_a_cache_that_needs_an_accelerator_is_refused_without_one(policy, tokenizer, kept):
    with pytest.raises(ConfigError, match=r"generator\.cache_implementation.*cpu"):
        started(policy, tokenizer, cache_implementation=kept)


def test_more_than_the_models_positions_is_refused(generator, tokenizer):
    with pytest.raises(
        RunFailed, match=r"prompt of 6 tokens plus sampling\.max_completion_length 59 .* 64 positions"
    ):
        list(generator.generate(prompts(tokenizer), unsure(max_completion_length=59), seed=0))


def test_a_policy_without_finite_probabilities_is_told(policy, tokenizer):
    generator = started(policy, tokenizer)
    broken = ((name, torch.full_like(p, torch.nan)) for name, p in policy.named_parameters())
    generator.sync(broken, version=5)
    with pytest.raises(RunFailed, match="version 5 gives NaN or infinite probabilities"):
        list(generator.generate(prompts(tokenizer), SAMPLING, seed=0))


def test_a_token_forced_at_the_end_is_forced_at_each_prompts_own_end(generator, tokenizer):
    digit = tokenizer("7", add_special_tokens=False).input_ids[0]
    sampling = SamplingConfig(
        max_completion_length=4, temperature=3.0, generation_kwargs={"forced_eos_token_id": digit}
    )
    asked = [replace(p, max_tokens=m) for p, m in zip(prompts(tokenizer), (1, 2, None), strict=True)]
    for rollout in generator.generate(asked, sampling, seed=0):
        if rollout.finish_reason == "length":
            assert rollout.completion_ids[-1] == digit


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_prompt_has_its_own_longest_completion(policy, tokenizer, cache):
    own = started(policy, tokenizer, cache_implementation=cache)
    asked = prompts(tokenizer, ("37+48=", "1+2=", "12+5=", "5+50="))
    assert_cut(own, [replace(prompt, seed=5 + prompt.group_id) for prompt in asked])
    with pytest.raises(RunFailed, match="max_tokens 0"):
        list(own.generate([replace(asked[0], max_tokens=0)], SAMPLING, seed=0))
