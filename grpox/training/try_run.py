"""A run tried before it trains: a few prompts drawn, sampled, scored and given advantages as the run would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpox.contracts import Capability, ScoredRollout, Text, TrainerState
from grpox.data.prompts import PromptSet
from grpox.policy.memory_plan.of_run import generator_settings
from grpox.rollout.collector import Collector, Scorer
from grpox.rollout.rewards.isolation import bind_rewards, reward_functions
from grpox.runtime.foreign_code import FOREIGN, translate_exits
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.setup import quieten, seed_libraries
from grpox.runtime.watchdog import GRACE
from grpox.runtime.world import start_world
from grpox.training.fixed_model import sampler_of_model
from grpox.training.inputs import check_scope, open_prompts, open_schedule, open_tokenizer, provides
from grpox.training.user_code import open_episodes

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun


@dataclass(frozen=True)
class TriedPrompt:
    """A prompt with its group of completions."""

    place: str
    """The row in words, for people."""
    row: int
    prompt: Text
    """As in the data."""
    columns: Mapping[str, Any]
    """The row's other columns."""
    text: str
    """As the model gets it, with special tokens."""
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    """The text of each token."""
    completions: Sequence[ScoredRollout]


@dataclass(frozen=True)
class Tried:
    """Result of a try, on every rank."""

    prompts: Sequence[TriedPrompt]
    """Empty on all ranks but the main one."""
    weights: Mapping[str, float]
    """Label of each reward function -> its weight in the sum."""
    main: bool
    """True on the rank that prints the result."""


def try_run(run: ResolvedRun, prompts: int, tell: Callable[[str], None]) -> Tried:
    """Sample and score the first prompts of a run with its own parts; a collective of all ranks.

    Nothing is trained and nothing is written to the run's folder.

    Args:
        prompts: number of prompts; at most as many as the data has.
        tell: called on the main rank with the name of each phase.

    Raises:
        ConfigError: an input cannot be used, or the generator or a reward function cannot be built.
        RunFailed: sampling or scoring failed.
    """
    config = run.config
    quieten()
    world = start_world(config.watchdog.end_after + 2 * GRACE)
    say = tell if world.is_main else lambda phase: None
    seed_libraries(config.train.seed)
    check_scope(run)
    say("reading prompts")
    with reward_functions(run) as functions, open_episodes(run) as episodes, translate_exits(FOREIGN):
        times = PhaseTimes(generator=generator_settings(run))
        tokenizer = open_tokenizer(run, world, functions)
        data, of_evaluation = open_prompts(
            run, tokenizer, tools_of=None if episodes is None else episodes.tools_of
        )
        if episodes is not None:
            episodes.check(data, *of_evaluation.values())
        rewards = bind_rewards(config.rewards, functions, data)
        schedule = open_schedule(run, data, world.size)
        count = prompts if data.stream is not None else min(prompts, len(data))
        rows = schedule.sampler.prompts_at(range(count))
        scorer = Scorer(rewards, provides(run, Capability.STREAMING))
        scaler, group = run.build("advantage"), config.train.num_generations
        say(f"loading {config.model.path}")
        with sampler_of_model(run, world, times, tokenizer, episodes) as sampler:
            collector = Collector(sampler, scorer, data, scaler, config.sampling, group)
            say(f"sampling {count} x {group} completions")
            batch = collector.collect(0, rows, TrainerState(0, schedule.total_steps, 0.0))
        weights = {reward.label: reward.weight for reward in rewards}
        if not world.is_main:  # only the main rank has the rows' other columns
            return Tried([], weights, world.is_main)
        scored = collector.scored(batch)
        groups = [scored[place : place + group] for place in range(0, len(scored), group)]
        tried = [_tried(data, row, completions) for row, completions in zip(rows, groups, strict=True)]
        return Tried(tried, weights, world.is_main)


def _tried(data: PromptSet, row: int, completions: Sequence[ScoredRollout]) -> TriedPrompt:
    # Of the rollout itself: an environment may continue the prompt of the data.
    ids = completions[0].rollout.prompt_ids
    (prompt,), columns = data.rows([row])
    return TriedPrompt(
        data.place(row),
        row,
        prompt,
        {name: values[0] for name, values in columns.items()},
        completions[0].prompt,
        ids,
        tuple(data.prompt_texts([[token] for token in ids])),
        completions,
    )
