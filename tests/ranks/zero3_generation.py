"""Generation through ZeRO-3 shards and on a whole copy, with uneven prompts per rank; for torchrun.

Usage: zero3_generation.py OUT.pt
OUT.pt has the results of each rank. Alone, the copy is the policy's own memory.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from zero3_step import config_for, engine_of, rollouts, save_results

from grpox.config import RunConfig, SamplingConfig
from grpox.contracts import GeneratorContext, Prompt, WeightStream
from grpox.policy.batch import collate, samples_of
from grpox.policy.models import architecture_of, load_model, load_tokenizer
from grpox.runtime.world import World
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator

TEXTS = [["37+48=", "1+2=", "9"], ["5+5="]]
"""Prompts of each rank: three batches of one group on the first, one on the second."""
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "long": {"temperature": 2.0, "min_completion_length": 7, "repetition_penalty": 1.3},
}


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
        self.engine = engine_of(config, world, model)
        stops, place = (self.tokenizer.eos_token_id,), (world.device, world.rank, world.size, 0)
        path = Path(config.model.path)
        self.context = GeneratorContext(path, build, self.tokenizer, stops, *place, self.engine.module)

    def generator(self, **parameters: Any) -> HfGenerator:
        generator = HfGenerator(HfConfig(batch_size=4, **parameters))
        generator.start(self.context)
        return generator

    def generate(self, generator: HfGenerator, name: str, texts: list[str]) -> list[dict[str, Any]]:
        whole = generator.config.gather_weights
        generator.sync(self.engine.weights() if whole else untouched(), self.engine.steps)
        prompts = [Prompt(g, tuple(self.tokenizer(text)["input_ids"]), 4) for g, text in enumerate(texts)]
        sampling = SamplingConfig(max_completion_length=12).model_copy(update=SAMPLING[name])
        return [asdict(rollout) for rollout in generator.generate(prompts, sampling, seed=3)]

    def step(self) -> float:
        """Train on fixed rollouts, so that the weights differ from those at the start."""
        rows, advantages = rollouts()
        batch = collate(samples_of(rows, advantages), self.world.device)
        self.engine.begin_micro_batch(last=True)
        logits = self.engine(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        self.engine.backward(logits.float().pow(2).mean() / self.world.size)
        return float(self.engine.step())


def results(world: World) -> list[dict[Any, Any]]:
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
    found: dict[Any, Any] = {}
    for way, generator in generators.items():
        for name in SAMPLING:
            found[name, way] = rank.generate(generator, name, TEXTS[world.rank])
        found["one idle", way] = rank.generate(generator, "greedy", [[], TEXTS[0]][world.rank])
    found["left whole"] = [
        name for name, p in module.named_parameters() if p.ds_status == ZeroParamStatus.AVAILABLE
    ]
    found["norm"] = rank.step()
    found["norm of another engine"] = Rank(config, world).step()
    for way, generator in generators.items():
        found["after a step", way] = rank.generate(generator, "greedy", TEXTS[world.rank])
    found["restored"] = (module.training, module.generation_config is defaults)
    found["checkpointing"] = all(layer.gradient_checkpointing for layer in module.model.layers)
    shards = {parameter.ds_tensor.data_ptr() for parameter in module.parameters()}
    copy = generators["whole"].model.parameters()
    found["shared"] = [parameter.data_ptr() in shards for parameter in copy]
    found["shard"] = max(p.ds_tensor.numel() / p.ds_numel for p in module.parameters())
    return world.gather([found])


if __name__ == "__main__":
    save_results(results)
