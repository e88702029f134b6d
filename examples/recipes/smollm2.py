"""Make the SmolLM2 recipe's problems: reasoning-gym's chain_sum of two one-digit terms, each problem once.

pip install reasoning-gym
python examples/recipes/smollm2.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import reasoning_gym

RECIPE = Path(__file__).parents[2] / "grpox/runfile/recipes/smollm2"
NUM_HELDOUT = 40
DRAWN = 5000  # far more than there are problems (100 sums and 100 differences), so that none is missed


def row(question: str, answer: str) -> dict[str, object]:
    """Return a conversational prompt with the answer for the reward."""
    prompt = [
        {"role": "system", "content": "Answer with only the number."},
        {"role": "user", "content": question},
    ]
    return {"prompt": prompt, "answer": answer}


def main() -> None:
    terms = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    drawn = reasoning_gym.create_dataset("chain_sum", size=DRAWN, seed=0, **terms)
    answers = {item["question"]: item["answer"] for item in drawn}
    rows = [row(question, answers[question]) for question in sorted(answers)]
    random.Random(0).shuffle(rows)
    for name, part in (("heldout", rows[:NUM_HELDOUT]), ("train", rows[NUM_HELDOUT:])):
        path = RECIPE / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in part), encoding="utf-8")
        print(f"{path}: {len(part)} problems")


if __name__ == "__main__":
    main()
