"""Follows a run into TensorBoard's event files: metrics as scalars, config and completions as text.

| tag | when | what |
|---|---|---|
| a metric's name | each step | the number of ``metrics.jsonl``, as float32 |
| ``evaluation/<name>`` | each evaluation | likewise |
| ``config``, ``versions`` | the start | text |
| ``completions`` | every ``completions_every`` generation batches | text |
| ``error`` | a run that fails | text |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml
from grpox import hookimpl
from grpox.errors import redact, redacted

if TYPE_CHECKING:
    from grpox.contracts import RunContext, ScoredRollout
    from torch.utils.tensorboard import SummaryWriter

    from grpox_tensorboard.config import TensorBoardConfig

COMPARED = ("reward", "loss")
"""Metrics that stand beside the hyperparameters, with their last value."""


class TensorBoard:
    """Methods named after lifecycle hooks, called on rank 0; each names the arguments that it needs."""

    def __init__(self, config: TensorBoardConfig) -> None:
        self.config = config
        self.files = (config.folder,)  # which a new run in the same folder moves to `earlier/`
        self._writer: SummaryWriter | None = None

    @hookimpl
    def grpox_run_started(self, run: RunContext) -> None:
        """Open the event file; an error here ends the run."""
        # Imported here as it takes a second, which `grpox validate` need not wait for.
        from torch.utils.tensorboard import SummaryWriter, summary

        self._batches = 0
        self._step = 0
        self._writer = SummaryWriter(
            str(run.output_dir / self.config.folder), flush_secs=self.config.flush_seconds
        )
        config = redacted(run.config.model_dump(mode="json"))
        self._writer.add_text("config", as_code(yaml.safe_dump(config, sort_keys=False)), 0)
        versions = "\n".join(f"{name} {version}" for name, version in run.versions.items())
        self._writer.add_text("versions", as_code(versions), 0)
        events: Any = self._writer.file_writer
        hparams: Any = summary.hparams  # it has no types
        # By these the HPARAMS tab compares runs.
        for each in hparams(dict(flattened(config)), dict.fromkeys(COMPARED, 0.0)):
            events.add_summary(each)
        self._writer.flush()

    @hookimpl
    def grpox_rollouts_scored(self, step: int, rollouts: Sequence[ScoredRollout]) -> None:
        """Show the first completions of the batch, unless this batch is left out."""
        shown = self._batches % self.config.completions_every == 0
        self._batches += 1
        if shown and self.config.completions:
            text = "\n\n---\n\n".join(map(completion_text, rollouts[: self.config.completions]))
            self._open().add_text("completions", text, step)

    @hookimpl
    def grpox_step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a scalar for each metric."""
        self._step = step
        self._scalars(step, metrics)

    @hookimpl
    def grpox_evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write an evaluation's metrics under ``evaluation/``."""
        prefix = "evaluation/"
        self._scalars(step, {prefix + name.removeprefix(prefix): metrics[name] for name in metrics})

    @hookimpl
    def grpox_run_failed(self, error: BaseException) -> None:
        """Write the error and close the file."""
        if self._writer is not None:
            self._writer.add_text("error", as_code(redact(f"{type(error).__name__}: {error}")), self._step)
            self.grpox_run_finished()

    @hookimpl
    def grpox_run_finished(self) -> None:
        """Close the file, so that all is on disk."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        writer = self._open()
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            raise RuntimeError("the event file was never opened, or is closed")
        return self._writer


def flattened(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | float | str]]:
    """(dotted key, value) of every leaf: ``train.seed``, ``rewards.0.name``. null is the text ``null``."""
    for key, value in config.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, list | tuple):
            value = {str(place): item for place, item in enumerate(value)}
        if isinstance(value, Mapping):
            yield from flattened(value, f"{dotted}.")
        elif isinstance(value, bool | int | float | str):
            yield dotted, value
        else:
            yield dotted, "null" if value is None else str(value)


def as_code(text: str) -> str:
    """`text` as a block of code, every line indented: no mark in it means anything, a fence included."""
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    "


def completion_text(scored: ScoredRollout) -> str:
    """Prompt and completion, each as it is, and what the completion got."""
    rewards = ", ".join(f"{name} {_number(value)}" for name, value in scored.rewards.items())
    total = f"reward {_number(scored.reward)}, advantage {_number(scored.advantage)}"
    parts = (f"**{total}** ({rewards})", as_code(scored.prompt), "completion:", as_code(scored.completion))
    return "\n\n".join(parts)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
