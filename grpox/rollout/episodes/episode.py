"""One open episode: its tokens, which are only ever appended to, and its conversation."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpox.contracts import Episode, Message, Prompt, Rollout, ToolResult, Turn
from grpox.rollout.episodes.messages import EpisodeOutcome, Lost


@dataclass
class OpenEpisode:
    """An episode between its first wave and its end."""

    key: int
    """Its environment's key."""
    group_id: int
    sample: int
    row: int
    """The prompt's row of the dataset."""
    environment: int
    """Place of its environment in the run's list."""
    prompt_ids: tuple[int, ...] = ()
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    """True for tokens that the model wrote."""
    logprobs: list[float] | None = field(default_factory=list)
    """Log-probability of each token, NaN where the model did not write; None if the generator gave none."""
    turns: list[Turn] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    results: list[ToolResult] = field(default_factory=list)
    cut: int = 0
    """Number of messages of its environment that were cut off."""
    state_key: str | None = None
    """Key of the state in which its next turn begins."""
    reason: str = ""
    """Reason for its end; empty while it is open."""
    lost: str = ""
    """Reason if its environment's process ended."""
    failure: str = ""
    """Exception that its environment raised, as text."""
    begun: float = field(default_factory=time.perf_counter)

    def add_turn(self, rollout: Rollout, begin: float, end: float) -> None:
        """Append a turn of the model, sampled between two times of `time.perf_counter`."""
        start = len(self.ids)
        self.ids += rollout.completion_ids
        self.mask += [True] * len(rollout.completion_ids)
        if rollout.sampler_logprobs is None:
            self.logprobs = None
        elif self.logprobs is not None:
            self.logprobs += rollout.sampler_logprobs
        self.turns.append(
            Turn(start, len(self.ids), rollout.finish_reason, rollout.policy_version, state_key=self.state_key)
        )
        self.times.append((begin - self.begun, end - self.begun))

    def add_bridge(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the model did not write."""
        self.ids += token_ids
        self.mask += [False] * len(token_ids)
        if self.logprobs is not None:
            self.logprobs += [math.nan] * len(token_ids)

    def closed(self, label: str, outcome: EpisodeOutcome | Lost, weight: float) -> Rollout:
        """Return the ended episode as a rollout.

        Args:
            label: of its environment.
            outcome: what the environment said at the end.
            weight: factor of its own reward.
        """
        rewards: Mapping[str, float] | None = None
        info: Mapping[str, Any] = {}
        turns = list(self.turns)
        if isinstance(outcome, Lost):
            self.lost = self.lost or outcome.reason
        else:
            info, self.failure = outcome.info, self.failure or outcome.failure
            if not self.failure:
                rewards = outcome.rewards
                for place, reward in enumerate(outcome.turn_rewards):
                    turns[place] = replace(turns[place], reward=reward)
        return Rollout(
            group_id=self.group_id,
            sample=self.sample,
            prompt_ids=self.prompt_ids,
            completion_ids=tuple(self.ids),
            finish_reason="error" if self.lost or self.failure else self.reason,
            policy_version=min(turn.policy_version for turn in turns),
            sampler_logprobs=None if self.logprobs is None else tuple(self.logprobs),
            model_mask=None if all(self.mask) else tuple(self.mask),
            turns=tuple(turns),
            episode=Episode(
                environment=label,
                messages=tuple(self.messages),
                results=tuple(self.results),
                rewards=rewards,
                weight=weight,
                info=info,
                cut=self.cut,
                times=tuple(self.times),
                failure=self.failure,
                lost=self.lost,
            ),
        )

    def prompt(self, number: int, seed: int, max_tokens: int) -> Prompt:
        """Return the request for its next turn, as a group of its own."""
        ids = (*self.prompt_ids, *self.ids)
        return Prompt(number, ids, 1, seed, max_tokens, self.row)
