"""Real optimizer steps of adapters under ZeRO-3 on fixed rollouts; run alone or by torchrun.

Usage: lora_step.py OUT.pt BATCH_SIZExACCUMULATION
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from deepspeed.utils import safe_get_full_grad
from transformers import LlamaConfig, LlamaForCausalLM
from zero3_step import config_for, micro_batches_for, numbers

from grpox.cli.errors import leave
from grpox.config import LoraConfig, RunConfig
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry
from grpox.policy.batch import collate
from grpox.policy.engine import Engine, FrozenEngine
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.lora.add import add_adapters
from grpox.policy.lora.layers import parameter_counts
from grpox.policy.optimizers import AdamW, NamedSchedule
from grpox.policy.reference import BaseAsReference
from grpox.policy.weight_stream import stream_base
from grpox.runtime.world import World, start_world
from grpox.update.policy_update import PolicyUpdate

STEPS = 2
TARGETS: dict[str, Any] = {"body": "all-linear", "with head": ["q_proj", "v_proj", "down_proj", "lm_head"]}


def plain_model() -> LlamaForCausalLM:
    """A model whose head is not its embeddings; the same on all ranks."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=17,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            tie_word_embeddings=False,
            initializer_range=0.2,
        )
    )


def steps(config: RunConfig, targets: Any, registry: Registry, world: World) -> dict[str, Any]:
    """Take some steps, the reference being the model without adapters, and compare it with one of its own."""
    train, model = config.train, plain_model()
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    add_adapters(model, LoraConfig(r=4, alpha=8, target_modules=targets), seed=0)
    engine = Engine(model, config, world, 10, AdamW(train), NamedSchedule(train))
    gradients: list[dict[str, torch.Tensor]] = []
    take_step = engine.step

    def capture_and_step(loss: torch.Tensor) -> torch.Tensor:
        named = engine.module.named_parameters()
        gradients.append({n: safe_get_full_grad(p).clone() for n, p in named if p.requires_grad})
        return take_step(loss)

    engine.step = capture_and_step  # type: ignore[method-assign]
    loss = registry.build(registry.parse("loss", config.loss, "loss"))
    correction = registry.build(registry.parse("correction", config.correction, "correction"))
    reference = BaseAsReference(engine)
    update = PolicyUpdate(engine, reference, loss, correction, config, world)
    metrics = [update.step(micro_batches_for(config, world)) for _ in range(STEPS)]
    frozen = {name: torch.equal(weight.cpu(), base[name]) for name, weight in stream_base(engine.module)}
    own = FrozenEngine(plain_model(), config, world)
    batch = collate(micro_batches_for(config, world)[0], world.device)
    mask = batch.token_mask
    with torch.no_grad():
        models = (reference, own, engine)
        found = [completion_logprobs(each, batch, 0.8, each.mode)[0][mask] for each in models]
    return {
        "gradients": gradients,
        "metrics": metrics,
        "weights": {name: weight.clone() for name, weight in engine.weights()},
        "frozen": frozen,
        "chunked": engine.mode.chunked,
        "trained": parameter_counts(engine.module)[0],
        "optimized": sum(flat.numel() for flat in engine._optimizer.fp32_partitioned_groups_flat) * world.size,
        "reference": float((found[0] - found[1]).abs().max()),
        "moved": float((found[0] - found[2]).abs().max()),
    }


def main(out: str, split: str) -> None:
    world = start_world()
    registry = Registry(discover())
    results = {}
    for name, targets in TARGETS.items():
        config = config_for("dapo", 0.1, *numbers(split))
        config.train.learning_rate = 0.01
        results[name] = steps(config, targets, registry, world)
        config.train.chunked_logprobs = False
        results[f"{name}, all logits"] = steps(config, targets, registry, world)
    if world.is_main:
        torch.save(results, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    leave(0)
