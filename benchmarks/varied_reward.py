"""A reward that costs nothing, and that only some groups learn from: those whose prompts say so.

Named by path in the runs of vs_trl.py and scaling.py, and called by TRL as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def longer(completion_ids: Sequence[Sequence[int]], informative: Sequence[bool], **columns: Any) -> list[float]:
    """Tokens of each completion where its prompt is informative, else 0: all of such a group are equal."""
    return [float(len(ids)) if own else 0.0 for ids, own in zip(completion_ids, informative, strict=True)]
