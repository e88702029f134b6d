"""`grpox.build` makes a component as a run file would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import grpox
from grpox.contracts import LossInputs
from grpox.errors import ConfigError


def test_a_component_is_built_with_its_parameters() -> None:
    loss = grpox.build("loss", "dapo", {"clip_low": 0.1, "clip_high": 0.28})
    zeros, ones = torch.zeros(1, 1), torch.ones(1, 1)
    inputs = LossInputs(zeros + 0.5, zeros, ones, ones.bool())  # the ratio is e^0.5, clipped to 1.28
    assert loss.per_token(inputs).loss.item() == pytest.approx(-1.28)


def test_a_component_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def longest(completions, **_):\n    return [float(len(text)) for text in completions]\n")
    assert grpox.build("reward", f"{file}:longest")(completions=["ab", ""]) == [2.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("los", "dapo"), ("no such kind", "did you mean", "loss")),
        (("loss", "dap"), ("no loss called 'dap'", "dapo")),
        (("loss", "dapo", {"clip_lo": 0.1}), ("clip_lo", "clip_low")),
    ],
)
def test_a_mistake_is_refused_with_the_nearest_name(arguments: tuple[str, ...], facts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        grpox.build(*arguments)
    assert [fact for fact in facts if fact not in str(refused.value)] == []
