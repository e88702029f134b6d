"""The built-in environments calculator, guess and lake, played by hand."""

import json
import math

import pytest
from pydantic import ValidationError

from grpox_environments.calculator import Calculator
from grpox_environments.configs import CalculatorConfig, GuessConfig, LakeConfig
from grpox_environments.guess import Guess
from grpox_environments.lake import HOLE, Lake, distances, draw_map, find

# -- Calculator ------------------------------------------------------------------------------------------


def calculator(prompt):
    environment = Calculator(CalculatorConfig(cost=0.25))
    environment.reset({"prompt": prompt}, 0)
    return environment


def turn(environment, text):
    """Give the environment a turn as the loop of episodes does."""
    calls = environment.parse(text)
    if not calls:
        assert environment.reply(text) is None
        return None
    (call,) = calls
    assert call.name == "add"
    return environment.add(**json.loads(call.arguments))


@pytest.mark.parametrize(
    ("prompt", "turns", "answers", "reward", "info"),
    [
        (
            "42+25=",
            ["67"],
            [None],
            {"right": 1, "calls": 0},
            {"success": True, "carries": False, "called": False, "calls_without_carry": False},
        ),
        (
            "37+68=",
            ["[37+68]", " [7+8] ", "105"],
            ["=105;", "=15;", None],
            {"right": 1, "calls": -0.5},
            {"success": True, "carries": True, "called": True},
        ),
        (
            "42+25=",
            ["[42+25]"],  # a needless call, and no answer
            ["=67;"],
            {"right": 0, "calls": -0.25},
            {"success": False, "carries": False, "called": True, "calls_without_carry": True},
        ),
    ],
)
def test_each_call_is_answered_and_costs(prompt, turns, answers, reward, info):
    environment = calculator(prompt)
    assert [turn(environment, text) for text in turns] == answers
    assert (environment.reward(), environment.info()) == (reward, info)


@pytest.mark.parametrize(
    "text", ["[37+68", "[37+68]105", "37+68", "[37-68]", "[3\u0667+68]", "[+68]", "95", ""]
)
def test_what_is_no_call_is_a_wrong_answer(text):
    environment = calculator("37+68=")
    assert turn(environment, text) is None
    assert environment.reward() == {"right": 0, "calls": 0}


@pytest.mark.parametrize(
    ("prompt", "carries"),
    [("37+62=", False), ("38+62=", True), ("95+7=", True), ("91+8=", False), ("50+50=", True)],
)
def test_a_sum_carries_where_two_digits_overflow(prompt, carries):
    assert calculator(prompt).carries is carries


def test_the_sum_ends_the_prompt_or_its_last_message():
    messages = [{"role": "system", "content": "Add. 1+1=2"}, {"role": "user", "content": "What is 37+68="}]
    environment = calculator(messages)
    turn(environment, "105")
    assert environment.success
    with pytest.raises(ValueError, match=r"the prompt is '3\*4=': it must end with a sum"):
        calculator("3*4=")


# -- Guess -----------------------------------------------------------------------------------------------


def guess(number):
    environment = Guess(GuessConfig(highest=31))
    environment.reset({"prompt": "guess", "number": number}, 0)
    return environment


