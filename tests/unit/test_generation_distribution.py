"""The sampling distribution as processors: numbers by hand, their order, and rows without their padding."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpox.config import SamplingConfig
from grpox.errors import ConfigError
from grpox_generators.sampling import Distribution, SampledLogprobs

PAD = 0
EOS = 1
LOGITS = [2.0, -2.0, 1.0, -1.0, 4.0, 0.5]


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        vocab_size=len(LOGITS), hidden_size=4, num_attention_heads=1, num_hidden_layers=1, intermediate_size=4
    )
    return LlamaForCausalLM(config)


def scores(model, prompt, completion, ends=(EOS,), **sampling):
    """The processed scores of a completion's next token, for one row without padding."""
    rows = torch.tensor([prompt])
    settings = SamplingConfig(max_completion_length=4).model_copy(update=sampling)
    distribution = Distribution(model, settings, ends, rows, torch.tensor([len(prompt)]))
    return distribution(torch.tensor([[*prompt, *completion]]), torch.tensor([LOGITS]))[0].tolist()


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


@pytest.mark.parametrize(
    "sampling",
    [{"repetition_penalty": 2.0}, {"generation_kwargs": {"no_repeat_ngram_size": 2}}],
    ids=["penalty", "ngrams"],
)
def test_padding_is_not_seen(model, sampling):
    """Two rows of one batch, the first padded with two tokens, get what each gets alone."""
    settings = SamplingConfig(**sampling)
    prompts = torch.tensor([[PAD, PAD, PAD, 2], [4, 5, 4, 5]])
    distribution = Distribution(model, settings, (EOS,), prompts, torch.tensor([2, 4]))
    together = distribution(prompts, torch.tensor([LOGITS, LOGITS])).tolist()
    assert together == [scores(model, row, [], **sampling) for row in ([PAD, 2], [4, 5, 4, 5])]


def test_a_padded_row_keeps_the_logit_of_the_padding_token(model):
    settings = SamplingConfig(repetition_penalty=2.0)
    prompts = torch.tensor([[PAD, 2], [4, 5]])
    distribution = Distribution(model, settings, (EOS,), prompts, torch.tensor([1, 2]))
    assert distribution(prompts, torch.tensor([LOGITS, LOGITS]))[:, PAD].tolist() == [2.0, 2.0]


def test_what_transformers_refuses_is_told(model):
    with pytest.raises(
        ConfigError, match=r"sampling\.generation_kwargs: transformers refuses it: .*bad_words_ids"
    ):
        scores(model, [2], [], generation_kwargs={"bad_words_ids": 3})


def test_the_recorder_reads_each_token_from_the_scores_it_was_drawn_from():
    """Two rows of two tokens: log softmax of [0, log 3] is [log 1/4, log 3/4], of equal scores log 1/2."""
    recorder = SampledLogprobs(prompt_length=1)
    sequences = torch.tensor([[0, 1, 0], [0, 0, 1]])
    recorder(sequences[:, :1], torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)]]))
    recorder(sequences[:, :2], torch.zeros(2, 2))
    expected = torch.tensor([[3 / 4, 1 / 2], [1 / 4, 1 / 2]]).log()
    torch.testing.assert_close(recorder.finish(sequences), expected)
