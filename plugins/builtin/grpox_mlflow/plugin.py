"""The plugin: the observer ``mlflow``, and the commands ``runs`` and ``sync``."""

from __future__ import annotations

from collections.abc import Iterable

from grpox import CommandSpec, ComponentSpec, hookimpl


@hookimpl
def grpox_observers() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        name="mlflow",
        target="grpox_mlflow.tracker:MlflowTracker",
        config="grpox_mlflow.configs:MlflowConfig",
        summary="Parameters, metrics and completions in MLflow; local SQLite by default",
        source="https://mlflow.org",
    )


@hookimpl
def grpox_commands() -> Iterable[CommandSpec]:
    yield CommandSpec(
        name="runs",
        target="grpox_mlflow.commands:runs_app",
        help="List, show, compare and open runs, from their folders. Writes nothing.",
    )
    yield CommandSpec(
        name="sync",
        target="grpox_mlflow.commands:sync",
        help="Write to MLflow the missing data of a run whose server was unreachable for a time.",
    )
