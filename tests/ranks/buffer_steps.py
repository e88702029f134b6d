"""Takes a model with buffers through engines and checkpoints, and mixes references; alone or by torchrun.

Usage: buffer_steps.py OUT.pt
The model is saved to ./base. OUT.pt has for each way to train what rank 0 held and read back.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.architectures import perturb, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from zero3_step import config_for, engine_of, reference_for, save_results

from grpox.checkpoint.export import load_weights
from grpox.checkpoint.resume import load_of_other_ranks
from grpox.checkpoint.save_model import save_model
from grpox.checkpoint.saver import ENGINE
from grpox.checkpoint.shards import ShardFiles, read_reference, write_reference
from grpox.config import LoraConfig, RunConfig, TrainConfig
from grpox.policy.engine import Engine, FrozenEngine
from grpox.policy.lora.add import add_adapters
from grpox.policy.models import load_model
from grpox.policy.reference import sync_reference
from grpox.policy.weight_stream import persistent_buffers, stream_weights
from grpox.runtime.world import World
from grpox.training.run import make_whole

KIND = "gemma4_text"
WAYS = ("all weights", "adapters")
SHARDS, WHOLE = 0, 1_000_000
"""Sizes up to which parameters stay whole on each rank."""


def model_of(config: RunConfig, way: str) -> Any:
    model = load_model(config.model)
    if way == "adapters":
        add_adapters(model, LoraConfig(target_modules=["q_proj"]), seed=0)
    return model


def values(module: Any) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in persistent_buffers(module)}


@torch.no_grad()
def change(module: Any) -> None:
    for place, (_, buffer) in enumerate(persistent_buffers(module), start=1):
        buffer += 0.25 * place


def taken_through(out: Path, way: str, world: World) -> dict[str, Any]:
    config = config_for("dapo", 0.0, 6, 1)
    config.model.path = str(out / "base")
    engine = engine_of(config, world, model_of(config, way), ShardFiles(False))
    at_first = values(engine.module)
    engine.begin_micro_batch(last=True)
    engine.backward(engine(input_ids=torch.tensor([[3, 4, 5, 6]])).logits.square().mean())
    engine.step()
    change(engine.module)
    streamed = {name: tensor.clone() for name, tensor in engine.weights()}
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    save_model(engine, tokenizer, None, out / way / "model", world)
    engine.save(out / way, ENGINE)
    world.barrier()
    found = {"at first": at_first, "changed": values(engine.module), "streamed": streamed}
    again = engine_of(config, world, model_of(config, way), ShardFiles(False))
    again.load(out / way, ENGINE, 0)
    found["resumed"] = values(again.module)
    again.close()
    exported = model_of(config, way)
    load_weights(exported, out / way)
    found["exported"] = values(exported)
    if way == "all weights":
        found["universal"] = universal(config, way, out, world)
        found |= referred(engine, config, out, world)
    module = engine.module
    make_whole(module, engine, world.device)
    found["made whole"] = values(module)
    found["saved"] = values(AutoModelForCausalLM.from_pretrained(out / way / "model"))
    return found


def universal(config: RunConfig, way: str, out: Path, world: World) -> dict[str, torch.Tensor]:
    engine = engine_of(config, world, model_of(config, way), ShardFiles(False))
    load_of_other_ranks(engine, out / way, ENGINE, 0)
    return values(engine.module)


def referred(engine: Engine, config: RunConfig, out: Path, world: World) -> dict[str, Any]:
    """The reference's buffers when it has moved half the way, and as they are read from its checkpoint."""
    reference = FrozenEngine(load_model(config.model), config, world)
    sync_reference(engine, reference, TrainConfig(ref_sync_steps=1, ref_sync_alpha=0.5))
    policy: Any = SimpleNamespace(reference=reference, reference_sync=True)
    moved = values(reference.module)
    write_reference(policy, out, ShardFiles(False), world)
    change(reference.module)
    world.barrier()
    read_reference(policy, out, world)
    return {"reference": moved, "reference read": values(reference.module)}


def mixed(threshold: int, world: World) -> list[dict[str, Any]]:
    """Mix the policy into a reference twice; return each rank's weights before, after one step, after two."""
    config = config_for("dapo", 0.1, 6, 1)
    config.deepspeed.stage3_param_persistence_threshold = threshold
    config.train.ref_sync_alpha, config.train.ref_sync_steps = 0.25, 2
    reference: Any = reference_for(config, world)
    engine, snapshots = engine_of(config, world), []
    for step in range(3):
        if step > 0:
            engine.steps += 1  # the weights of the policy may as well stay as they are
            sync_reference(engine, reference, config.train)
        snapshots.append({name: weight.clone() for name, weight in stream_weights(reference.module)})
    result = {
        "policy": {name: weight.clone() for name, weight in engine.weights()},
        "reference": snapshots,
        "logits": reference(input_ids=torch.tensor([[3, 4, 5, 6]])).logits.detach(),
        "whole": any(parameter.ds_persist for parameter in reference.module.parameters()),
    }
    return world.gather([result])


def results(world: World) -> dict[Any, Any]:
    out = Path.cwd()
    if world.is_main:
        model = tiny_model(KIND)
        perturb(model, 1)
        model.save_pretrained(out / "base")
        quickstart = Path(config_for("dapo", 0.0, 6, 1).model.path)
        AutoTokenizer.from_pretrained(quickstart).save_pretrained(out / "base")
    world.barrier()
    found: dict[Any, Any] = {way: taken_through(out, way, world) for way in WAYS}
    return found | {threshold: mixed(threshold, world) for threshold in (SHARDS, WHOLE)}


if __name__ == "__main__":
    save_results(results)
