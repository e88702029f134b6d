"""The sampling distribution as processors: numbers by hand, their order, and rows without their padding."""

import math
from types import SimpleNamespace

import pytest
import torch
from support.peak_memory import peak_bytes
from support.problems import problem_of
from transformers import LlamaConfig, LlamaForCausalLM

from grpox.config import SamplingConfig
from grpox.contracts import Prompt
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


@pytest.mark.parametrize(
    ("sampling", "prompt", "completion", "expected"),
    [
        # Positive logits of tokens that occurred are divided, negative ones multiplied.
        ({"repetition_penalty": 2.0}, [2, 3], [4], {2: 0.5, 3: -2.0, 4: 2.0}),
        # Greedy decoding is penalised, but not filtered.
        ({"repetition_penalty": 4.0, "temperature": 0.0, "top_k": 1}, [4], [], {4: 1.0}),
        ({"min_completion_length": 2}, [2], [], {EOS: -math.inf, 5: -math.inf}),
        ({"min_completion_length": 2}, [2], [3], {EOS: -math.inf, 5: -math.inf}),
        ({"min_completion_length": 2}, [2], [3, 3], {}),
        ({"generation_kwargs": {"bad_words_ids": [[2, 4]]}}, [2], [], {4: -math.inf}),
        ({"generation_kwargs": {"no_repeat_ngram_size": 2}}, [2, 4, 2], [], {4: -math.inf}),
        ({"generation_kwargs": {"suppress_tokens": [2, 3]}}, [2], [], {2: -math.inf, 3: -math.inf}),
        ({"generation_kwargs": {"forced_eos_token_id": EOS}}, [2], [], {}),
        # Filters apply to sampling alone.
        ({"generation_kwargs": {"epsilon_cutoff": 0.5}, "temperature": 0.0}, [2], [], {}),
    ],
    ids=str,
)
def test_scores_by_hand(model, sampling, prompt, completion, expected):
    after = scores(model, prompt, completion, ends=(EOS, 5), **sampling)
    assert after == [expected.get(token, logit) for token, logit in enumerate(LOGITS)]


def test_the_order_of_penalty_temperature_and_filters(model):
    """4 / 4 = 1 is then no longer the largest: token 0 with 2 is, and top-k of 1 keeps it alone."""
    kept = scores(model, [4], [], repetition_penalty=4.0, temperature=0.5, top_k=1)
    assert kept == [4.0] + [-math.inf] * 5
    # exp(4) is 0.79 of the sum: the only token of at least one half.
    half = {"epsilon_cutoff": 0.5}
    assert scores(model, [2], [], generation_kwargs=half) == [-math.inf] * 4 + [4.0, -math.inf]


def test_a_value_that_transformers_refuses_is_named(model):
    problem = problem_of(scores, model, [2], [], generation_kwargs={"bad_words_ids": 3})
    assert problem.key == "sampling.generation_kwargs"
    assert "bad_words_ids" in problem.what


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


@pytest.mark.parametrize("name", LOGITS_NAMES)
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
