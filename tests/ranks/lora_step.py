"""Real optimizer steps of adapters under ZeRO-3 on fixed rollouts; run alone or by torchrun.

Usage: lora_step.py OUT.pt BATCH_SIZExACCUMULATION
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.architectures import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from zero3_step import (
    captured,
    config_for,
    engine_of,
    micro_batches_for,
    numbers,
    save_results,
    update_of,
)

from grpox.config import LoraConfig, RunConfig
from grpox.policy.batch import collate
from grpox.policy.engine import FrozenEngine
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.lora.add import add_adapters
from grpox.policy.lora.layers import adapter_parameters, merge_adapters, parameter_counts
from grpox.policy.reference import BaseAsReference
from grpox.policy.weight_stream import stream_base
from grpox.runtime.world import World

STEPS = 2
TARGETS: dict[str, Any] = {"body": "all-linear", "with head": ["q_proj", "v_proj", "down_proj", "lm_head"]}
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]
EXPERTS: dict[str, Any] = {"experts": [], "experts beside layers": "all-linear"}


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


def model_of_experts() -> PreTrainedModel:
    """A model with stacked experts; the same on all ranks."""
    return tiny_model("qwen3_moe").train()


def steps(
    config: RunConfig,
    lora: LoraConfig,
    world: World,
    plain_model: Callable[[], PreTrainedModel] = plain_model,
    begin: Callable[[PreTrainedModel], None] = lambda model: None,
) -> dict[str, Any]:
    """Take some steps, the reference being the model without adapters, and compare it with one of its own.

    Args:
        begin: changes the adapters before the first step.
    """
    model = plain_model()
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    add_adapters(model, lora, seed=0)
    begin(model)
    engine = engine_of(config, world, model)
    gradients, reference = captured(engine), BaseAsReference(engine)
    update = update_of(engine, reference, config, world)
    metrics = [update.step(micro_batches_for(config, world)) for _ in range(STEPS)]
    growth = float(engine.measure_growth().sqrt())
    frozen = {name: torch.equal(weight.cpu(), base[name]) for name, weight in stream_base(engine.module)}
    own = FrozenEngine(plain_model(), config, world)
    found = []
    for each in (reference, own, engine):
        batch = collate(micro_batches_for(config, world)[0], world.device, each.mode)
        with torch.no_grad():
            found.append(completion_logprobs(each, batch, 0.8)[0][batch.token_mask])
    return {
        "gradients": gradients,
        "metrics": metrics,
        "base": base,
        "growth": growth,
        "weights": {name: weight.clone() for name, weight in engine.weights()},
        "frozen": frozen,
        "chunked": engine.mode.chunked,
        "trained": parameter_counts(engine.module)[0],
        "optimized": sum(flat.numel() for flat in engine._optimizer.fp32_partitioned_groups_flat) * world.size,
        "reference": float((found[0] - found[1]).abs().max()),
        "moved": float((found[0] - found[2]).abs().max()),
    }


def perturb(model: PreTrainedModel) -> None:
    """Change B, which is 0 at first, and under which A would have no gradient."""
    draw = torch.Generator().manual_seed(5)
    for name, factor in adapter_parameters(model):
        if name.endswith("lora_B.weight"):
            factor.data = 0.1 * torch.randn(factor.shape, generator=draw)


def expert_steps(config: RunConfig, targets: Any, world: World) -> dict[str, Any]:
    """Take steps of adapted experts, and one of a plain model whose weights are the sums."""
    lora = LoraConfig(r=4, alpha=8, target_modules=targets, target_parameters=PARAMETERS)
    factors: dict[str, torch.Tensor] = {}

    def begin(model: PreTrainedModel) -> None:
        perturb(model)
        factors.update((name, parameter.detach().clone()) for name, parameter in model.named_parameters())

    results = steps(config, lora, world, model_of_experts, begin)
    model = model_of_experts()
    add_adapters(model, lora, seed=0)
    perturb(model)
    merge_adapters(model)
    whole = engine_of(config, world, model)
    gradients, reference = captured(whole), FrozenEngine(model_of_experts(), config, world)
    update_of(whole, reference, config, world).step(micro_batches_for(config, world))
    return results | {"factors": factors, "gradient of the sums": gradients[0]}


def results(world: World, split: str) -> dict[str, Any]:
    found = {}
    for name, targets in TARGETS.items():
        config = config_for("dapo", 0.1, *numbers(split))
        config.train.learning_rate = 0.01
        lora = LoraConfig(r=4, alpha=8, target_modules=targets)
        found[name] = steps(config, lora, world)
        config.train.chunked_logprobs = False
        found[f"{name}, all logits"] = steps(config, lora, world)
    for name, targets in EXPERTS.items():
        config = config_for("dapo", 0.1, *numbers(split))
        config.train.gradient_checkpointing = targets != []
        found[name] = expert_steps(config, targets, world)
    return found


if __name__ == "__main__":
    save_results(results)
