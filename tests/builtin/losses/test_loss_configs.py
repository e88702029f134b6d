"""Parameters of losses in a run file, and refused values."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from grpox_losses.configs import CispoConfig, ClippedConfig, SapoConfig


def test_defaults() -> None:
    assert ClippedConfig().model_dump() == {
        "clip_low": 0.2,
        "clip_high": None,
        "delta": None,
        "level": "token",
    }
    assert CispoConfig().model_dump() == {"cap": 5.0}
    assert SapoConfig().model_dump() == {"tau_pos": 1.0, "tau_neg": 1.05}


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ({"delta": 1.2}, "delta"),
        ({"delta": 1.25, "clip_high": 0.28}, "delta"),
        ({"delta": 0.9, "clip_low": 0.3}, "delta"),
        ({"delta": float("inf")}, "delta"),
        ({"clip_low": 0.0}, "clip_low"),
        ({"clip_low": 1.1}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"level": "word"}, "level"),
        ({"clip_hi": 0.28}, "clip_hi"),
    ],
)
def test_refused_clipped_parameters_are_named(parameters: dict[str, object], key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ClippedConfig.model_validate(parameters)
    assert [error["loc"] for error in caught.value.errors()] == [(key,)]


def test_delta_just_above_the_clip_is_accepted() -> None:
    assert ClippedConfig(clip_high=0.28, delta=1.29).delta == 1.29


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(CispoConfig, {"cap": 0.5}), (SapoConfig, {"tau_pos": 0.0}), (SapoConfig, {"tau_neg": -1.0})],
)
def test_refused_parameters(config: type[BaseModel], parameters: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        config.model_validate(parameters)
