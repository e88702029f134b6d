"""One point of memory_plan.py: a run of which each rank watches its own memory.

Usage: memory_plan_point.py ARGUMENTS.json OUT; writes OUT.<rank>
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from random_model import QUICKSTART
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

EVERY = 0.005
"""Seconds between two looks."""
MIB = 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")
LATER = (
    "grpox.policy.deepspeed_import",
    "grpox_generators.hf",
    "transformers.models.llama.modeling_llama",
    "safetensors",
)
"""Modules that a run imports while it runs; their memory belongs to the libraries."""
NAMED = {name: name for name in ("load", "generate", "update", "reduce", "step")}
NAMED |= {"shard": "load", "sync": "generate"}
"""Phases of a run -> what they are called here; others are not measured."""
WITHIN = {"independent_gradient_partition_epilogue": "reduce", "step": "step"}
"""Methods of DeepSpeed's optimizer -> the part of the update that they are."""
MEASURED = ("load", "generate", "update", "reduce", "step")


def make_inputs(folder: Path, size: dict[str, Any], prompt: int, count: int) -> None:
    """Write a model of random weights, and `count` prompts of as many tokens."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(os.fspath(QUICKSTART))  # type: ignore[call-overload]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocabulary"],
        hidden_size=size["hidden"],
        intermediate_size=size["intermediate"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["heads"] // 2,
        tie_word_embeddings=size["tied"],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = [json.dumps({"prompt": "1" * prompt, "answer": str(number)}) for number in range(count)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")


def own_memory() -> int:
    """Bytes of this process that are in no file."""
    _, resident, in_files, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(in_files)) * PAGE


class Watched:
    """The most that is held in each phase, looked at by a thread."""

    def __init__(self) -> None:
        self.most: dict[str, int] = defaultdict(int)
        self.before = 0
        self._phase = ""
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        wait = threading.Event()
        while not wait.wait(EVERY):
            phase = self._phase
            self.most[phase] = max(self.most[phase], own_memory())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        around = self._phase
        if name == "load":
            gc.collect()
            self.before = own_memory()
        self._phase = NAMED.get(name, around)
        try:
            yield
        finally:
            self._phase = around


def watch_phases(kind: type[Watched] = Watched) -> Watched:
    """Have every phase of the run to come watched."""
    from grpox.runtime.phases import PhaseTimes

    watched, timed = kind(), PhaseTimes.phase

    @contextmanager
    def both(times: PhaseTimes, name: str) -> Iterator[None]:
        with watched.phase(name), timed(times, name):
            yield

    PhaseTimes.phase = both  # type: ignore[assignment]
    for method, phase in WITHIN.items():
        _watch_method(watched, method, phase)
    return watched


def _watch_method(watched: Watched, method: str, phase: str) -> None:
    """Tell a part of the update from the rest of it."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Optimizer

    whole = getattr(Optimizer, method)

    def told(*arguments: Any, **named: Any) -> Any:
        with watched.phase(phase):
            return whole(*arguments, **named)

    setattr(Optimizer, method, told)


def varied(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward by which every completion teaches."""
    return [1.0 if number % 2 else -1.0 for number in range(len(completion_ids))]


def main(told: str, out: str) -> None:
    from grpox import train
    from grpox.runtime import launch

    given = json.loads(Path(told).read_text())
    for module in LATER:
        importlib.import_module(module)
    watched = watch_phases()
    train(given["run"], rewards=[varied])
    figures = {name: (watched.most[name] - watched.before) / MIB for name in MEASURED}
    Path(f"{out}.{launch.rank()}").write_text(json.dumps(figures | {"before": watched.before / MIB}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
