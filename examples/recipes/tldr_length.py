"""Make the posts that the recipe's model summarises: short stories of everyday trouble, ending in "TL;DR:".

python examples/recipes/tldr_length.py
"""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path

RECIPE = Path(__file__).parents[2] / "grpox/runfile/recipes/tldr-length"
SUBJECTS = (
    ("my flatmate", "cooks fish at midnight", "the whole kitchen smells until noon"),
    ("my brother", "borrows my car every weekend", "the tank is always empty on Monday"),
    ("the neighbour upstairs", "practises the trumpet at six in the morning", "nobody in the house sleeps"),
    ("my manager", "moves our deadlines without telling us", "we learn of it in front of the client"),
    ("my best friend", "cancels our plans an hour before", "I have paid for the tickets twice now"),
    ("our new puppy", "chews every shoe it can find", "I went to work in slippers"),
    ("my sister", "tells our parents everything I say", "family dinners have become awkward"),
    ("a colleague", "presents my ideas as his own", "he was praised for my report last week"),
)
ATTEMPTS = (
    "I asked politely and was laughed at.",
    "I left a friendly note, which vanished.",
    "I tried to ignore it for three months.",
    "I offered to pay for a solution, without an answer.",
)
QUESTIONS = (
    "Should I speak up again or let it go?",
    "How do I bring this up without a fight?",
)


def post(subject: tuple[str, str, str], attempt: str, question: str) -> str:
    who, does, effect = subject
    story = f"For weeks now {who} {does}, and {effect}. {attempt} {question}"
    return f"SUBREDDIT: r/advice\n\nTITLE: {who.capitalize()} {does}\n\nPOST: {story}\n\nTL;DR:"


def main() -> None:
    rows = [{"prompt": post(*parts)} for parts in product(SUBJECTS, ATTEMPTS, QUESTIONS)]
    random.Random(0).shuffle(rows)
    path = RECIPE / "train.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} posts")


if __name__ == "__main__":
    main()
