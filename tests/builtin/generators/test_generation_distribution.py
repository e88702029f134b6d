"""The sampling distribution as processors: numbers by hand, their order, and rows without their padding."""

import math
from types import SimpleNamespace

import pytest
import torch
from support.peak_memory import peak_bytes
from transformers import LlamaConfig, LlamaForCausalLM

from grpox.config import SamplingConfig
from grpox.contracts import Prompt
from grpox.errors import ConfigError
from grpox.policy.memory_plan.formula import score_bytes
from grpox_generators.configs import HfConfig
from grpox_generators.decoding import RunningRows
from grpox_generators.generation_kwargs import LOGITS as LOGITS_NAMES
from grpox_generators.generation_kwargs import OF_ROWS
from grpox_generators.sampling import draw_tokens, processors_of

PAD = 0
EOS = 1
LOGITS = [2.0, -2.0, 1.0, -1.0, 4.0, 0.5]
LOGITS_KWARGS = {
    "sequence_bias": [[[5], 1.5]],
    "encoder_repetition_penalty": 2.0,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[2, 4]],
    "forced_eos_token_id": EOS,
    "exponential_decay_length_penalty": [1, 1.5],
    "suppress_tokens": [2],
    "begin_suppress_tokens": [2],
    "watermarking_config": {"greenlist_ratio": 0.5, "bias": 2.0},
}


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        vocab_size=len(LOGITS), hidden_size=4, num_attention_heads=1, num_hidden_layers=1, intermediate_size=4
    )
    return LlamaForCausalLM(config)


def scores(model, prompt, completion, ends=(EOS,), **sampling):
    """The processed scores of a completion's next token."""
    settings = SamplingConfig(max_completion_length=4).model_copy(update=sampling)
    process = processors_of(model, settings, ends, 4, torch.tensor([prompt]))
    return process(torch.tensor([[*prompt, *completion]]), torch.tensor([LOGITS]))[0].tolist()


def test_a_penalty_divides_positive_and_multiplies_negative_logits_of_what_occurred(model):
    assert scores(model, [2, 3], [4], repetition_penalty=2.0) == [2.0, -2.0, 0.5, -2.0, 2.0, 0.5]


def test_the_penalty_comes_before_the_temperature_and_the_filters(model):
    """4 / 4 = 1 is then no longer the largest: token 0 with 2 is, and top-k of 1 keeps it alone."""
    kept = scores(model, [4], [], repetition_penalty=4.0, temperature=0.5, top_k=1)
    assert kept == [4.0] + [-math.inf] * 5


def test_greedy_decoding_is_penalised_but_not_filtered(model):
    kept = scores(model, [4], [], repetition_penalty=4.0, temperature=0.0, top_k=1)
    assert kept == [2.0, -2.0, 1.0, -1.0, 1.0, 0.5]


@pytest.mark.parametrize(("length", "suppressed"), [(0, True), (1, True), (2, False)])
def test_no_end_token_before_the_minimum(model, length, suppressed):
    after = scores(model, [2], [3] * length, ends=(EOS, 5), min_completion_length=2)
    assert [math.isinf(after[token]) for token in (EOS, 5)] == [suppressed] * 2
    assert after[2:5] == LOGITS[2:5]


@pytest.mark.parametrize(
    ("kwargs", "prompt", "expected"),
    [
        ({"bad_words_ids": [[3]]}, [2], {3: -math.inf}),
        ({"bad_words_ids": [[2, 4]]}, [2], {4: -math.inf}),
        ({"bad_words_ids": [[2, 4]]}, [3], {}),
        ({"sequence_bias": [[[5], 1.5]]}, [2], {5: 2.0}),
        ({"no_repeat_ngram_size": 2}, [2, 4, 2], {4: -math.inf}),
        ({"suppress_tokens": [2, 3]}, [2], {2: -math.inf, 3: -math.inf}),
        ({"forced_eos_token_id": EOS}, [2], {}),
    ],
    ids=str,
)
def test_generation_kwargs_are_part_of_it(model, kwargs, prompt, expected):
    after = scores(model, prompt, [], generation_kwargs=kwargs)
    assert after == [expected.get(token, logit) for token, logit in enumerate(LOGITS)]


