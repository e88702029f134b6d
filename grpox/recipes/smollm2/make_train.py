"""Make the SmolLM2 recipe's prompts: every sum of two digits, as a conversation with one worked example.

The example is there to give GRPO something to compare. Of 256 samples on 32 of these prompts (temperature 1,
24 tokens), 21 held one number and it was right, which gave 15 of the 32 groups of 8 both right and wrong
answers; without the example it was 3 samples and 3 groups.

    python -m grpox.recipes.smollm2.make_train
"""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path

EXAMPLES = ((4, 2), (3, 5), (6, 1))


def row(a: int, b: int, example: tuple[int, int]) -> dict[str, object]:
    """A conversational prompt that asks for a + b after the worked `example`."""
    x, y = example
    prompt = [
        {"role": "system", "content": "Answer with only the number."},
        {"role": "user", "content": f"{x} + {y} ="},
        {"role": "assistant", "content": str(x + y)},
        {"role": "user", "content": f"{a} + {b} ="},
    ]
    return {"prompt": prompt, "answer": str(a + b)}


def main() -> None:
    digits = range(10)
    # A question that is its own worked example could be copied.
    rows = [row(a, b, example) for a, b, example in product(digits, digits, EXAMPLES) if (a, b) != example]
    random.Random(0).shuffle(rows)
    path = Path(__file__).parent / "train.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
