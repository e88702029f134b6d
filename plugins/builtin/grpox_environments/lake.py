"""A frozen lake in text: from the start to the goal, one move a turn, around the holes."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from grpox.environments import Environment
from grpox_environments.configs import LakeConfig

PLAYER, ICE, HOLE, GOAL, OUTSIDE = "@", ".", "O", "G", "#"
Cell = tuple[int, int]
MOVES: Mapping[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


class Lake(Environment):
    """A map of ``@`` (the player), ``.`` (ice), ``O`` (a hole) and ``G`` (the goal).

    A turn of the model is a direction, or its first letter: the first such word counts. A step off the map
    leaves the player where it is, and so does a turn without a direction. The episode ends in a hole with
    reward 0, or at the goal with reward 1. The ice is not slippery: equal moves have equal results.

    The map is the row's column `map`, its rows separated by ``/`` or line ends. Without that column it is drawn
    from the seed, which a group's completions share.
    """

    WORD: ClassVar[re.Pattern[str]] = re.compile(r"\b(up|down|left|right|[udlr])\b", re.IGNORECASE)

    def __init__(self, config: LakeConfig) -> None:
        self.config = config
        self.turns = 0
        self.player: Cell = (0, 0)
        self.rows: list[str] = []

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Return the map.

        Raises:
            ValueError: the row's map is no rectangle of the four characters with one player and one goal.
        """
        text = row.get("map")
        rows = draw_map(self.config.size, self.config.holes, seed) if text is None else read_map(text)
        self.player = find(rows, PLAYER)
        self.rows = [line.replace(PLAYER, ICE) for line in rows]
        return self.view()

    def reply(self, text: str) -> str | None:
        """Move the player and return the map; None at the goal and in a hole."""
        self.turns += 1
        word = self.WORD.search(text)
        if not word:
            return f"{self.config.hint}\n{self.view()}" if self.config.hint else self.view()
        self.player = moved(self.rows, self.player, direction(word.group()))
        self.done = self.cell != ICE
        return None if self.done else self.view()

    def reward(self) -> float:
        """Return 1 at the goal, else 0."""
        return float(self.cell == GOAL)

    def turn_rewards(self) -> Sequence[float]:
        """Return `move_reward` for each turn."""
        return (self.config.move_reward,) * self.turns if self.config.move_reward else ()

    def state_key(self) -> str:
        """Return the player's cell, as row and column."""
        return f"{self.player[0]},{self.player[1]}"

    def info(self) -> Mapping[str, Any]:
        """Return success, whether the player fell into a hole, and the number of turns."""
        return {"success": self.cell == GOAL, "fell": self.cell == HOLE, "moves": self.turns}

    @property
    def cell(self) -> str:
        """Return the character under the player."""
        return self.rows[self.player[0]][self.player[1]]

    def view(self) -> str:
        """Draw the map with the player, a line each row, and the cells beside the player if they are shown."""
        lines = list(self.rows)
        row, column = self.player
        lines[row] = lines[row][:column] + PLAYER + lines[row][column + 1 :]
        if self.config.look:
            lines.append("".join(self._beside(way) for way in MOVES))
        return "".join(f"{line}\n" for line in lines)

    def _beside(self, way: str) -> str:
        row, column = moved(self.rows, self.player, way)
        return OUTSIDE if (row, column) == self.player else self.rows[row][column]


def direction(word: str) -> str:
    """Return the direction that a word or its first letter names."""
    return next(name for name in MOVES if name[0] == word[0].lower())


def moved(rows: Sequence[str], cell: Cell, way: str) -> Cell:
    """Return the neighbour of a cell; the cell itself at the edge of the map."""
    row, column = cell[0] + MOVES[way][0], cell[1] + MOVES[way][1]
    return (row, column) if 0 <= row < len(rows) and 0 <= column < len(rows[0]) else cell


def find(rows: Sequence[str], character: str) -> Cell:
    """Return the first cell that holds a character."""
    return next((row, line.index(character)) for row, line in enumerate(rows) if character in line)


def read_map(text: Any) -> list[str]:
    """Read a map as text.

    Raises:
        ValueError: it is none, as `Lake` describes it.
    """
    rows = re.split(r"[/\n]", text.strip()) if isinstance(text, str) else []
    joined = "".join(rows)
    if not rows or len({len(line) for line in rows}) != 1:
        raise ValueError(f"column 'map' is {text!r}: it is rows of equal length, separated by / or line ends")
    if strange := sorted(set(joined) - {PLAYER, ICE, HOLE, GOAL}):
        raise ValueError(f"column 'map' is {text!r}, with {strange[0]!r}: its cells are @ . O G")
    if joined.count(PLAYER) != 1 or joined.count(GOAL) != 1:
        raise ValueError(f"column 'map' is {text!r}: it has one @ and one G")
    return rows


def draw_map(size: int, holes: float, seed: int) -> list[str]:
    """Draw a map on which the goal can be reached, other than by chance: equal seeds give equal maps."""
    draw = random.Random(seed)
    cells = [ICE] * (size * size - 2)
    cells[: round(holes * size * size)] = [HOLE] * round(holes * size * size)
    cells += [PLAYER, GOAL]
    while True:
        draw.shuffle(cells)
        rows = ["".join(cells[start : start + size]) for start in range(0, size * size, size)]
        if distances(rows).get(find(rows, PLAYER)):
            return rows


def distances(rows: Sequence[str]) -> dict[Cell, int]:
    """Return the fewest moves to the goal from each cell from which it can be reached without a hole."""
    goal = find(rows, GOAL)
    moves, edge = {goal: 0}, [goal]
    while edge:
        cell = edge.pop(0)
        for way in MOVES:
            near = moved(rows, cell, way)
            if near not in moves and rows[near[0]][near[1]] != HOLE:
                moves[near] = moves[cell] + 1
                edge.append(near)
    return moves
