"""One run whose model, generator and reward cost next to nothing: the seconds of its steps, and the rest's.

Usage: overhead_run.py OUT.json RUN [a.b=c ...]
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import elsewhere
from deepspeed.runtime.engine import DeepSpeedEngine

from grpox.runfile.load import load_run
from grpox.training.run import train_run
from grpox.training.trainer import Trainer

OF_DEEPSPEED = ("__call__", "backward", "step", "set_gradient_accumulation_boundary", "get_global_grad_norm")


def main(out: str, source: str, overrides: list[str]) -> None:
    for name in OF_DEEPSPEED:
        setattr(DeepSpeedEngine, name, elsewhere.count(getattr(DeepSpeedEngine, name)))
    marks: list[tuple[float, float]] = []
    train_step = Trainer.train_step

    def marked(trainer: Trainer, plan: Any) -> None:
        marks.append((time.perf_counter(), elsewhere.seconds))
        train_step(trainer, plan)

    Trainer.train_step = marked  # type: ignore[method-assign,assignment]
    train_run(load_run(source, overrides))
    # From the begin of a step to that of the next: what observers and checkpoints take is in it.
    pairs = list(itertools.pairwise(marks))
    step = [after[0] - before[0] for before, after in pairs]
    others = [after[1] - before[1] for before, after in pairs]
    Path(out).write_text(json.dumps({"step": step, "elsewhere": others}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
