"""Parameters of the built-in environments."""

from __future__ import annotations

from pydantic import Field

from grpox.config import Parameters


class LakeConfig(Parameters):
    """Parameters of lake."""

    size: int = Field(4, ge=2, le=10)
    """Rows and columns of the maps that are drawn; only for rows of the data without a column `map`."""
    holes: float = Field(0.25, ge=0, le=0.5)
    """Share of the cells of such maps that are holes. The goal can always be reached."""
    move_reward: float = Field(0.0, allow_inf_nan=False)
    """Reward of each turn, such as -0.02 for short ways; 0: turns have no rewards."""
    look: bool = False
    """Show a line more under the map: the cells up, down, left and right of the player, ``#`` outside."""
    hint: str = "Write up, down, left or right."
    """Line above the map after a turn that names no direction; empty: none."""


class CalculatorConfig(Parameters):
    """Parameters of calculator."""

    cost: float = Field(0.3, ge=0, allow_inf_nan=False)
    """Cost of each call, in units of the reward for the right answer."""


class GuessConfig(Parameters):
    """Parameters of guess."""

    highest: int = Field(31, ge=1)
    """Highest number; the lowest is 0."""
