"""The plugin: one observer, ``mlflow``."""

from __future__ import annotations

from collections.abc import Iterable

from grpox.plugins.hookspecs import ComponentSpec, hookimpl


@hookimpl
def grpox_observers() -> Iterable[ComponentSpec]:
    return (
        ComponentSpec(
            name="mlflow",
            target="grpox_mlflow.tracker:MlflowTracker",
            config="grpox_mlflow.configs:MlflowConfig",
            summary="Parameters, metrics and completions in MLflow; local SQLite by default",
            source="https://mlflow.org",
        ),
    )
