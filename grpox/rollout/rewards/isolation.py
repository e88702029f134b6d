"""A run's reward functions: each built in the trainer or in a process of its own, and bound to its data."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from grpox.config import RewardRef, labels_of
from grpox.data.reward_signature import column_problem, lacking, nested_columns
from grpox.errors import ConfigError, Problem, join, text_of
from grpox.plugins.component import BoundComponent
from grpox.plugins.requirements import canonical_name
from grpox.rollout.rewards.call import current_device
from grpox.rollout.rewards.messages import RewardSpec
from grpox.rollout.rewards.named import NamedReward
from grpox.rollout.rewards.process import RewardProcess
from grpox.runtime import launch
from grpox.runtime.logs import get_logger

if TYPE_CHECKING:
    from grpox.data.prompts import PromptSet
    from grpox.runfile.load import ResolvedRun

Isolation = Literal["process", "thread"]
OF_TRAINING, OF_EVALUATION = "rewards", "evaluation.rewards"
"""The lists of reward functions that a run file may have."""


def isolation_of(bound: BoundComponent, ref: RewardRef, given: bool) -> Isolation:
    """Return the isolation that the run file asks for, else the function's own attribute `isolation`.

    By default a function named by path, and one of a plugin that is not grpox's own, gets a process.

    Args:
        given: True if it is an object given in Python.

    Raises:
        ConfigError: a process is asked for, and cannot be.
    """
    own = bound.offer is not None and canonical_name(bound.offer.distribution) == "grpox"
    declared = None if given or own else getattr(bound.load(), "isolation", None)
    if ref.isolation == "process":
        why = "is an object given in Python, which no other process has" if given else ""
        if declared == "thread":
            why = "says of itself that it needs the trainer's process (its attribute isolation is 'thread')"
        if why:
            what = f"reward '{bound.label}' {why}"
            raise ConfigError(what, f"{bound.key}.isolation", given="process", allowed="thread")
    default: Isolation = "thread" if given or own or declared == "thread" else "process"
    return ref.isolation or default


def started(bound: BoundComponent, ref: RewardRef) -> RewardProcess:
    """Start the process of a function, which begins to build it; see `RewardProcess.ready`.

    Raises:
        ConfigError: its parameters cannot be sent there.
    """
    offer = bound.offer
    target = offer.spec.target if offer is not None else ref.path
    try:
        config = pickle.dumps(bound.config)
    except Exception as error:
        what = f"{bound}: its parameters cannot be pickled, as a process of its own needs: {text_of(error)}"
        raise ConfigError(what, bound.key, allowed="isolation: thread") from error
    blueprint = RewardSpec(
        label=bound.label,
        key=bound.key,
        target=str(target),
        from_file=offer is None,
        config=config,
        import_path=tuple(sys.path),
        device=current_device(),
    )
    return RewardProcess(blueprint, ref.timeout, ref.memory)


@contextmanager
def reward_functions(run: ResolvedRun, key: str = OF_TRAINING) -> Iterator[list[Any]]:
    """Build the reward functions of a run, in order; their processes build side by side and end with the block.

    Args:
        key: the list in the run file; that of the evaluation may be missing, and then nothing is built.

    Raises:
        ConfigError: a function cannot be built, or not in the place that the run file asks for.
    """
    functions: list[Any] = []
    own = run.config.evaluation.rewards if run.config.evaluation is not None else None
    refs = run.config.rewards if key == OF_TRAINING else own or []
    try:
        for place, ref in enumerate(refs):
            bound = run.components[f"{key}[{place}]"]
            objects = {*run.given.functions, *run.given.reward_models}
            apart = isolation_of(bound, ref, bound.key in objects) == "process"
            functions.append(started(bound, ref) if apart else run.build(bound.key))
        yield functions
    finally:
        for function in functions:
            if isinstance(function, RewardProcess):
                function.close()


def check_scored_rows(run: ResolvedRun, key: str, prompts: PromptSet) -> None:
    """Check each row of the data that the functions under `key` score; of a stream only the first.

    Raises:
        ConfigError: no row has a nested column that a function reads, or a function's config refuses a row.
    """
    problems: list[Problem] = []
    for bound in (each for each in run.components.values() if each.key.startswith(f"{key}[")):
        needs = getattr(bound.config, "reads_columns", ())
        nested = [name for name in needs if "." in name and name not in prompts.column_names]
        for name in nested if prompts.stream is None else ():
            if all(row.get(name) is None for _, row in _rows(prompts, needs)):
                first = next(_rows(prompts, ()))[1]
                inner = [f"{n}.{part}" for n, v in first.items() if isinstance(v, dict) for part in v]
                problems.append(column_problem(bound.label, name, [*first, *inner], bound.key, prompts.data))
        for finding in getattr(bound.config, "check_rows", lambda _: ())(_rows(prompts, needs)):
            if isinstance(finding, Problem):
                problems.append(replace(finding, key=join(bound.key, finding.key)))
            elif launch.rank() == 0:
                get_logger(__name__).warning(f"reward '{bound.label}': {finding}")
    if problems:
        raise ConfigError(problems)


def _rows(prompts: PromptSet, needs: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and columns of each row, with the nested columns among `needs`."""
    count = len(prompts) if prompts.stream is None else 1
    for start in range(0, count, 1000):
        indices = range(start, min(start + 1000, count))
        for index, row in zip(indices, prompts.columns_of(indices), strict=True):
            nested = nested_columns(needs, {name: [value] for name, value in row.items()})
            yield prompts.place(index), row | {name: value for name, (value,) in nested.items()}


def bind_rewards(
    refs: Sequence[RewardRef], functions: Sequence[Any], prompts: PromptSet, key: str = OF_TRAINING
) -> list[NamedReward]:
    """Bind the functions that `refs` name to their weights, limits and data.

    Args:
        functions: in the same order.
        prompts: the data to score.
        key: under which the run file lists them.

    Raises:
        ConfigError: a function needs a column that the data lacks.
    """
    rewards = [
        NamedReward(label, function, ref.weight, ref.on_error, ref.timeout)
        for label, function, ref in zip(labels_of(refs), functions, refs, strict=True)
    ]
    columns = prompts.column_names
    problems = [
        column_problem(reward.label, name, columns, key, prompts.data)
        for reward in rewards
        for name in lacking(reward.signature.needs, columns)
    ]
    if problems:
        raise ConfigError(problems)
    for place, reward in enumerate(rewards):
        try:
            _ = reward.lists
        except ValueError as error:
            raise ConfigError(f"reward '{reward.label}' {error}", f"{key}[{place}]") from error
    return rewards
