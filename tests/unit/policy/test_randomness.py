"""Models of many kinds in training mode: the same as in eval mode, and no random number is drawn."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.architectures import FURTHER, OWN, further_model
from support.problems import problem_of
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from grpox.policy.forward_trial import ForwardTrial
from grpox.policy.randomness import disable_dropout, restore_training
from grpox.runtime.world import World

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


def trial(model: PreTrainedModel) -> ForwardTrial:
    return ForwardTrial(model, model, World(0, 1, torch.device("cpu")))


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
