"""Arguments that a run file may not hand to transformers, and those of gradient checkpointing."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch.utils.checkpoint import checkpoint

from grpox.config import ModelConfig, TrainConfig
from grpox.runfile.model_options import (
    CHECKPOINT_ARGUMENTS,
    checkpointing_problems,
    model_problems,
)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_is_the_models_own_key(name: str) -> None:
    [problem] = model_problems(ModelConfig(path="m", init={name: "float16", "revision": "v1"}))
    assert (problem.key, problem.what) == (f"model.init.{name}", "is not allowed here: use model.dtype")


@pytest.mark.parametrize(
    "name", ["device_map", "load_in_4bit", "quantization_config", "ignore_mismatched_sizes"]
)
def test_what_would_place_or_change_weights_is_refused(name: str) -> None:
    assert [p.key for p in model_problems(ModelConfig(path="m", init={name: "auto"}))] == [f"model.init.{name}"]


def test_the_arguments_of_checkpointing_are_torchs() -> None:
    """Its context_fn is a function, which no run file can hold."""
    parameters = inspect.signature(checkpoint).parameters
    named = {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY} - {"context_fn"}
    assert named | {"preserve_rng_state"} == {*CHECKPOINT_ARGUMENTS}


@pytest.mark.parametrize(
    ("train", "key", "nearest"),
    [
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrent": True}},
            ".use_reentrent",
            "use_reentrant",
        ),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "", ""),
    ],
)
def test_checkpointing_arguments_that_mean_nothing(train: dict[str, Any], key: str, nearest: str) -> None:
    [problem] = checkpointing_problems(TrainConfig.model_validate(train))
    assert (problem.key, problem.nearest) == (f"train.gradient_checkpointing_kwargs{key}", nearest)
