"""Support of generation_kwargs and sampling settings by hf, and settings that would bias a correction."""

import pytest
from pydantic import ValidationError
from transformers import GenerationConfig
from transformers.generation.configuration_utils import (
    DEPRECATED_STATIC_CACHE_IMPLEMENTATIONS,
    DYNAMIC_CACHE_IMPLEMENTATIONS,
    STATIC_CACHE_IMPLEMENTATIONS,
)

from grpox.config import SamplingConfig
from grpox.runfile.checks import LOGIT_KWARGS, changed_distribution
from grpox_generators.configs import HfConfig
from grpox_generators.generation_kwargs import ALLOWED, LOGITS, OWNED, WARPERS


def refused(sampling, **parameters):
    return HfConfig(**parameters).check_sampling(SamplingConfig(**sampling))


def test_every_key_of_transformers_is_either_taken_or_refused_by_name():
    keys = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    assert {*ALLOWED, *OWNED} <= keys
    refusals = refused({"generation_kwargs": dict.fromkeys(keys)})
    assert {problem.key.rpartition(".")[2] for problem in refusals} == keys - {*ALLOWED}
    assert refused({"generation_kwargs": dict.fromkeys(ALLOWED, 1)}) == []


def test_the_caches_are_those_of_transformers():
    names = HfConfig.model_fields["cache_implementation"].annotation.__args__
    assert set(names) == {*STATIC_CACHE_IMPLEMENTATIONS, *DYNAMIC_CACHE_IMPLEMENTATIONS}
    assert not {*names} & {*DEPRECATED_STATIC_CACHE_IMPLEMENTATIONS}


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("no_repeat_ngrams_size", "no_repeat_ngram_size"),
        ("max_new_tokens", "sampling.max_completion_length"),
        ("max_new_token", "sampling.max_completion_length"),
        ("temperature", "sampling.temperature"),
        ("do_sample", "sampling.temperature"),
        ("num_return_sequences", "train.num_generations"),
        ("eos_token_id", "sampling.stop_token_ids"),
        ("stop_strings", "sampling.stop"),
        ("cache_implementation", "generator.cache_implementation"),
        ("return_dict_in_generate", ""),
        ("num_beams", ""),
        ("frequency_penalty", "sampling.repetition_penalty"),
    ],
)
def test_other_keys_are_refused_with_the_one_to_use(key, near):
    (problem,) = refused({"generation_kwargs": {key: 1, "suppress_tokens": [3]}})
    assert problem.key == f"sampling.generation_kwargs.{key}"
    assert problem.nearest == near


@pytest.mark.parametrize(
    "setting",
    [
        {"stop": ["\n"]},
        {"min_completion_length": 1},
        {"repetition_penalty": 1.1},
        {"generation_kwargs": {"suppress_tokens": [3]}},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_continuous_batching_refuses_what_it_would_ignore(setting):
    (problem,) = refused(setting, continuous_batching=True)
    assert problem.key == f"sampling.{next(iter(setting))}"
    assert "generator.continuous_batching" in problem.given
    assert refused(setting) == []
    rest = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop_token_ids": [3]}
    assert refused(rest, continuous_batching=True) == []


@pytest.mark.parametrize("other", [{"gather_weights": False}, {"cache_implementation": "static"}], ids=str)
def test_continuous_batching_needs_its_own_cache_and_whole_weights(other):
    (name,) = other
    with pytest.raises(ValidationError, match=rf"(?s)^(?=.*continuous_batching\b)(?=.*{name}\b)"):
        HfConfig(continuous_batching=True, **other)
    assert HfConfig(**other)


def test_a_completion_that_could_not_end_is_refused():
    with pytest.raises(ValidationError, match="min_completion_length 5 is more than max_completion_length 4"):
        SamplingConfig(max_completion_length=4, min_completion_length=5)
    assert SamplingConfig(max_completion_length=4, min_completion_length=4)
    with pytest.raises(ValidationError, match="empty"):
        SamplingConfig(stop=["END", ""])


def test_settings_that_change_the_distribution_are_named():
    unchanged = {"temperature": 0.7, "stop": ["\n"], "stop_token_ids": [3]}
    others = {"cache_config": {}, "seed": 1}
    assert changed_distribution(SamplingConfig(**unchanged, generation_kwargs=others)) == []
    for setting, named in (
        ({"repetition_penalty": 1.2}, "repetition_penalty 1.2"),
        ({"min_completion_length": 3}, "min_completion_length 3"),
        ({"generation_kwargs": {"no_repeat_ngram_size": 3}}, "generation_kwargs.no_repeat_ngram_size"),
        ({"generation_kwargs": {"logit_bias": {}}}, "generation_kwargs.logit_bias"),
    ):
        assert changed_distribution(SamplingConfig(**setting)) == [named]
    assert {*LOGITS, *WARPERS} <= LOGIT_KWARGS
