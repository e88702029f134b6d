"""Rollouts whose masks, log-probabilities, versions or turns do not fit their tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpox.contracts import Rollout, Turn
from grpox.testing.conformance import Violation
from grpox.testing.generators import check_rollout

SOUND = Rollout(0, 0, (5, 6), (7, 8, 2), "stop", 3, (-0.1, -0.2, -0.3))
TURNS = (Turn(0, 1, "stop", 2), Turn(2, 3, "stop", 3))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sampler_logprobs": None},
        {"model_mask": (True, False, True), "turns": TURNS},
        {"model_mask": (True, False, True), "sampler_logprobs": (-0.1, 0.5, -0.3)},  # no one's token
    ],
)
def test_a_sound_rollout_passes(changes: dict[str, object]) -> None:
    check_rollout(replace(SOUND, **changes), version=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_mask": (True, True)}, "model_mask has 2 values for 3 completion tokens"),
        ({"sampler_logprobs": (-0.1,)}, "sampler_logprobs has 1 values for 3"),
        ({"turns": (Turn(0, 4, "stop", 3),)}, "turn 0 is tokens 0 to 4"),
        ({"turns": (Turn(0, 2, "stop", 3), Turn(1, 3, "stop", 3))}, "turn 1 is tokens 1 to 3, after token 2"),
        ({"turns": (Turn(1, 1, "stop", 3),)}, "turn 0 is tokens 1 to 1"),
        ({"completion_ids": (), "sampler_logprobs": ()}, "completion_ids is empty"),
        ({"model_mask": (False, False, False)}, "is False for every token"),
        ({"model_mask": (True, True, False)}, "leaves out the EOS"),
        ({"sampler_logprobs": (-0.1, 0.2, -0.3)}, "log-probability that is none"),
        ({"sampler_logprobs": (-0.1, float("nan"), -0.3)}, "log-probability that is none"),
        ({"policy_version": 2}, "after a sync of version 3 a rollout is of version 2"),
        ({"turns": TURNS}, "model_mask is True at token 1, which is in no turn"),
        ({"turns": (Turn(0, 3, "stop", 4),)}, r"turns of versions \[4\]"),
        ({"turns": (Turn(0, 3, "length", 3),)}, "the last turn ended by 'length'"),
    ],
)
def test_a_field_that_does_not_fit_is_a_violation(changes: dict[str, object], message: str) -> None:
    with pytest.raises(Violation, match=message):
        check_rollout(replace(SOUND, **changes), version=3)  # type: ignore[arg-type]
