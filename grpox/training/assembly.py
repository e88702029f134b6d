"""The parts that training, an evaluation and a try open alike: user code, tokenizer, prompts and sampler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpox.config.run import rewards_of
from grpox.contracts import Generator, GeneratorContext
from grpox.data.prompts import PromptSet
from grpox.policy.memory_plan.of_run import check_load, free_memory, generator_settings
from grpox.policy.models import architecture_of, load_model, stop_token_ids, vocabulary_of
from grpox.policy.precision import prepare_cuda
from grpox.policy.rope import fix_config
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.isolation import bind_rewards, reward_functions
from grpox.rollout.sampler import CompletionSampler, FixedPolicy, WeightSource
from grpox.runtime.foreign_code import FOREIGN, translate_exits
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.setup import quieten, seed_libraries
from grpox.runtime.watchdog import GRACE
from grpox.runtime.world import World, on_every_rank, start_world, translate_lost_ranks
from grpox.training.inputs import (
    decide_longest,
    model_config,
    open_tokenizer,
    scoring_key,
)

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun
    from grpox.training.episodes import RunEpisodes


@dataclass(frozen=True)
class EvaluationInputs:
    """Prompts of one set of an evaluation, and the reward functions that score their completions."""

    name: str
    """Name of the set; empty if it is the only one."""
    prompts: PromptSet
    rewards: Sequence[NamedReward]


@dataclass(frozen=True)
class Assembly:
    """A run on this rank, with its tokenizer and the user code beside plugins' components."""

    run: ResolvedRun
    world: World
    times: PhaseTimes
    rewards: Mapping[str, Sequence[Any]]
    """Key of a list in the run file -> its reward functions; an evaluation without its own has no key."""
    episodes: RunEpisodes | None
    """Environments and tools; None if each completion is one turn."""
    tokenizer: PreTrainedTokenizerBase

    def bind(self, eval_sets: Mapping[str, PromptSet]) -> list[EvaluationInputs]:
        """Bind the reward functions that score each set: the evaluation's own, or else those of training.

        Raises:
            ConfigError: a function needs a column that the data lacks.
        """
        key, config = scoring_key(self.run), self.run.config
        functions = self.rewards[key] if eval_sets else ()
        return [
            EvaluationInputs(name, prompts, bind_rewards(rewards_of(config), functions, prompts, key))
            for name, prompts in eval_sets.items()
        ]

    def open_generator(self) -> Generator:
        """Check that the model fits into memory, and build the generator.

        Raises:
            ConfigError: the model does not fit, or the generator cannot be built or used here.
        """
        run = self.run
        check_load(run, free_memory(self.world))
        generator: Generator = run.build("generator")
        if self.world.is_main and hasattr(generator, "preflight"):
            fix_config(config := copy.deepcopy(model_config(run)), run.config.model.longest_sequence)
            generator.preflight(config)
        return generator

    def load(self, load: Callable[[], PreTrainedModel]) -> tuple[PreTrainedModel, GeneratorContext]:
        """Load the unsharded model; also return its description for the generator; a collective."""
        model, config = on_every_rank(self.world, self.times, self.times.phase("load")(load)), self.run.config
        prepare_cuda(model, self.world.device)
        return model, GeneratorContext(
            model_path=Path(config.model.path),
            build_model=architecture_of(model),
            tokenizer=self.tokenizer,
            stop_token_ids=stop_token_ids(model, self.tokenizer),
            device=self.world.device,
            rank=self.world.rank,
            world_size=self.world.size,
            seed=config.train.seed,
            policy=model,
        )

    def start_sampler(
        self, generator: Generator, context: GeneratorContext, policy: WeightSource, sleeps: bool = True
    ) -> CompletionSampler:
        """Start the generator on every rank.

        Args:
            sleeps: True if it sleeps during updates, which need its memory.
        """
        world, times, loop = self.world, self.times, None
        if self.episodes is not None:
            loop = self.episodes.loop(world, times, context.stop_token_ids)

        def start() -> None:
            with translate_exits("the generator"), times.phase("start generator"):
                generator.start(context)

        on_every_rank(world, times, start)
        vocabulary = vocabulary_of(context.policy.config)
        return CompletionSampler(policy, generator, world, context.seed, times, sleeps, loop, vocabulary)

    @contextmanager
    def fixed_sampler(self, checkpoint: Path | None = None) -> Iterator[CompletionSampler]:
        """Load the model without training, and start its generator, which ends with the block; a collective.

        Args:
            checkpoint: a checkpoint whose weights replace those of `model.path`.

        Raises:
            ConfigError: the model does not fit or cannot be loaded, or the generator cannot be used here.
        """
        decide_longest(self.run)
        generator = self.open_generator()

        def load() -> PreTrainedModel:
            if checkpoint is None:
                model = load_model(self.run.config.model)
            else:
                # Imported here, because it imports DeepSpeed.
                from grpox.checkpoint.export import checkpoint_model

                model = checkpoint_model(checkpoint, self.run.config.model)
            return model.eval().requires_grad_(False).to(self.world.device)

        with translate_lost_ranks(self.world, self.times):
            model, context = self.load(load)
            sampler = self.start_sampler(generator, context, FixedPolicy(model), sleeps=False)
            try:
                yield sampler
            finally:
                generator.close()


@contextmanager
def open_assembly(
    run: ResolvedRun, world: World, keys: Sequence[str], day: date | None = None
) -> Iterator[Assembly]:
    """Build reward functions and open environments, whose processes end with the block; a collective.

    Args:
        keys: the lists of reward functions in the run file.
        day: the date of the run that is resumed.

    Raises:
        ConfigError: one cannot be built, or not where the run file says.
    """
    with ExitStack() as stack:
        rewards = {key: stack.enter_context(reward_functions(run, key)) for key in keys}
        episodes = None
        if run.config.has_episodes:
            # Imported here, because most runs have none.
            from grpox.training.episodes import opened_episodes

            episodes = stack.enter_context(opened_episodes(run))
        with translate_exits(FOREIGN):
            times = PhaseTimes(generator=generator_settings(run))
            tokenizer = open_tokenizer(run, world, [each for key in keys for each in rewards[key]], day)
            yield Assembly(run, world, times, rewards, episodes, tokenizer)


@contextmanager
def open_alone(run: ResolvedRun, key: str) -> Iterator[Assembly]:
    """Open a run that is not trained, with the reward functions under `key`; a collective of all ranks."""
    quieten()
    world = start_world(run.config.watchdog.end_after + 2 * GRACE)
    seed_libraries(run.config.train.seed)
    with open_assembly(run, world, [key]) as assembly:
        yield assembly
