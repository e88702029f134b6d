"""grpox's side of vs_trl.py: one run, then the seconds of each step and phase, and the rewards.

Usage: vs_trl_grpox.py OUT.json RUN [a.b=c ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from varied_run import is_varied, lengths_of

from grpox.runfile.load import load_run
from grpox.runtime import launch
from grpox.training import trainer
from grpox.training.run import train_run


def main(out: str, source: str, overrides: list[str]) -> None:
    run = load_run(source, overrides)
    if is_varied(run):
        from forced_lengths import force_in_hf, force_in_vllm

        in_vllm = (run.config.generator.name or "").startswith("vllm")
        force = force_in_vllm if in_vllm else force_in_hf
        force(lengths_of(run, launch.rank(), launch.world_size()))
        # A forced end has another log-probability than the policy gives it.
        trainer.first_step_measures = lambda *_: {}
    train_run(run)
    if launch.rank():
        return
    lines = (Path(run.config.output_dir) / "metrics.jsonl").read_text().splitlines()
    steps = [record["metrics"] for record in map(json.loads, lines) if "metrics" in record]
    # A batch that serves several steps is sampled before the first of them, which alone tells of it.
    sampled = [step for step in steps if "reward" in step]
    figures = {
        "step": [step["step_time"] for step in steps],
        # The weights' way to the generator is part of generating.
        "generate": [step["time/generate"] + step["time/sync"] for step in sampled],
        "reward": [step["time/reward"] for step in sampled],
        "update": [step["time/update"] for step in steps],
        "rewards": [step["reward"] for step in sampled],
        "mean_length": [step["completions/mean_length"] for step in sampled],
        "uninformative": [step["frac_reward_zero_std"] for step in sampled],
        "peak_gib": [max(step["memory/peak_gib"] for step in steps)],
        "samples": [run.plan.train_batch_size],
    }
    Path(out).write_text(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
