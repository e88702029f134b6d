"""Columns that data cannot have, since nothing would ever read them."""

from __future__ import annotations

from collections.abc import Iterable

from grpox.data.media import CURE, media_columns
from grpox.errors import Problem

REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""Arguments that the core itself passes to a reward function; all others are columns of the data."""


def unusable_columns(columns: Iterable[str], prompt_column: str, data: str, key: str) -> list[Problem]:
    """A problem for each column of what is no text, or with the name of an argument that rewards are given.

    Args:
        prompt_column: the one that may have an argument's name, since functions see it as `prompts`.
        data: what messages call the data.
        key: of the run file, named in the problems.
    """
    columns = list(columns)
    media = f"{data} has a column of what is no text, which is not read"
    taken = f"{data} has a column with the name of an argument that grpox itself gives to reward functions"
    renamed = "any other name: rename the column"
    return [
        *(Problem(media, key, given=name, allowed=CURE) for name in media_columns(columns)),
        *(
            Problem(taken, key, given=name, allowed=renamed)
            for name in columns
            if name in REWARD_ARGUMENTS and name != prompt_column
        ),
    ]