def test_halving_finds_every_number_in_six_guesses():
    for number in range(32):
        environment = guess(number)
        while not environment.done and len(environment.gains) < 6:
            answer = environment.reply(str((environment.low + environment.high) // 2))
            assert answer in ("higher", "lower", "right")
        assert (environment.done, environment.reward(), answer) == (True, 1, "right")
        assert sum(environment.turn_rewards()) == pytest.approx(1)
        assert environment.info() == {"success": True, "guesses": len(environment.gains)}


def test_the_answer_is_where_the_number_lies_and_a_guess_that_is_ruled_out_finds_out_nothing():
    environment = guess(20)
    assert [environment.reply(text) for text in ("7", "24", "20")] == ["higher", "lower", "right"]
    # 32 numbers, then 8 to 31, then 8 to 23, then one.
    expected = [math.log2(32 / 24) / 5, math.log2(24 / 16) / 5, math.log2(16 / 1) / 5]
    assert environment.turn_rewards() == pytest.approx(expected)
    environment = guess(20)
    assert [environment.reply(text) for text in ("15", "3", "15")] == ["higher"] * 3
    assert environment.turn_rewards() == pytest.approx([0.2, 0, 0])
    assert (environment.state_key(), environment.reward(), environment.done) == ("16-31", 0, False)


@pytest.mark.parametrize("text", ["32", "-1", "", "7 8", "seven", "007", "²", "1" * 5000])
def test_a_turn_that_is_no_number_in_the_range_is_invalid(text):
    environment = guess(0)
    assert environment.reply(text) == "invalid"
    assert (environment.state_key(), environment.turn_rewards()) == ("0-31", [0])


@pytest.mark.parametrize("number", [None, -1, 32, "7", 7.0, True])
def test_a_number_out_of_the_range_is_refused(number):
    with pytest.raises(ValueError, match=r"column 'number' is .*: it must be a whole number from 0 to 31"):
        guess(number)


# -- Lake ------------------------------------------------------------------------------------------------

MAP = "@.O/..G/..."
VIEW = "@.O\n..G\n...\n"


def lake(text=MAP, **parameters):
    environment = Lake(LakeConfig(**parameters))
    view = environment.reset({"map": text}, 0)
    return environment, view


@pytest.mark.parametrize(
    ("moves", "views", "key", "success", "fell"),
    [
        (["down", "right", "right"], ["..O\n@.G\n...\n", "..O\n.@G\n...\n", None], "1,2", True, False),
        (["right", "right"], [".@O\n..G\n...\n", None], "0,2", False, True),
        (["down"], ["..O\n@.G\n...\n"], "1,0", False, False),  # cut off
        (["up", "left"], [VIEW, VIEW], "0,0", False, False),  # off the map
    ],
)
def test_a_walk_ends_at_the_goal_or_in_a_hole(moves, views, key, success, fell):
    environment, view = lake()
    assert (view, environment.state_key()) == (VIEW, "0,0")
    assert [environment.reply(move) for move in moves] == views
    assert (environment.state_key(), environment.done) == (key, success or fell)
    assert environment.reward() == float(success)
    assert environment.info() == {"success": success, "fell": fell, "moves": len(moves)}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("D", "1,0"),
        ("I go right, not left.", "0,1"),
        ("Right.", "0,1"),
        ("upright", "0,0"),
        ("downward", "0,0"),
        ("", "0,0"),
    ],
)
def test_the_first_word_that_is_a_direction_counts(text, key):
    environment, _ = lake()
    environment.reply(text)
    assert environment.state_key() == key


def test_a_turn_without_a_direction_gets_the_hint_and_counts_as_a_turn():
    environment, _ = lake(hint="Where to?", move_reward=-0.25)
    assert environment.reply("hm") == f"Where to?\n{VIEW}"
    assert environment.turn_rewards() == (-0.25,)
    environment.reply("down")
    assert environment.turn_rewards() == (-0.25,) * 2
    silent, _ = lake(hint="")
    assert silent.reply("hm") == VIEW
    assert silent.turn_rewards() == ()


def test_the_cells_beside_the_player_are_shown_if_asked_for():
    environment, view = lake(look=True)
    # Up and left of the corner is nothing; below and to the right is ice.
    assert view == f"{VIEW}#.#.\n"
    assert environment.reply("right") == ".@O\n..G\n...\n#..O\n"
    assert environment.reply("down") == "..O\n.@G\n...\n...G\n"


@pytest.mark.parametrize("text", ["@.O\n..G\n...", VIEW])
def test_rows_of_a_map_may_be_lines(text):
    assert lake(text)[1] == VIEW


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
def test_a_map_that_is_none_is_refused_by_name(text, what):
    with pytest.raises(ValueError, match=what) as caught:
        lake(text)
    assert f"column 'map' is {text!r}" in str(caught.value)


def test_equal_seeds_draw_equal_maps_and_others_others():
    views = [Lake(LakeConfig()).reset({}, seed) for seed in (1, 1, 2, 3)]
    assert views[0] == views[1]
    assert len(set(views)) == 3


@pytest.mark.parametrize(
    ("size", "holes", "count"), [(3, 0.25, 2), (4, 0.25, 4), (4, 0.5, 8), (2, 0.5, 2), (5, 0, 0)]
)
def test_a_drawn_map_has_its_size_its_holes_and_a_way(size, holes, count):
    for seed in range(20):
        rows = draw_map(size, holes, seed)
        assert [len(row) for row in rows] == [size] * size
        assert "".join(rows).count(HOLE) == count
        assert find(rows, "@") in distances(rows)


def test_distances_go_round_holes():
    # The way from the corner is down, right, right, up; the hole has no distance.
    assert distances(["@OG", "..."]) == {(0, 2): 0, (1, 2): 1, (1, 1): 2, (1, 0): 3, (0, 0): 4}
    assert (0, 0) not in distances(["@OG", "OO."])


@pytest.mark.parametrize(
    "parameters", [{"size": 1}, {"holes": 0.6}, {"move_reward": float("nan")}, {"slippery": 1}]
)
def test_parameters_that_are_refused(parameters):
    with pytest.raises(ValidationError):
        LakeConfig(**parameters)
