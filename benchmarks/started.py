"""A run's policy under ZeRO-3 beside its generator, started as a run starts them, without the training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from grpox.contracts import Generator, GeneratorContext
from grpox.policy.engine import Engine
from grpox.policy.models import architecture_of, stop_token_ids
from grpox.policy.optimizers import AdamW, NamedSchedule
from grpox.runfile.load import ResolvedRun, load_run
from grpox.runtime.world import World, start_world
from grpox.training.inputs import open_model, open_tokenizer


@dataclass(frozen=True)
class Started:
    """Objects of one rank that a benchmark measures."""

    run: ResolvedRun
    world: World
    tokenizer: PreTrainedTokenizerBase
    engine: Engine
    generator: Generator


def start(source: str, overrides: Sequence[str]) -> Started:
    """The policy's engine, then the generator; the generator has not been given the weights yet."""
    run = load_run(source, overrides)
    config, world = run.config, start_world()
    tokenizer, model = open_tokenizer(run), open_model(run)
    generator: Generator = run.build("generator")
    build_model, stops = architecture_of(model), stop_token_ids(model, tokenizer)
    engine = Engine(model, config, world, 1, AdamW(config.train), NamedSchedule(config.train))
    generator.start(
        GeneratorContext(
            model_path=Path(config.model.path),
            build_model=build_model,
            tokenizer=tokenizer,
            stop_token_ids=stops,
            device=world.device,
            rank=world.rank,
            world_size=world.size,
            seed=config.train.seed,
            policy=engine.module,
        )
    )
    return Started(run, world, tokenizer, engine, generator)
