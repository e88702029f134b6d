"""Parts that training and an evaluation by itself put together alike: inputs, generator, sampler and scorer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpox.config import RunConfig
from grpox.config.evaluation_settings import rewards_of
from grpox.contracts import Capability, Generator, GeneratorContext
from grpox.data.prompts import PromptSet
from grpox.policy.memory_plan.at_load import check_load, free_memory
from grpox.policy.models import architecture_of, stop_token_ids
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.isolation import OF_EVALUATION, OF_TRAINING, fitting_rewards
from grpox.rollout.sampler import CompletionSampler, WeightSource
from grpox.runtime.collective_errors import on_every_rank
from grpox.runtime.foreign_code import exits_told
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World
from grpox.training.inputs import model_config

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun


@dataclass(frozen=True)
class HeldOut:
    """Prompts of an evaluation, and the reward functions that score their completions."""

    prompts: PromptSet
    rewards: Sequence[NamedReward]

    @classmethod
    def bind(cls, config: RunConfig, prompts: PromptSet, functions: Sequence[Any]) -> HeldOut:
        """Bind the reward functions that score the evaluation: its own, or those of training if it has none.

        Raises:
            ConfigError: a function needs a column that the data lacks.
        """
        own = config.evaluation is not None and config.evaluation.rewards is not None
        key = OF_EVALUATION if own else OF_TRAINING
        return cls(prompts, fitting_rewards(rewards_of(config), functions, prompts, key))


def open_generator(run: ResolvedRun, world: World) -> Generator:
    """Build the generator, once it is known that the model fits into memory.

    Raises:
        ConfigError: it cannot be built, or not be used here.
    """
    check_load(run, free_memory(world))
    generator: Generator = run.build("generator")
    if world.is_main and hasattr(generator, "preflight"):
        generator.preflight(model_config(run))
    return generator


def provides(run: ResolvedRun, capability: Capability) -> bool:
    """Tell whether the run's generator provides `capability`."""
    return capability in run.components["generator"].provides


def load_on_every_rank(load: Callable[[], PreTrainedModel], world: World, times: PhaseTimes) -> PreTrainedModel:
    """Load a model; a failure on one rank ends all."""

    def timed() -> PreTrainedModel:
        with times.phase("load"):
            return load()

    return on_every_rank(world, times, timed)


def generator_context(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: RunConfig, world: World
) -> GeneratorContext:
    """Describe a model that is still whole to the generator."""
    return GeneratorContext(
        model_path=Path(config.model.path),
        build_model=architecture_of(model),
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids(model, tokenizer),
        device=world.device,
        rank=world.rank,
        world_size=world.size,
        seed=config.train.seed,
        policy=model,
    )


def start_sampler(
    generator: Generator,
    context: GeneratorContext,
    policy: WeightSource,
    world: World,
    times: PhaseTimes,
    sleeps: bool = True,
) -> CompletionSampler:
    """Start the generator on every rank.

    Args:
        sleeps: whether it sleeps between two calls, since others need its memory meanwhile.
    """

    def start() -> None:
        with exits_told("the generator"), times.phase("start generator"):
            generator.start(context)

    on_every_rank(world, times, start)
    return CompletionSampler(policy, generator, world, context.seed, times, sleeps)
