"""The environments calculator and guess, played by hand."""

from __future__ import annotations

import json
import math

import pytest

from grpox_environments.calculator import Calculator
from grpox_environments.configs import CalculatorConfig, GuessConfig
from grpox_environments.guess import Guess


def calculator(prompt: object, cost: float = 0.25) -> Calculator:
    environment = Calculator(CalculatorConfig(cost=cost))
    environment.reset({"prompt": prompt}, 0)
    return environment


def turn(environment: Calculator, text: str) -> str | None:
    """Give the environment a turn as the loop of episodes does."""
    calls = environment.parse(text)
    if not calls:
        assert environment.reply(text) is None
        return None
    (call,) = calls
    assert call.name == "add"
    return environment.add(**json.loads(call.arguments))


def guess(number: int, highest: int = 31) -> Guess:
    environment = Guess(GuessConfig(highest=highest))
    environment.reset({"prompt": "guess", "number": number}, 0)
    return environment


def test_the_answer_alone_earns_the_whole_reward() -> None:
    environment = calculator("42+25=")
    assert turn(environment, "67") is None
    assert environment.reward() == {"right": 1, "calls": 0}
    assert environment.info() == {
        "success": True,
        "carries": False,
        "called": False,
        "calls_without_carry": False,
    }


def test_each_call_is_answered_and_costs() -> None:
    environment = calculator("37+68=")
    assert [turn(environment, text) for text in ("[37+68]", " [7+8] ", "105")] == ["=105;", "=15;", None]
    assert environment.reward() == {"right": 1, "calls": -0.5}
    assert environment.info() == {"success": True, "carries": True, "called": True}


def test_a_needless_call_is_told() -> None:
    environment = calculator("42+25=")
    turn(environment, "[42+25]")
    assert environment.info() == {
        "success": False,
        "carries": False,
        "called": True,
        "calls_without_carry": True,
    }
    assert environment.reward() == {"right": 0, "calls": -0.25}


@pytest.mark.parametrize(
    "text", ["[37+68", "[37+68]105", "37+68", "[37-68]", "[3\u0667+68]", "[+68]", "95", ""]
)
def test_what_is_no_call_is_a_wrong_answer(text: str) -> None:
    environment = calculator("37+68=")
    assert turn(environment, text) is None
    assert environment.reward() == {"right": 0, "calls": 0}


@pytest.mark.parametrize(
    ("prompt", "carries"),
    [("37+62=", False), ("38+62=", True), ("95+7=", True), ("91+8=", False), ("9+0=", False), ("50+50=", True)],
)
def test_a_sum_carries_where_two_digits_overflow(prompt: str, carries: bool) -> None:
    assert calculator(prompt).carries is carries


def test_the_sum_may_end_a_message() -> None:
    messages = [{"role": "system", "content": "Add. 1+1=2"}, {"role": "user", "content": "What is 37+68="}]
    environment = calculator(messages)
    turn(environment, "105")
    assert environment.success


def test_a_prompt_without_a_sum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the prompt is '3\*4=': it must end with a sum, such as '37\+68='"):
        calculator("3*4=")


def test_halving_finds_every_number_in_six_guesses() -> None:
    for number in range(32):
        environment = guess(number)
        for _ in range(6):
            answer = environment.reply(str((environment.low + environment.high) // 2))
            if environment.done:
                break
            assert answer in ("higher", "lower")
        assert (environment.done, environment.reward(), answer) == (True, 1, "right")
        assert sum(environment.turn_rewards()) == pytest.approx(1)
        assert environment.info() == {"success": True, "guesses": len(environment.gains)}


def test_the_answer_is_where_the_number_lies() -> None:
    environment = guess(20)
    assert [environment.reply(text) for text in ("7", "24", "20")] == ["higher", "lower", "right"]
    # 32 numbers, then 8 to 31, then 8 to 23, then one.
    expected = [math.log2(32 / 24) / 5, math.log2(24 / 16) / 5, math.log2(16 / 1) / 5]
    assert environment.turn_rewards() == pytest.approx(expected)


def test_a_guess_that_is_already_ruled_out_finds_out_nothing() -> None:
    environment = guess(20)
    assert [environment.reply(text) for text in ("15", "3", "15")] == ["higher"] * 3
    assert environment.turn_rewards() == pytest.approx([0.2, 0, 0])
    assert environment.state_key() == "16-31"
    assert (environment.reward(), environment.done) == (0, False)


@pytest.mark.parametrize("text", ["32", "-1", "", "7 8", "seven", "007", "²", "1" * 5000])
def test_a_turn_that_is_no_number_in_the_range_is_invalid(text: str) -> None:
    environment = guess(0)
    assert environment.reply(text) == "invalid"
    assert (environment.state_key(), environment.turn_rewards()) == ("0-31", [0])


@pytest.mark.parametrize("number", [None, -1, 32, "7", 7.0, True])
def test_a_number_out_of_the_range_is_refused(number: object) -> None:
    with pytest.raises(ValueError, match=r"column 'number' is .*: it must be a whole number from 0 to 31"):
        guess(number)  # type: ignore[arg-type]
