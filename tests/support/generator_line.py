"""A run file in which the line of the generator is all that differs, and what every run of it must learn."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

RECIPE = resources.files("grpox.runfile.recipes") / "quickstart"


def run_file(generator: str, output: str) -> str:
    """Return the text of a run file: 25 steps of the quickstart's task.

    Args:
        generator: as YAML.
        output: its output folder.
    """
    return f"""
model: {{path: {RECIPE / "model"}}}
data: {{path: {RECIPE / "train.jsonl"}}}
generator: {generator}
rewards: [exact]
train: {{max_steps: 25, num_generations: 16, per_device_train_batch_size: 256, learning_rate: 2.0e-4}}
sampling: {{max_completion_length: 4}}
output_dir: {output}
tracking: {{}}
"""


def assert_learned(run: Path, correction: str) -> None:
    """See that the reward has risen, that the sampler agreed with the policy, and which correction was on."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["metrics"] for line in lines]
    assert len(steps) == 25
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.2
    assert all(step["sampling/difference_max"] < 1e-4 for step in steps)
    assert f"correction:\n  name: {correction}" in (run / "config.yaml").read_text()
