"""Cost of a call of a reward function in a separate process, compared with a thread.

Each call has 256 completions of about 1,000 characters and 256 tokens, with prompt and answer of the same
length.
"""

from __future__ import annotations

import json
import pickle
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from surroundings import surroundings

from grpox.contracts import TrainerState
from grpox.plugins.load_object import load_object
from grpox.rollout.rewards.messages import RewardSpec
from grpox.rollout.rewards.named import NamedReward, call_together
from grpox.rollout.rewards.process import RewardProcess

CALLS = 50
COMPLETIONS = 256
FUNCTION = """
def right(completions, answer, **kwargs):
    return [float(text == wanted) for text, wanted in zip(completions, answer)]
"""
TEXT = "A completion of a length that is usual in training. " * 20


def milliseconds(function: Any) -> list[float]:
    """The time of each call, the first left out."""
    reward = NamedReward("right", function)
    texts = [f"{TEXT}{n}" for n in range(COMPLETIONS)]
    arguments = {
        "prompts": texts,
        "completions": texts,
        "completion_ids": [[n + token for token in range(256)] for n in range(COMPLETIONS)],
        "answer": texts,
        "trainer_state": TrainerState(1, 2, 0.5),
    }
    times = []
    for _ in range(CALLS + 1):
        begun = time.perf_counter()
        call_together([reward], arguments, COMPLETIONS)
        times.append(1000 * (time.perf_counter() - begun))
    return times[1:]


def main() -> None:
    """Measure both, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "right.py")
        file.write_text(FUNCTION)
        begun = time.perf_counter()
        target = f"{file}:right"
        plan = RewardSpec("right", "rewards[0]", target, True, pickle.dumps(None), tuple(sys.path), None)
        process = RewardProcess(plan, 60.0, 16.0)
        assert process.ready
        figures: dict[str, Any] = {"start_ms": 1000 * (time.perf_counter() - begun)}
        print(f"a process is ready after {figures['start_ms']:.0f} ms")
        for where, function in (("thread", load_object(target)), ("process", process)):
            times = milliseconds(function)
            figures[f"{where}_ms"] = statistics.median(times)
            print(f"{where:8} median {statistics.median(times):6.2f} ms, most {max(times):6.2f} ms")
        process.close()
    print(json.dumps(figures | surroundings([])))


if __name__ == "__main__":
    main()
