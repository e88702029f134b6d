"""Two real optimizer steps under ZeRO-3 for each way to set the engine up; run alone or by torchrun.

Usage: engine_steps.py OUT.pt '{"BATCH_SIZExACCUMULATION": [NAME, ...], ...}'
A variant that this machine lacks a library for has None in the place of its steps.
"""

from __future__ import annotations

import json
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from zero3_step import (
    captured,
    config_for,
    engine_of,
    micro_batches_for,
    numbers,
    save_results,
    update_of,
)

from grpox.config import RunConfig
from grpox.policy.engine import Engine
from grpox.runtime.world import World

# With so large an epsilon the update grows with the gradient: clipping shows.
TRAIN = {
    "learning_rate": 0.02,
    "adam_epsilon": 0.01,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "weight_decay": 0.1,
    "lr_scheduler_type": "constant",
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "unclipped": {"train": {"max_grad_norm": 0.0}},
    "unfused": {"train": {"optim": "adamw_torch"}},
    "checkpointing": {"train": {"gradient_checkpointing": True}},
    "reentrant checkpointing": {
        "train": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    },
    "optimizer offloaded": {"deepspeed": {"offload_optimizer": "cpu"}},
    "parameters offloaded": {"deepspeed": {"offload_param": "cpu"}},
    "both offloaded": {
        "deepspeed": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    },
    "optimizer on nvme": {"deepspeed": {"offload_optimizer": "nvme", "nvme_path": "swap"}},
    "own settings": {
        "deepspeed": {"settings": {"zero_optimization": {"reduce_bucket_size": 5000, "sub_group_size": 20000}}}
    },
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "bfloat16 offloaded": {"model": {"dtype": "bfloat16"}, "deepspeed": {"offload_optimizer": "cpu"}},
}


def variant(name: str, batch_size: int, accumulation: int) -> RunConfig:
    data = config_for("dapo", 0.0, batch_size, accumulation).model_dump()
    data["train"] |= TRAIN
    for section, values in VARIANTS[name].items():
        data[section] |= values
    return RunConfig.model_validate(data)


def steps(config: RunConfig, world: World) -> dict[str, Any]:
    """Take two steps on the same rollouts; returns each step's whole gradient and norm, and the weights."""
    engine = engine_of(config, world)
    before = {name: weight.clone() for name, weight in engine.weights()}
    gradients, update = captured(engine), update_of(engine, None, config, world)
    norms = [update.step(micro_batches_for(config, world))["grad_norm"] for _ in range(2)]
    named = engine.module.named_parameters()
    return {
        "before": before,
        "gradients": gradients,
        "norms": norms,
        "weights": dict(engine.weights()),
        "checkpointing": engine.module.is_gradient_checkpointing,
        "master": {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in named},
        "own masters": own_masters(engine),
    }


def own_masters(engine: Engine) -> list[bool]:
    """Tell for each piece of the weights if it is its own master weights; empty pieces are on nvme."""
    sharded = engine.deepspeed.optimizer
    pairs = zip(sharded.fp32_partitioned_groups_flat, sharded.fp16_partitioned_groups_flat, strict=True)
    return [master.data_ptr() == weights.data_ptr() for master, weights in pairs if master.numel()]


def can_take(name: str) -> bool:
    """Tell whether DeepSpeed's async_io can be compiled, where the variant needs it."""
    if VARIANTS[name].get("deepspeed", {}).get("offload_optimizer") != "nvme":
        return True
    return bool(get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False))


def results(world: World, splits: str) -> dict[str, Any]:
    return {
        split: {
            name: steps(variant(name, *numbers(split)), world) if can_take(name) else None for name in names
        }
        for split, names in json.loads(splits).items()
    }


if __name__ == "__main__":
    save_results(results)
