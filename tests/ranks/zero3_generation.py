"""Generation through ZeRO-3 shards and on a whole copy, with uneven prompts per rank; for torchrun.

Usage: zero3_generation.py OUT; alone, the copy is the policy's own memory
"""

from __future__ import annotations

import importlib.resources
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from zero3_step import config_for, rollouts

from grpox.cli.errors import leave
from grpox.config import RunConfig, SamplingConfig
from grpox.contracts import GeneratorContext, Prompt, Rollout, WeightStream
from grpox.policy.batch import collate, samples_of
from grpox.policy.engine import Engine
from grpox.policy.models import architecture_of, load_model, load_tokenizer
from grpox.policy.optimizers import AdamW, NamedSchedule
from grpox.runtime.world import World, start_world
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator

TEXTS = [["37+48=", "1+2=", "9"], ["5+5="]]
"""Prompts of each rank: three batches of one group on the first, one on the second."""
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "long": {"temperature": 2.0, "min_completion_length": 7, "repetition_penalty": 1.3},
}


def sampling_for(name: str) -> SamplingConfig:
    return SamplingConfig(max_completion_length=12).model_copy(update=SAMPLING[name])


def untouched() -> WeightStream:
    """A weight stream that must not be begun."""
    raise AssertionError("the weight stream was begun")
    yield


class Rank:
    """One rank's engine and generators."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self.world = world
        self.tokenizer = load_tokenizer(config.model)
        model = load_model(config.model)
        build = architecture_of(model)
        train = config.train
        self.engine = Engine(model, config, world, 10, AdamW(train), NamedSchedule(train))
        stops = (self.tokenizer.eos_token_id,)
        path = importlib.resources.files("grpox.runfile.recipes") / "quickstart" / "model"
        self.context = GeneratorContext(
            Path(str(path)),
            build,
            self.tokenizer,
            stops,
            world.device,
            world.rank,
            world.size,
            0,
            self.engine.module,
        )

    def generator(self, **parameters: Any) -> HfGenerator:
        generator = HfGenerator(HfConfig(batch_size=4, **parameters))
        generator.start(self.context)
        return generator

    def generate(self, generator: HfGenerator, name: str, texts: list[str]) -> list[Rollout]:
        whole = generator.config.gather_weights
        generator.sync(self.engine.weights() if whole else untouched(), self.engine.steps)
        prompts = [Prompt(g, tuple(self.tokenizer(text)["input_ids"]), 4) for g, text in enumerate(texts)]
        return list(generator.generate(prompts, sampling_for(name), seed=3))

    def step(self) -> float:
        """Train on fixed rollouts, so that the weights differ from those at the start."""
        rows, advantages = rollouts()
        batch = collate(samples_of(rows, advantages), self.world.device)
        self.engine.begin_micro_batch(last=True)
        logits = self.engine(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        self.engine.backward(logits.float().pow(2).mean() / self.world.size)
        return float(self.engine.step())


def main(out: str) -> None:
    world = start_world()
    config = config_for("grpo", 0.0, 4, 1)
    config.train.gradient_checkpointing = True
    rank = Rank(config, world)
    generators = {
        "whole": rank.generator(),
        "sharded": rank.generator(gather_weights=False),
        "sharded static": rank.generator(gather_weights=False, cache_implementation="static"),
    }
    module = rank.engine.module
    defaults = module.generation_config
    results: dict[Any, Any] = {}
    for way, generator in generators.items():
        for name in SAMPLING:
            results[name, way] = rank.generate(generator, name, TEXTS[world.rank])
        results["one idle", way] = rank.generate(generator, "greedy", [[], TEXTS[0]][world.rank])
    results["left whole"] = [
        name for name, p in module.named_parameters() if p.ds_status == ZeroParamStatus.AVAILABLE
    ]
    results["norm"] = rank.step()
    results["norm of another engine"] = Rank(config, world).step()
    for way, generator in generators.items():
        results["after a step", way] = rank.generate(generator, "greedy", TEXTS[world.rank])
    results["restored"] = (module.training, module.generation_config is defaults)
    results["checkpointing"] = all(layer.gradient_checkpointing for layer in module.model.layers)
    shards = {parameter.ds_tensor.data_ptr() for parameter in module.parameters()}
    copy = generators["whole"].model.parameters()
    results["shared"] = [parameter.data_ptr() in shards for parameter in copy]
    results["shard"] = max(p.ds_tensor.numel() / p.ds_numel for p in module.parameters())
    torch.save(results, f"{out}.{world.rank}")


if __name__ == "__main__":
    main(sys.argv[1])
    leave(0)
