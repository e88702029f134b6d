"""The episodes of a run: its environments, the descriptions of their tools, and the loop of turns."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from grpox.config.sampling import sampling_of
from grpox.data.chat import Schema
from grpox.data.prompts import PromptSet, ToolsOfRow
from grpox.environments import Environment
from grpox.environments.contract import overrides, tools_of
from grpox.environments.from_factory import as_environment
from grpox.environments.schemas import method_schema, tool_schema
from grpox.rollout.episodes.messages import Environments, EnvironmentSpec
from grpox.rollout.episodes.pool import open_environments
from grpox.rollout.episodes.turn_tokens import TurnTokens
from grpox.rollout.episodes.waves import EpisodeLoop
from grpox.runfile.data_files import EnvironmentOfRow
from grpox.runfile.environments import bound_environments, bound_tools
from grpox.runfile.load import ResolvedRun
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World


class RunEpisodes:
    """The environments and tools of a run, open on this rank; None: only data is checked, without a `loop`."""

    def __init__(self, run: ResolvedRun, environments: Environments | None) -> None:
        self.environments = environments
        self._run = run
        self._bound = bound_environments(run)
        self._environment_of: dict[PromptSet, EnvironmentOfRow] = {}
        self._tokens: dict[PromptSet, TurnTokens] = {}

    @cached_property
    def _classes(self) -> list[type[Environment]]:
        return [as_environment(each.component.load()) for each in self._bound]

    @cached_property
    def _schemas(self) -> list[list[Schema]]:
        """Descriptions of the tools of each environment."""
        functions = [
            tool_schema(each.function, each.name, f"tools[{place}]")
            for place, each in enumerate(bound_tools(self._run))
        ]
        return [
            functions + [method_schema(kind, name, each.component.key) for name in tools_of(kind)]
            for kind, each in zip(self._classes, self._bound, strict=True)
        ]

    def place_of(self, prompts: PromptSet, row: int) -> int:
        """Return the place of a row's environment in the run's list; raises as `EnvironmentOfRow`."""
        return self._environments_of(prompts)(row)

    def _environments_of(self, prompts: PromptSet) -> EnvironmentOfRow:
        if prompts not in self._environment_of:
            self._environment_of[prompts] = EnvironmentOfRow([each.when for each in self._bound], prompts)
        return self._environment_of[prompts]

    def tools_of(self, prompts: PromptSet) -> ToolsOfRow:
        """Return the function that finds the descriptions of the tools in a row of the data."""
        return lambda row: self._schemas[self.place_of(prompts, row)]

    def tokens_of(self, prompts: PromptSet) -> TurnTokens:
        """Return the tokens of a dataset's prompts and turns.

        Raises:
            ConfigError: the chat template cannot be used for episodes.
        """
        if prompts not in self._tokens:
            every = {schema["function"]["name"]: schema for schemas in self._schemas for schema in schemas}
            has_parse = all(overrides(kind, "parse") for kind in self._classes)
            episodes = self._run.config.episodes
            longest, allows = episodes.max_observation_tokens, episodes.allow_special_tokens
            self._tokens[prompts] = TurnTokens(prompts, list(every.values()), has_parse, longest, allows)
        return self._tokens[prompts]

    def check(self, prompts: PromptSet) -> None:
        """Check that each row of the data has an environment, and that the chat template fits episodes.

        Raises:
            ConfigError: see `EnvironmentOfRow` and `TurnTokens`.
        """
        self._environments_of(prompts)
        self.tokens_of(prompts)

    def loop(self, world: World, times: PhaseTimes, stop_token_ids: Sequence[int]) -> EpisodeLoop:
        """Return the loop that samples episodes on this rank.

        Raises:
            ConfigError: the model ends its turns differently from the chat template of the checked data.
        """
        config = self._run.config
        assert self.environments is not None
        own = [] if config.evaluation is None else [sampling_of(config.evaluation, config.sampling)]
        for sampling in (config.sampling, *own):
            for tokens in self._tokens.values():
                tokens.check_stops({*stop_token_ids, *sampling.stop_token_ids}, sampling.stop)
        labels = [each.label for each in self._bound]
        weights = [each.weight for each in self._bound]
        rows = self.place_of, self.tokens_of
        return EpisodeLoop(config.episodes, self.environments, labels, weights, *rows, world, times)


@contextmanager
def opened_episodes(run: ResolvedRun) -> Iterator[RunEpisodes]:
    """Open the environments of a run, which end with the block.

    Raises:
        ConfigError: an environment or tool cannot be used.
    """
    blueprints = []
    for bound in bound_environments(run) if run.config.environments else ():
        component = bound.component
        target: Any = component.load()
        if not bound.given:
            path = run.config.environments[component.key].path
            target = component.offer.spec.target if component.offer is not None else path
        blueprints.append(EnvironmentSpec(bound.label, component.key, target, pickle.dumps(component.config)))
    functions = [
        EnvironmentSpec(each.name, f"tools[{place}]", each.function if each.given else each.reference)
        for place, each in enumerate(bound_tools(run))
    ]
    environments = open_environments(blueprints, functions, run.config.episodes)
    try:
        yield RunEpisodes(run, environments)
    finally:
        environments.close()
