"""The guessing game: a number is found by guesses that are answered "higher", "lower" and "right"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpox.environments import Environment
from grpox_environments.configs import GuessConfig


class Guess(Environment):
    """The row's column `number` is to be guessed. Each turn of the model is a guess.

    The answer is where the number lies: ``higher`` or ``lower``; after ``right`` the game is over. A turn that
    is no number in the range is answered ``invalid``. The number of guesses is `episodes.max_turns`.
    """

    example_rows = ({"prompt": "guess", "number": 20},)
    example_turns = ("15", "7 8", "24")

    def __init__(self, config: GuessConfig) -> None:
        self.config = config
        self.number = 0
        self.low, self.high = 0, config.highest
        self.gains: list[float] = []

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Read the number.

        Raises:
            ValueError: it is none in the range.
        """
        number = row.get("number")
        if type(number) is not int or not 0 <= number <= self.config.highest:
            allowed = f"it must be a whole number from 0 to {self.config.highest}"
            raise ValueError(f"column 'number' is {number!r}: {allowed}")
        self.number = number

    def reply(self, text: str) -> str:
        """Answer a guess."""
        before, guess = self.high - self.low + 1, read_guess(text, self.config.highest)
        answer = "invalid"
        if guess is not None:
            answer = self._compare(guess)
        self.gains.append(math.log2(before / (self.high - self.low + 1)))
        return answer

    def reward(self) -> float:
        """Return 1 if the number was found, else 0."""
        return float(self.done)

    def turn_rewards(self) -> Sequence[float]:
        """Return what each guess has found out, as a part of what finding the number takes.

        It is log2(n / m) / log2(N), if n of the N numbers were possible before the guess and m are after it.
        The rewards of a game that finds the number have the sum 1.
        """
        return [gain / math.log2(self.config.highest + 1) for gain in self.gains]

    def state_key(self) -> str:
        """Return the lowest and highest possible number."""
        return f"{self.low}-{self.high}"

    def info(self) -> Mapping[str, Any]:
        """Return success and the number of guesses."""
        return {"success": self.done, "guesses": len(self.gains)}

    def _compare(self, guess: int) -> str:
        """Compare a guess with the number, and narrow down the possible numbers."""
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return "higher"
        if guess > self.number:
            self.high = min(self.high, guess - 1)
            return "lower"
        self.low = self.high = guess
        self.done = True
        return "right"


def read_guess(text: str, highest: int) -> int | None:
    """Read a number from 0 to `highest`; None for another text."""
    digits = text.strip()
    valid = digits.isascii() and digits.isdigit() and len(digits) <= len(str(highest))
    return int(digits) if valid and int(digits) <= highest else None
