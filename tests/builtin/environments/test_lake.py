"""The environment lake: moves on maps worked by hand, what it tells of an episode, and maps that it draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from grpox_environments.configs import LakeConfig
from grpox_environments.lake import HOLE, Lake, distances, draw_map, find

MAP = "@.O/..G/..."


def lake(text: str = MAP, **parameters: Any) -> Lake:
    environment = Lake(LakeConfig(**parameters))
    environment.reset({"map": text}, 0)
    return environment


def play(environment: Lake, moves: Sequence[str]) -> list[str | None]:
    return [environment.reply(move) for move in moves]


def test_a_walk_to_the_goal() -> None:
    environment = Lake(LakeConfig())
    assert environment.reset({"map": MAP}, 0) == "@.O\n..G\n...\n"
    assert environment.state_key() == "0,0"
    assert environment.reply("down") == "..O\n@.G\n...\n"
    assert environment.reply("right") == "..O\n.@G\n...\n"
    assert (environment.state_key(), environment.done, environment.reward()) == ("1,1", False, 0.0)

    assert environment.reply("right") is None

    assert (environment.done, environment.reward()) == (True, 1.0)
    assert environment.info() == {"success": True, "fell": False, "moves": 3}


def test_a_fall() -> None:
    environment = lake()
    assert play(environment, ["right", "right"]) == [".@O\n..G\n...\n", None]
    assert (environment.done, environment.reward()) == (True, 0.0)
    assert environment.info() == {"success": False, "fell": True, "moves": 2}


def test_an_episode_that_is_cut_off_is_no_success() -> None:
    environment = lake()
    play(environment, ["down"])
    assert environment.info() == {"success": False, "fell": False, "moves": 1}
    assert environment.reward() == 0.0


@pytest.mark.parametrize("wall", ["up", "left"])
def test_a_step_off_the_map_stays_and_is_the_same_state(wall: str) -> None:
    environment = lake()
    assert environment.reply(wall) == "@.O\n..G\n...\n"
    assert (environment.state_key(), environment.done) == ("0,0", False)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("down", "1,0"),
        ("D", "1,0"),
        ("I go right, not left.", "0,1"),
        ("Right.", "0,1"),
        ("r", "0,1"),
        ("upright", "0,0"),
        ("downward", "0,0"),
        ("", "0,0"),
    ],
)
def test_the_first_word_that_is_a_direction_counts(text: str, key: str) -> None:
    environment = lake()
    environment.reply(text)
    assert environment.state_key() == key


def test_a_turn_without_a_direction_gets_the_hint_and_counts_as_a_turn() -> None:
    environment = lake(hint="Where to?", move_reward=-0.25)
    assert environment.reply("hm") == "Where to?\n@.O\n..G\n...\n"
    assert lake(hint="").reply("hm") == "@.O\n..G\n...\n"
    assert environment.turn_rewards() == (-0.25,)


def test_turns_have_rewards_if_asked_for() -> None:
    environment = lake(move_reward=-0.125)
    play(environment, ["down", "right", "right"])
    assert environment.turn_rewards() == (-0.125,) * 3
    environment = lake()
    play(environment, ["down"])
    assert environment.turn_rewards() == ()


def test_the_cells_beside_the_player_are_shown_if_asked_for() -> None:
    environment = Lake(LakeConfig(look=True))
    # Up and left of the corner is nothing; below and to the right is ice.
    assert environment.reset({"map": MAP}, 0) == "@.O\n..G\n...\n#.#.\n"
    assert environment.reply("right") == ".@O\n..G\n...\n#..O\n"
    assert environment.reply("down") == "..O\n.@G\n...\n...G\n"


@pytest.mark.parametrize("text", ["@.O\n..G\n...", "@.O\n..G\n...\n"])
def test_rows_of_a_map_may_be_lines(text: str) -> None:
    assert Lake(LakeConfig()).reset({"map": text}, 0) == "@.O\n..G\n...\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("@.G/..", "rows of equal length"),
        ("", "one @ and one G"),
        (7, "rows of equal length"),
        ("@H/.G", "'H': its cells are @ . O G"),
        ("@@/.G", "one @ and one G"),
        ("@./..", "one @ and one G"),
    ],
)
def test_a_map_that_is_none_is_refused_by_name(text: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what) as caught:
        Lake(LakeConfig()).reset({"map": text}, 0)
    assert f"column 'map' is {text!r}" in str(caught.value)


# -- Maps that are drawn ---------------------------------------------------------------------------------


def test_equal_seeds_draw_equal_maps_and_others_others() -> None:
    views = [Lake(LakeConfig()).reset({}, seed) for seed in (1, 1, 2, 3)]
    assert views[0] == views[1]
    assert len(set(views)) == 3


@pytest.mark.parametrize(
    ("size", "holes", "count"), [(3, 0.25, 2), (4, 0.25, 4), (4, 0.5, 8), (2, 0.5, 2), (5, 0, 0)]
)
def test_a_drawn_map_has_its_size_its_holes_and_a_way(size: int, holes: float, count: int) -> None:
    for seed in range(20):
        rows = draw_map(size, holes, seed)
        assert [len(row) for row in rows] == [size] * size
        assert "".join(rows).count(HOLE) == count
        assert find(rows, "@") in distances(rows)


def test_distances_go_round_holes() -> None:
    # The way from the corner is down, right, right, up; the hole has no distance.
    assert distances(["@OG", "..."]) == {(0, 2): 0, (1, 2): 1, (1, 1): 2, (1, 0): 3, (0, 0): 4}
    assert (0, 0) not in distances(["@OG", "OO."])


@pytest.mark.parametrize(
    "parameters", [{"size": 1}, {"holes": 0.6}, {"move_reward": float("nan")}, {"slippery": 1}]
)
def test_parameters_that_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LakeConfig(**parameters)
