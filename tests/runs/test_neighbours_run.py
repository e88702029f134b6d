"""Runs of models whose forward pass depends on the longest sequence of a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.architectures import tiny_model
from support.killing import finish
from support.run_files import metrics_of
from transformers import AutoTokenizer

TOKENIZER = Path(__file__).parents[2] / "grpox" / "runfile" / "recipes" / "quickstart" / "model"
LONGROPE = {
    "type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1.0 + place for place in range(16)]
}  # fmt: skip
RUN = """
model: {{path: {model}}}
data: {{path: data.jsonl, max_prompt_length: {prompt}}}
rewards: [exact]
train: {{max_steps: 2, learning_rate: 1.0e-9, per_device_train_batch_size: 8, num_generations: 4, beta: 0.1}}
sampling: {{max_completion_length: 24}}
evaluation: {{path: data.jsonl}}
checkpoint: {{every: 1}}
tracking: {{}}
output_dir: runs/{name}
"""


@pytest.fixture(scope="module", autouse=True)
def inputs(folder: Path) -> None:
    models = {
        "phi3": tiny_model("phi3", original_max_position_embeddings=32, rope_scaling=LONGROPE),
        "llama4": tiny_model(
            "llama4_text", num_hidden_layers=4, num_local_experts=4, intermediate_size_mlp=64, floor_scale=32
        ),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder / name)
    rows = [{"prompt": prompt, "answer": "1"} for prompt in ("1+2=", "11+22=1+2=3+4=", "3+4=") * 4]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, model, prompt in (("long", "phi3", 14), ("refused", "llama4", 14)):
        (folder / f"{name}.yaml").write_text(RUN.format(name=name, model=model, prompt=prompt))


def test_factors_are_recorded_and_alike_in_sampling_training_and_reference(grpox: Any, folder: Path) -> None:
    stderr = finish(folder, "long.yaml")
    assert "position factors of the model: long, for up to 38 tokens" in stderr
    run = folder / "runs" / "long"
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["longest_sequence"] == 38
    metrics = metrics_of(run)[0]
    assert metrics["mismatch/difference_max"] < 1e-5
    assert abs(metrics["kl"]) < 1e-6
    configs = [json.loads((each / "config.json").read_text()) for each in (folder / "phi3", run / "model")]
    assert configs[0] == configs[1]
    assert "the run is complete" in finish(folder, "long.yaml", "--resume", "auto")
    tried = grpox("eval", "runs/long/checkpoints/step-00000001", "long.yaml")
    assert tried.returncode == 0, tried.stderr[-4000:]


def test_a_model_that_depends_on_its_neighbours_is_refused_by_name(folder: Path) -> None:
    stderr = finish(folder, "refused.yaml", code=2)
    assert "log-probabilities depend on the other sequences of a micro-batch" in stderr
    assert "floor_scale 32" in stderr
    assert "Llama4ForCausalLM" in stderr
