"""Takes engines to another number of ranks and on; run alone or by torchrun.

Usage: other_ranks.py FROM OUT BATCH_SIZE NAME...: of each variant, what FROM/NAME holds (new where FROM is "-")
is read, a step is taken, saved to OUT/NAME, and another step taken. OUT/states.pt has the state at each point.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from engine_steps import variant
from zero3_step import engine_of, micro_batches_for, update_of

from grpox.checkpoint.resume import load_of_other_ranks
from grpox.checkpoint.shards import ShardFiles
from grpox.cli.errors import leave
from grpox.policy.engine import Engine
from grpox.runtime.world import World, start_world

ROWS = 24


def state(engine: Engine) -> dict[str, Any]:
    """Everything that the optimizer knows, whole; a collective."""
    optimizer = engine._optimizer
    held: dict[str, Any] = {"weights": {name: w.clone() for name, w in engine.weights()}}
    for key in ("exp_avg", "exp_avg_sq"):
        named = engine.module.named_parameters()
        held[key] = {name: safe_get_full_optimizer_state(p, key).clone() for name, p in named}
    named = engine.module.named_parameters()
    held["master"] = {name: safe_get_full_fp32_param(p).clone() for name, p in named}
    held["counters"] = [float(each["step"]) for each in optimizer.optimizer.state.values()]
    held["groups"] = [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]
    held["schedule"] = {
        name: value for name, value in engine._scheduler.state_dict().items() if name != "lr_lambdas"
    }
    return held


def go_on(name: str, source: Path | None, out: Path, batch_size: int, world: World) -> list[dict[str, Any]]:
    config = variant(name, batch_size, ROWS // batch_size // world.size)
    config.train.__dict__["lr_scheduler_type"] = "linear"
    engine = engine_of(config, world, files=ShardFiles(False))
    update = update_of(engine, None, config, world)
    if source is not None:
        load_of_other_ranks(engine, source, name, 1)
    states = [state(engine)] if source is not None else []
    update.step(micro_batches_for(config, world))
    states.append(state(engine))
    engine.save(out, name)
    world.barrier()
    if source is None:
        update.step(micro_batches_for(config, world))
        states.append(state(engine))
    return states


def main(source: str, out: str, batch_size: int, names: list[str]) -> None:
    world = start_world()
    folder = None if source == "-" else Path(source)
    states = {name: go_on(name, folder, Path(out), batch_size, world) for name in names}
    if world.is_main:
        torch.save(states, Path(out) / "states.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    leave(0)
