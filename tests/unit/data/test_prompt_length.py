"""The limit on prompt length: the run file's key and the model's positions."""

import pytest
from transformers import GPT2Config, LlamaConfig, MambaConfig

from grpox.config import DataConfig, SamplingConfig
from grpox.data.prompts import PromptLimit
from grpox.errors import ConfigError


def limit(model, completion=16, **data):
    sampling = SamplingConfig(max_completion_length=completion)
    return PromptLimit.of_run(DataConfig(path="x", **data), sampling, model)


def test_without_a_key_it_is_what_the_positions_leave_beside_a_completion():
    made = limit(LlamaConfig(max_position_embeddings=64))
    assert (made.tokens, made.cut) == (48, False)
    for fact in ("64 positions", "sampling.max_completion_length 16"):
        assert fact in made.origin
    # GPT-2 calls its positions n_positions.
    assert limit(GPT2Config(n_positions=32)).tokens == 16


def test_the_key_counts_where_it_is_the_smaller_one():
    model = LlamaConfig(max_position_embeddings=64)
    assert limit(model, max_prompt_length=10).tokens == 10
    assert limit(model, max_prompt_length=10).origin == "data.max_prompt_length"
    of_model = limit(model, max_prompt_length=1000, long_prompts="cut")
    assert (of_model.tokens, of_model.cut) == (48, True)
    assert of_model.origin.startswith("64 positions of the model")


def test_a_model_without_positions_takes_prompts_of_any_length():
    assert limit(MambaConfig()).tokens is None
    assert not limit(MambaConfig()).refuses(10**6)
    assert limit(MambaConfig(), max_prompt_length=5).tokens == 5


def test_a_completion_that_fills_the_positions_is_refused():
    assert limit(LlamaConfig(max_position_embeddings=17)).tokens == 1
    with pytest.raises(ConfigError, match="leaves no room for a prompt: the model has 16 positions") as caught:
        limit(LlamaConfig(max_position_embeddings=16))
    assert caught.value.problems[0].key == "sampling.max_completion_length"


def test_the_limit_itself_is_not_too_long():
    made = PromptLimit(3)
    assert [made.refuses(n) for n in (3, 4)] == [False, True]
