"""Advantages of turns: gigpo and return-to-go."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import grpox
from grpox.contracts import AdvantageInputs, Turn

NAN = math.nan
Episode = tuple[str, float, Sequence[float | None]]
"""States, one letter a turn (``-``: unknown), the reward at the end, and the rewards of turns or none."""
each = pytest.mark.parametrize("name", ["gigpo", "return-to-go"])


def inputs_of(episodes: Sequence[Episode], groups: Sequence[int], **changes: Any) -> AdvantageInputs:
    """Episodes whose turns have two tokens of the model each, and one token of the environment after them."""
    turns = [
        tuple(
            Turn(3 * k, 3 * k + 2, "stop", 0, rewards[k] if rewards else None, None if state == "-" else state)
            for k, state in enumerate(states)
        )
        for states, _, rewards in episodes
    ]
    masks = [torch.tensor([True, True, False] * len(each))[:-1] for each in turns]
    fields: dict[str, Any] = {
        "rewards": torch.tensor([[reward] for _, reward, _ in episodes]),
        "weights": torch.ones(1),
        "group_ids": torch.tensor(groups),
        "prompt_ids": torch.tensor(groups),
        "lengths": torch.tensor([len(mask) for mask in masks]),
        "model_masks": masks,
        "columns": {},
        "step": 1,
        "turns": turns,
        "labels": ("environment",),
    }
    return AdvantageInputs(**(fields | changes))


def scale(name: str, inputs: AdvantageInputs, **parameters: Any) -> list[float]:
    """Return the advantages of all turns, one episode after the other."""
    advantages = grpox.build("advantage", name, parameters).scale(inputs)
    assert all(own.dtype == torch.float32 for own in advantages)
    assert [len(own) for own in advantages] == [len(turns) for turns in inputs.turns]
    return [value for own in advantages for value in own.tolist()]


# -- Numbers by hand ---------------------------------------------------------------------------------------

LAKE: list[Episode] = [("ab", 1.0, ()), ("ac", 0.0, ()), ("aab", 1.0, ())]
"""With gamma 1/2 the returns are 0.5, 1; 0, 0; 0.25, 0.5, 1."""


def test_gigpo_by_hand() -> None:
    # Episodes 1, 0, 1: mean 2/3. State a has the returns 0.5, 0, 0.25, 0.5, of mean 0.3125; b has 1, 1; c is
    # met once.
    fixed = scale("gigpo", inputs_of(LAKE, [0] * 3), gamma=0.5, norm="fixed")
    third = 1 / 3
    expected = [third + 0.1875, third, -2 * third - 0.3125, -2 * third, third - 0.0625, third + 0.1875, third]
    assert fixed == pytest.approx(expected)

    # Squares add up to 2/3 in episodes, and to 0.171875 in state a.
    episode, state = math.sqrt(2 / 9), math.sqrt(0.171875 / 4)
    scaled = scale("gigpo", inputs_of(LAKE, [0] * 3), gamma=0.5, omega=2.0, eps=0.0, ddof=0)
    steps = [0.1875, 0, -0.3125, 0, -0.0625, 0.1875, 0]
    episodes = [third, third, -2 * third, -2 * third, third, third, third]
    assert scaled == pytest.approx([e / episode + 2 * s / state for e, s in zip(episodes, steps, strict=True)])


def test_return_to_go_by_hand() -> None:
    # Episodes return 0.5, 0 and 0.25 from their first turns: mean 0.25, and squares that add up to 0.125.
    expected = [0.25, 0.75, -0.25, -0.25, 0.0, 0.25, 0.75]
    fixed = scale("return-to-go", inputs_of(LAKE, [0] * 3), gamma=0.5, norm="fixed")
    assert fixed == pytest.approx(expected)
    scaled = scale("return-to-go", inputs_of(LAKE, [0] * 3), gamma=0.5, eps=0.5)
    assert scaled == pytest.approx([value / (0.25 + 0.5) for value in expected])


def test_the_environments_rewards_of_turns_count_where_they_are_and_its_own_at_the_end() -> None:
    # Returns without discount: 1 + 0 + 2 = 3, then 2; and -1 + 3 = 2, then 3, 0. The baseline is 2.5.
    episodes: list[Episode] = [("aa", 2.0, (1.0, None)), ("aba", 0.0, (-1.0, 3.0, 0.0))]
    advantages = scale("return-to-go", inputs_of(episodes, [4, 4]), norm="fixed")
    assert advantages == pytest.approx([0.5, -0.5, -0.5, 0.5, -2.5])

    # State a has the returns 3, 2, 2, 0, of mean 1.75; b is met once. Episodes: 3 and 2.
    advantages = scale("gigpo", inputs_of(episodes, [4, 4]), norm="fixed", gamma=1.0)
    assert advantages == pytest.approx([0.5 + 1.25, 0.5 + 0.25, -0.5 + 0.25, -0.5, -0.5 - 1.75])


def test_a_list_of_rewards_counts_at_its_turns_by_weight_and_only_there() -> None:
    # Tokens 0 and 1 are the first turn, 2 is the environment's, 3 and 4 are the second turn. Weight 2 makes the
    # list's rewards 2 * (1 + 0.5) and 2 * 4, and the other function adds 10 and 20 at the end.
    listed = [torch.tensor([1.0, 0.0, 0.5, 0.0, 4.0]), torch.full((5,), NAN)]
    inputs = inputs_of(
        [("ab", 0.0, ()), ("ab", 0.0, ())],
        [0, 0],
        rewards=torch.tensor([[5.5, 10.0], [NAN, 20.0]]),
        weights=torch.tensor([2.0, 1.0]),
        labels=("steps", "end"),
        token_rewards={"steps": listed},
    )
    # 3 + 18 = 21, then 18; and 20, 20: the baseline is 20.5.
    assert scale("return-to-go", inputs, norm="fixed") == pytest.approx([0.5, -2.5, -0.5, -0.5])


def test_the_group_that_the_docs_work_by_hand() -> None:
    episodes: list[Episode] = [("ab", 1.0, ()), ("aab", 1.0, ()), ("ac", 0.0, ()), ("aa", 0.0, ())]
    inputs = inputs_of(episodes, [0] * 4)
    assert [round(a, 4) for a in scale("gigpo", inputs, gamma=0.5, norm="fixed")] == [
        *(0.7917, 0.5), *(0.5417, 0.7917, 0.5), *(-0.7083, -0.5), *(-0.7083, -0.7083),
    ]  # fmt: skip
    assert scale("return-to-go", inputs, gamma=0.5, norm="fixed") == [
        *(0.3125, 0.8125), *(0.0625, 0.3125, 0.8125), *(-0.1875, -0.1875), *(-0.1875, -0.1875),
    ]  # fmt: skip


# -- An independent reference --------------------------------------------------------------------------------


def drawn(seed: int) -> tuple[list[Episode], list[int]]:
    draw = random.Random(seed)
    episodes: list[Episode] = []
    for _ in range(14):
        states = "".join(draw.choices("abc-", k=draw.randint(1, 5)))
        reward = draw.choice([NAN, 0.0, 1.0, draw.randint(-8, 8) / 4])
        episodes.append((states, reward, [draw.choice([None, 0.5, -0.25]) for _ in states]))
    return episodes, [draw.choice([3, 8, -1]) for _ in episodes]


def returns_of(episode: Episode, gamma: float) -> list[float]:
    rewards = [reward or 0.0 for reward in episode[2]]
    rewards[-1] += episode[1]
    return [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


def standardised(value: float, among: Sequence[float]) -> float:
    if len(among) < 2 or max(among) - min(among) < 1e-9:
        return 0.0
    return (value - statistics.fmean(among)) / (statistics.stdev(among) + 1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_gigpo_is_the_papers_formula(seed: int) -> None:
    episodes, groups = drawn(seed)
    scored = [i for i, episode in enumerate(episodes) if not math.isnan(episode[1])]
    expected = []
    for i, (states, reward, _) in enumerate(episodes):
        totals = [returns_of(episodes[j], 1.0)[0] for j in scored if groups[j] == groups[i]]
        for k, state in enumerate(states):
            among = [
                returns_of(episodes[j], 0.95)[place]
                for j in scored
                if groups[j] == groups[i]
                for place, other in enumerate(episodes[j][0])
                if other == state != "-"
            ]
            own = standardised(returns_of(episodes[i], 1.0)[0], totals)
            own += 0.5 * standardised(returns_of(episodes[i], 0.95)[k], among)
            expected.append(0.0 if math.isnan(reward) else own)

    assert scale("gigpo", inputs_of(episodes, groups), omega=0.5) == pytest.approx(expected, abs=1e-5)


# -- Without turns, and what does not matter -----------------------------------------------------------------


@each
def test_completions_of_one_turn_have_the_advantage_of_group(name: str) -> None:
    rewards, groups = [0.0, 1.0, 0.5, 7.0, NAN, 7.5], [0, 0, 0, 1, 1, 1]
    inputs = inputs_of([("-", reward, ()) for reward in rewards], groups)
    expected = grpox.build("advantage", "group").scale(inputs.rewards, inputs.weights, inputs.group_ids)
    assert scale(name, inputs) == pytest.approx(expected.tolist())


@each
def test_equal_episodes_have_no_advantage(name: str) -> None:
    episodes: list[Episode] = [("ab", 0.3, (0.1, 0.2)), ("ab", 0.3, (0.1, 0.2)), ("ab", 0.3, (0.1, 0.2))]
    assert scale(name, inputs_of(episodes, [0] * 3)) == [0.0] * 6


# -- What is refused -------------------------------------------------------------------------------------------


def test_gigpo_refuses_turns_of_which_no_state_is_known() -> None:
    with pytest.raises(ValueError, match=r"gigpo .* no turn has a state_key; define state_key\(\)"):
        scale("gigpo", inputs_of([("--", 1.0, ()), ("-", 0.0, ())], [0, 0]))


def test_return_to_go_refuses_to_be_group_under_another_name() -> None:
    inputs = inputs_of(LAKE, [0] * 3)
    with pytest.raises(ValueError, match=r"gamma 1 needs rewards of turns.* turn_rewards\(\) .* 'group'"):
        scale("return-to-go", inputs)
    assert any(scale("return-to-go", inputs, gamma=0.9))


@each
def test_a_batch_of_lost_episodes_is_not_refused(name: str) -> None:
    assert scale(name, inputs_of([("--", NAN, ()), ("-", NAN, ())], [0, 0])) == [0.0] * 3