def test_filters_among_generation_kwargs_apply_to_sampling_alone(model):
    """exp(4) is 0.79 of the sum: the only token of at least one half."""
    half = {"epsilon_cutoff": 0.5}
    assert scores(model, [2], [], generation_kwargs=half) == [-math.inf] * 4 + [4.0, -math.inf]
    assert scores(model, [2], [], generation_kwargs=half, temperature=0.0) == LOGITS


@pytest.mark.parametrize("kept", [[0, 1, 2], [1, 2], [0, 2], [2]], ids=str)
@pytest.mark.parametrize(
    "sampling",
    [{"repetition_penalty": 2.0}, {"generation_kwargs": {"no_repeat_ngram_size": 2}}],
    ids=["penalty", "ngrams"],
)
def test_padding_is_not_seen_and_rows_that_stay_are_processed_as_before(model, sampling, kept):
    """Prompts of 2, 4 and 4 tokens, of which the first is padded: each row gets what it gets alone."""
    prompts = [(2, 3), (4, 5, 4, 5), (3, 3, 2, 2)]
    tokenizer = SimpleNamespace(pad_token_id=PAD)
    context = SimpleNamespace(world_size=1, tokenizer=tokenizer, device=torch.device("cpu"))
    settings = SamplingConfig(max_completion_length=4, **sampling)
    asked = [Prompt(group, ids, 1) for group, ids in enumerate(prompts)]
    rows = RunningRows(model, context, HfConfig(), asked, [4] * 3, settings, (EOS,))
    if len(kept) < 3:
        rows._keep(torch.tensor(kept))
    after = rows.process(4, torch.tensor([LOGITS] * len(kept))).tolist()
    assert after == [scores(model, prompts[row], [], **sampling) for row in kept]


def test_what_transformers_refuses_is_told(model):
    with pytest.raises(
        ConfigError, match=r"sampling\.generation_kwargs: transformers refuses this value: .*bad_words_ids"
    ):
        scores(model, [2], [], generation_kwargs={"bad_words_ids": 3})


@pytest.mark.parametrize("name", LOGITS_KWARGS)
def test_what_remembers_rows_is_known(model, name):
    """transformers' own processor, asked for two rows of three: only what remembers rows minds."""
    sampling = SamplingConfig(generation_kwargs={name: LOGITS_KWARGS[name]})
    prompts = torch.tensor([[2, 3, 2], [4, 5, 4], [3, 2, 3]])

    def after(kept):
        process = processors_of(model, sampling, (EOS,), sampling.max_completion_length, prompts)
        process(prompts, torch.tensor([LOGITS] * 3))
        longer = torch.cat([prompts, prompts[:, :1]], dim=1)[kept]
        try:
            return process(longer, torch.tensor([LOGITS] * len(kept))).tolist()
        except (RuntimeError, ArithmeticError):
            return None

    whole = after([0, 1, 2])
    assert (after([1, 2]) != whole[1:]) <= (name in OF_ROWS)


def test_every_key_about_tokens_is_tried():
    assert set(LOGITS_KWARGS) == set(LOGITS_NAMES)


@pytest.mark.parametrize(
    ("changes", "planned"),
    [
        ({}, 12),
        ({"temperature": 0.7}, 12),
        ({"min_completion_length": 3}, 24),
        ({"repetition_penalty": 1.1}, 24),
        ({"temperature": 0.7, "top_k": 5}, 24),
        ({"temperature": 0.7, "min_p": 0.1}, 24),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, 40),
        ({"temperature": 0.7, "generation_kwargs": {"typical_p": 0.9}}, 56),
    ],
    ids=["plain", "temperature", "minimum", "penalty", "top-k", "min-p", "top-p", "typical"],
)
def test_the_scores_of_a_token_take_no_more_than_planned(model, changes, planned):
    rows, vocabulary = 8, 20_000
    sampling = SamplingConfig(max_completion_length=4, **changes)
    prompts = torch.zeros(rows, 2, dtype=torch.long)
    process, head = processors_of(model, sampling, (EOS,), 4, prompts), torch.randn(4, vocabulary)

    def sample():
        logits = torch.randn(rows, 4) @ head
        uniform = torch.rand(rows, 1, dtype=torch.float64)
        return draw_tokens(process(prompts, logits.to(torch.float32, copy=True)), uniform)

    measured = peak_bytes(sample) / (rows * vocabulary)
    assert score_bytes(sampling) == planned
    assert planned / 2 < measured < planned + 0.5
