"""A try of a run before it trains: samples, scores and advantages of a few prompts, as in the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpox.contracts import Capability, ScoredRollout, Text, TrainerState
from grpox.rollout.collector import Collector, Scorer
from grpox.rollout.rewards.isolation import OF_TRAINING, bind_rewards
from grpox.runtime.launch import rank_or_zero
from grpox.training.assembly import open_alone
from grpox.training.inputs import check_scope, open_prompts, open_schedule, provides

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
    """The prompt as the model gets it, with special tokens."""
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
    say = tell if rank_or_zero() == 0 else lambda phase: None
    check_scope(run)
    say("reading prompts")
    with open_alone(run, OF_TRAINING) as assembly:
        data, _ = open_prompts(run, assembly.tokenizer, episodes=assembly.episodes)
        rewards = bind_rewards(config.rewards, assembly.rewards[OF_TRAINING], data)
        schedule = open_schedule(run, data, assembly.world.size)
        count = prompts if data.stream is not None else min(prompts, len(data))
        rows = schedule.sampler.prompts_at(range(count))
        scorer = Scorer(rewards, provides(run, Capability.STREAMING))
        scaler, group = run.build("advantage"), config.train.num_generations
        say(f"loading {config.model.path}")
        with assembly.fixed_sampler() as sampler:
            collector = Collector(sampler, scorer, data, scaler, config.sampling, group)
            say(f"sampling {count} x {group} completions")
            batch = collector.collect(0, rows, TrainerState(0, schedule.total_steps, 0.0))
        weights = {reward.label: reward.weight for reward in rewards}
        if not assembly.world.is_main:  # only the main rank has the rows' other columns
            return Tried([], weights)
        tried = list[TriedPrompt]()
        for place, row in enumerate(rows):
            completions = batch.rows[place * group : (place + 1) * group]
            # From the rollout itself: an environment may continue the prompt of the data.
            text, ids = completions[0].prompt, completions[0].rollout.prompt_ids
            (prompt,), columns = data.rows([row])
            own = {name: values[0] for name, values in columns.items()}
            tokens = tuple(data.prompt_texts([[token] for token in ids]))
            tried.append(TriedPrompt(data.place(row), row, prompt, own, text, ids, tokens, completions))
        return Tried(tried, weights)
