"""Models of many kinds: the same alone and beside others in every length, and in training as in eval mode."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.architectures import COMMON, FURTHER, OWN, further_model, perturb, tiny_model
from support.problems import problem_of
from support.sampling_parity import context_of, difference
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from grpox.config import ModelConfig, SamplingConfig, TrainConfig
from grpox.contracts import Prompt
from grpox.policy.batch import FULL_LOGITS, ForwardMode, Sample, collate
from grpox.policy.forward_trial import LONGEST, ForwardTrial
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.model_folder import save_whole
from grpox.policy.models import architecture_of, load_model
from grpox.policy.randomness import disable_dropout, restore_training
from grpox.policy.rope import fix_rope, longest_sequence, rope_choice
from grpox.policy.scoring_forward import install_scoring_forward
from grpox.policy.weight_stream import stream_weights
from grpox.runfile.load import load_run
from grpox.runtime.world import World
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator
from grpox_vllm_serving.protocol import differences, signature

CPU = torch.device("cpu")
SHORT, LONG = [1.0] * 16, [1.0 + place for place in range(16)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {"original_max_position_embeddings": 16, "rope_scaling": LONGROPE}),
    "scaled": ("phi3", {"original_max_position_embeddings": 16,
                        "rope_scaling": LONGROPE | {"attention_factor": 1.3}}),
    "phimoe": ("phimoe", {"rope_scaling": LONGROPE | {
        "short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": 16}}),
    "llama": ("llama", {"max_position_embeddings": 16, "rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    "hunyuan": ("hunyuan_v1_dense", {
        "max_position_embeddings": 16, "rope_scaling": {"type": "dynamic", "factor": 4.0, "alpha": 10.0}}),
}  # fmt: skip
COUNT_PADDING = (
    "bart blenderbot marian mbart minimax mvp pegasus plbart recurrent_gemma roformer rwkv trocr".split()  # noqa: SIM905
)
"""Kinds whose positions or states go on in padding."""
DEPENDENT: dict[str, dict[str, Any]] = {
    "xlstm": {},
    "llama4_text": {"attention_chunk_size": 8, "num_local_experts": 4, "intermediate_size_mlp": 64,
                    "floor_scale": 16, "num_hidden_layers": 4},
    "phi3": ROPES["phi3"][1], "phimoe": ROPES["phimoe"][1],
}  # fmt: skip


def sequence(length: int) -> Sample:
    draw = torch.Generator().manual_seed(length)
    ids = tuple(torch.randint(3, COMMON["vocab_size"], (length,), generator=draw).tolist())
    return Sample(ids[:-4], ids[-4:], np.ones(4, bool), np.zeros(4), 0.0)


@torch.no_grad()
def apart(model: PreTrainedModel, lengths: tuple[int, ...], mode: ForwardMode = FULL_LOGITS) -> float:
    """Return the largest difference of a log-probability alone and together."""
    samples = [sequence(length) for length in lengths]
    together = completion_logprobs(model, collate(samples, CPU, mode), 1.0)[0]
    alone = [completion_logprobs(model, collate([each], CPU), 1.0)[0] for each in samples]
    return float((torch.cat(alone) - together).abs().max())


def trial(model: PreTrainedModel, longest: int | None = None) -> ForwardTrial:
    return ForwardTrial(model, model, World(0, 1, CPU), longest)


def longrope(name: str = "phi3", **own: Any) -> PreTrainedModel:
    kind, rope = ROPES[name]
    return tiny_model(kind, **copy.deepcopy(rope) | own)


@pytest.mark.parametrize("kind", [*OWN, *FURTHER])
def test_alone_is_as_together_and_the_trial_says_so(kind: str) -> None:
    model = further_model(kind, sliding_window=8, attention_chunk_size=8).eval()
    perturb(model, 0)
    mode = install_scoring_forward(model, TrainConfig())
    assert ("apart beside" in mode.dependence) == bool(mode.dependence) == (kind in COUNT_PADDING)
    assert mode == FULL_LOGITS if mode.dependence else apart(model, (8, 70, 20), mode) < 2e-5


@pytest.mark.parametrize("kind", DEPENDENT)
def test_the_trial_finds_models_that_depend_on_neighbours(kind: str) -> None:
    model = tiny_model(kind, **copy.deepcopy(DEPENDENT[kind]))
    mode = install_scoring_forward(model, TrainConfig())
    assert mode == FULL_LOGITS
    assert "apart beside" in mode.dependence


def test_the_trial_goes_beyond_switches_and_not_beyond_the_run() -> None:
    def lengths(model: PreTrainedModel, longest: int | None = None) -> list[int]:
        return [len(each) for each in trial(model, longest)._pair]

    model = tiny_model("mistral", sliding_window=60)
    assert lengths(model) == [8, 76]
    assert lengths(model, 30) == [8, 30]
    assert lengths(tiny_model("llama", max_position_embeddings=2**17)) == [8, 40]
    assert lengths(tiny_model("mistral", sliding_window=LONGEST, max_position_embeddings=2**17)) == [8, 40]


@pytest.mark.parametrize(
    ("name", "longest"), [*((name, longest) for name in ROPES for longest in (16, 100)), ("phi3", 4096)]
)
def test_factors_are_chosen_by_the_longest_sequence_alike_in_every_copy(name: str, longest: int) -> None:
    model = longrope(name)
    own, before = copy.deepcopy(model.config.to_dict()), model(torch.arange(8)[None]).logits
    assert apart(model, (8, 40)) > 1e-2
    fix_rope(model, longest)
    built = architecture_of(model)().eval()
    built.load_state_dict(model.state_dict())
    for each in (model, built, copy.deepcopy(model)):
        assert apart(each, (8, 15, min(longest, 16))) < 1e-5
        assert apart(each, (8, longest)) < 1e-4
    chooses = "dynamic" if name in ("llama", "hunyuan") else "long" if longest > 16 else "short"
    assert rope_choice(model.config) == rope_choice(built.config) == chooses
    assert torch.equal(built(torch.arange(8)[None]).logits, model(torch.arange(8)[None]).logits)
    assert torch.equal(model(torch.arange(8)[None]).logits, before) == (chooses != "long")
    fix_rope(model, None)
    assert model.config.to_dict() == own
    assert torch.equal(model(torch.arange(8)[None]).logits, before)


def test_long_factors_are_those_of_transformers_for_a_long_sequence() -> None:
    model, ids = longrope(), torch.arange(40)[None] % 17
    own = model(ids).logits
    fix_rope(model, 40)
    torch.testing.assert_close(model(ids).logits, own)
    torch.testing.assert_close(model(ids[:, :8]).logits, own[:, :8])


def test_a_loaded_model_is_changed_and_what_is_saved_has_its_own_factors(tmp_path: Path) -> None:
    longrope().save_pretrained(tmp_path / "own")
    for given, choice in ((16, "short"), (100, "long"), ("auto", "long")):
        model = load_model(ModelConfig(path=str(tmp_path / "own"), longest_sequence=given))
        assert rope_choice(model.config) == choice
        save_whole(model, tmp_path / "saved")
        files = [tmp_path / folder / "config.json" for folder in ("own", "saved")]
        assert files[0].read_text() == files[1].read_text()
        assert apart(model, (8, 60)) < 1e-5  # the model in memory still is the run's


def test_the_longest_sequence_is_of_training_and_evaluation() -> None:
    config = AutoConfig.for_model("llama", max_position_embeddings=60)

    def longest(*overrides: str) -> int | None:
        return longest_sequence(load_run("quickstart", list(overrides)).config, config)

    prompts = "data.max_prompt_length=10"
    assert longest() == 60
    assert longest(prompts, "sampling.max_completion_length=20") == 30
    assert longest(prompts, "evaluation.sampling.max_completion_length=40") == 50
    assert longest(prompts, "sampling.max_completion_length=20", "evaluation=null") == 30
    assert longest("data.max_prompt_length=40", "evaluation.sampling.max_completion_length=24") == 60


def test_hf_samples_across_a_switch_from_the_policy() -> None:
    model = longrope()
    prompts = [Prompt(group, sequence(length).prompt, 3) for group, length in enumerate((8, 18, 30))]
    for longest in (64, 16):
        fix_rope(model, longest)
        generator = HfGenerator(HfConfig())
        generator.start(context_of(model))
        generator.sync(stream_weights(model), 0)
        rollouts = list(generator.generate(prompts, SamplingConfig(max_completion_length=24), 7))
        assert difference(model, rollouts, 1.0) < 2e-5


def test_a_server_that_chose_other_factors_is_refused() -> None:
    model, other = longrope(), longrope().config
    fix_rope(model, 64)
    ours = signature(model.config)
    assert differences(ours, signature(other, 64)) == []
    assert differences(ours, signature(other, 16)) == ["rope_factors is short there and long here"]
    assert "rope_factors" not in signature(tiny_model("llama").config)


IDS = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10], [5, 4, 3, 12, 11, 10, 9, 8]])


def random_model(kind: str) -> PreTrainedModel:
    """Build a model with every probability of its config above 0."""
    fields = vars(CONFIG_MAPPING[kind]())
    chances = {
        name: 0.3
        for name, value in fields.items()
        if re.search("drop|jitter", name) and isinstance(value, int | float) and not isinstance(value, bool)
    }
    return further_model(kind, **chances)


def states() -> list[Any]:
    return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("kind", [*OWN, *FURTHER])
def test_training_mode_is_eval_mode_with_and_without_gradient_checkpointing(kind: str) -> None:
    model = random_model(kind).eval()
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
    disable_dropout(model)
    for checkpointed in (False, True)[: 1 + model.supports_gradient_checkpointing]:
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        before = states()
        actual = model(IDS, use_cache=False).logits
        assert torch.allclose(actual, expected, atol=1e-5)
        actual.sum().backward()
        assert states() == before


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand([]).item(), random.random, np.random.rand, lambda: 0.5],
    ids=["torch", "random", "numpy", "constant"],
)
def test_what_stays_random_or_differs_is_refused_with_the_configs_fields(draw: Callable[[], float]) -> None:
    model = random_model("mixtral")
    attention = model.model.layers[0].self_attn.q_proj

    def add_noise(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output + draw() if module.training else None

    trial(model).check_repeats()
    attention.register_forward_hook(add_noise)
    problem = problem_of(trial(model).check_repeats)
    assert problem.key == "model.path"
    assert "attention_dropout 0.3, router_jitter_noise 0.3" in problem.given


def test_a_model_from_python_computes_in_training_mode_again_after_the_run() -> None:
    model = random_model("phimoe")
    seen = []
    model.model.layers[0].mlp.router.register_forward_hook(lambda module, *_: seen.append(module.training))
    for change in (disable_dropout, disable_dropout, restore_training):
        change(model)
        model.train()(IDS)
    assert seen == [False, False, True]
    assert not any(module._forward_pre_hooks for module in model.modules())
