"""A run of components written from the documentation alone, with parameters and state: killed and resumed."""

from __future__ import annotations

import csv
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from support.killing import assert_same, finish, kill_and_resume
from support.run_files import metrics_of

TRIAL = (
    Path(__file__).parents[1] / "contract" / "planted" / "trial.py",
    Path(__file__).with_name("trial_components.py"),
)
"""Files of components."""


def component(name: str, **parameters: Any) -> str:
    [file] = (file for file in TRIAL if re.search(rf"^(class|def) {name}\b", file.read_text(), re.MULTILINE))
    return json.dumps({"path": f"{file}:{name}", **parameters})


@pytest.mark.parametrize("ranks", [1, 2])
def test_seven_components_at_once_are_resumed_bit_by_bit(tmp_path: Path, ranks: int) -> None:
    with (tmp_path / "sums.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["prompt", "answer"])
        pairs = [(a, b) for a in range(10, 60) for b in range(10, 40)]
        rows.writerows((f"{a}+{b}=", a + b) for a, b in random.Random(1).sample(pairs, 400))
    overrides = [
        f"tracking={{patience: {component('Patience', steps=50)}}}",
        f"loss={component('QuantileClip')}",
        f"advantage={component('RunningStd')}",
        f"correction={component('SequenceCap')}",
        f"rewards=[{component('close')}]",
        f"train.optimizer={component('Lion', weight_decay=0.01)}",
        f"train.scheduler={component('Restarts', periods=3)}",
        f"data={{source: {component('FromCsv', file=str(tmp_path / 'sums.csv'))}}}",
        *("train.num_generations=8", "train.steps_per_generation=2", "train.gradient_accumulation_steps=1"),
        *("train.per_device_train_batch_size=16", "train.warmup_steps=0", "train.max_steps=8"),
        *("checkpoint.every=2", "evaluation=null"),
    ]
    whole = tmp_path / "runs" / "whole"
    stderr = finish(tmp_path, "quickstart", *overrides, "output_dir=runs/whole", ranks=ranks)
    assert "warning" not in stderr
    assert_same(whole, kill_and_resume(tmp_path, "quickstart", *overrides, steps=5, ranks=ranks))

    highs = [metrics["quantile/high_mean"] for metrics in metrics_of(whole)]
    assert highs[0] == pytest.approx(1.2)
    assert len(set(highs)) > 2
