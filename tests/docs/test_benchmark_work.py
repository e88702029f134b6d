"""Benchmarks compare the work that they name, and their figures have the meaning that they state."""

import importlib.resources
import os
import sys
from pathlib import Path
from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GenerationMixin

from grpox.config import SamplingConfig
from grpox.contracts import GeneratorContext, Prompt
from grpox.policy.models import architecture_of
from grpox.policy.weight_stream import stream_weights
from grpox_generators import hf
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from forced_lengths import Lengths, force_in_hf, force_in_transformers  # noqa: E402
from update import check_norms, summary  # noqa: E402
from work import varied_lengths  # noqa: E402


@pytest.mark.parametrize(("count", "longest"), [(32, 64), (8, 64), (256, 4), (64, 1024)])
def test_the_mean_of_the_lengths_is_a_third_of_the_longest_which_occurs(count, longest):
    lengths = varied_lengths(count, longest, seed=3)
    assert len(lengths) == count
    assert max(lengths) == longest
    assert min(lengths) >= 1
    # What rounding up to 1 and the one longest add.
    assert mean(lengths) == pytest.approx(longest / 3, abs=0.02 * longest + 0.4)


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(GenerationMixin, "generate", GenerationMixin.generate)  # given back afterwards
    path = importlib.resources.files("grpox.runfile.recipes") / "quickstart" / "model"
    return AutoModelForCausalLM.from_pretrained(os.fspath(path))


def completions(model, input_ids, new_tokens):
    config = GenerationConfig(do_sample=True, max_new_tokens=new_tokens, eos_token_id=[1], pad_token_id=0)
    mask = torch.ones_like(input_ids)
    return model.generate(input_ids=input_ids, attention_mask=mask, generation_config=config)


def ends(sequences, columns):
    """Tokens up to the first EOS of each row, that included."""
    return [row[columns:].tolist().index(1) + 1 for row in sequences]


def test_generate_ends_each_completion_at_its_length_and_no_sooner(model):
    force_in_transformers(Lengths(rows=6, longest=12))
    prompts = torch.tensor([[4, 13, 5, 14]] * 6)
    for batch in range(2):
        assert ends(completions(model, prompts, 12), 4) == varied_lengths(6, 12, seed=batch)


def test_the_hf_generator_ends_each_completion_at_its_length_and_no_sooner(model, monkeypatch):
    """With its own cache, which ended rows leave, and with a static one of transformers."""
    monkeypatch.setattr(hf, "RunningRows", hf.RunningRows)  # given back afterwards
    force_in_hf(Lengths(rows=6, longest=12))
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    prompts = [Prompt(0, (4, 13, 5, 14), 2), Prompt(1, (6, 14), 4)]
    for batch, cache in enumerate(("dynamic", "static")):
        generator = HfGenerator(HfConfig(cache_implementation=cache))
        path, build = Path(model.name_or_path), architecture_of(model)
        device = torch.device("cpu")
        generator.start(GeneratorContext(path, build, tokenizer, (1,), device, 0, 1, 0, model))
        generator.sync(stream_weights(model), 0)
        rollouts = generator.generate(prompts, SamplingConfig(max_completion_length=12), seed=0)
        assert [len(rollout.completion_ids) for rollout in rollouts] == varied_lengths(6, 12, seed=batch)


def test_the_ratio_to_the_bare_loop_is_more_than_1_where_less_time_is_taken():
    seconds = {"grpox": [1.0, 2.0, 4.0], "bare-zero3": [2.0, 3.0, 4.0]}
    figures = summary([{"seconds": seconds, "tokens": [100, 100, 100], "parameters": 10**9}])
    assert figures["grpox"]["to_bare_of_rounds"] == [2.0, 1.5, 1.0]
    assert figures["grpox"]["to_bare"] == 1.5
    assert figures["grpox"]["tokens_per_second"] == 50
    assert figures["grpox"]["tflop_per_second"] == pytest.approx(0.3)


def test_candidates_of_other_gradients_are_not_compared():
    check_norms({"grpox": [1.0, 2.0], "bare-zero3": [1.0, 2.0001]})
    with pytest.raises(SystemExit, match=r"round 2: .* bare-zero3 2\.01"):
        check_norms({"grpox": [1.0, 2.0], "bare-zero3": [1.0, 2.01]})
