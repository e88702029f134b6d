"""Losses and batches of the steps, for the scripts and for their tests, which need no torch to name them."""

from __future__ import annotations

STEPS = [
    ("grpo", 0.0),
    ("dr_grpo", 0.0),
    ("dapo", 0.1),
    ("bnpo", 0.0),
    ("cispo", 0.0),
    ("sapo", 0.1),
]
"""(loss, beta) of each step; every step starts from the same weights."""

ROWS = 4
"""Rows of a micro-batch that teaches nothing."""
MicroBatch = tuple[list[int], list[float], bool]
"""Lengths of the completions, their advantages, and true where all of them were cut off."""
Case = tuple[MicroBatch, MicroBatch]
"""Two micro-batches: of one rank, or one of each of two."""

NO_TOKEN: MicroBatch = ([0] * ROWS, [1.0, -1, 1, -1], False)
CUT_OFF: MicroBatch = ([4] * ROWS, [1.0, -1, 1, -1], True)
NO_ADVANTAGE: MicroBatch = ([1, 2, 3, 4], [0.0] * ROWS, False)
ONE_TOKEN: MicroBatch = ([1] * ROWS, [0.0] * ROWS, False)

EMPTY: dict[str, Case] = {
    "completions all empty": (NO_TOKEN, NO_TOKEN),
    "completions all truncated": (CUT_OFF, CUT_OFF),
}
"""Cases without a token in the loss."""
CASES: dict[str, Case] = EMPTY | {
    "advantages all zero": (NO_ADVANTAGE, NO_ADVANTAGE),
    "one token a completion": (ONE_TOKEN, ONE_TOKEN),
    "one micro-batch empty": (NO_TOKEN, NO_ADVANTAGE),
}
