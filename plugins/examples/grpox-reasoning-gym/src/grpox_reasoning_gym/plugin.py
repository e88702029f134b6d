"""Describe this plugin to grpox in strings, so that listing it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from grpox import ComponentSpec, hookimpl

REQUIRES = ("reasoning-gym>=0.1.25,<0.2",)
SOURCE = "https://arxiv.org/abs/2505.24760"


@hookimpl
def grpox_datasets() -> Iterable[ComponentSpec]:
    """The tasks."""
    yield ComponentSpec(
        name="reasoning-gym",
        target="grpox_reasoning_gym.rows:ReasoningGymSource",
        config="grpox_reasoning_gym.config:SourceConfig",
        summary="Generated rows of reasoning-gym's tasks, one or several by weight",
        requires=REQUIRES,
        source=SOURCE,
        api=1,
    )


@hookimpl
def grpox_rewards() -> Iterable[ComponentSpec]:
    """The scorers."""
    yield ComponentSpec(
        name="reasoning-gym",
        target="grpox_reasoning_gym.reward:ReasoningGymReward",
        config="grpox_reasoning_gym.config:RewardConfig",
        summary="The score that a row's own task gives the answer in a completion",
        requires=REQUIRES,
        formula="score_answer(answer of the completion, entry), 0 to 1; None for rows of other data",
        source=SOURCE,
        api=1,
    )
