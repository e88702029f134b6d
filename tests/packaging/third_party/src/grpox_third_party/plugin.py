"""A dataset, an optimizer, a scheduler, a reward and an observer; the module itself observes every run."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel

from grpox import ComponentSpec, hookimpl

COMPONENTS = "grpox_third_party.components"


class SumsConfig(BaseModel):
    rows: int = 81


class MomentumConfig(BaseModel):
    momentum: float = 0.9


class DiaryConfig(BaseModel):
    file: str


@hookimpl
def grpox_datasets() -> Iterable[ComponentSpec]:
    return [ComponentSpec("sums", f"{COMPONENTS}:Sums", f"{__name__}:SumsConfig", "Sums of two digits", api=1)]


@hookimpl
def grpox_optimizers() -> Iterable[ComponentSpec]:
    return [ComponentSpec("momentum", f"{COMPONENTS}:Momentum", f"{__name__}:MomentumConfig", api=1)]


@hookimpl
def grpox_schedulers() -> Iterable[ComponentSpec]:
    return [ComponentSpec("halving", f"{COMPONENTS}:Halving", api=1)]


@hookimpl
def grpox_rewards() -> Iterable[ComponentSpec]:
    return [ComponentSpec("even", f"{COMPONENTS}:even", summary="1 for an even answer", api=1)]


@hookimpl
def grpox_observers() -> Iterable[ComponentSpec]:
    return [ComponentSpec("diary", f"{COMPONENTS}:Diary", f"{__name__}:DiaryConfig", api=1)]


@hookimpl
def grpox_run_finished(summary) -> None:
    Path("every-run.txt").write_text(str(summary["steps"]))
