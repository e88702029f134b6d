"""A config as TensorBoard's hyperparameters, by which its HPARAMS tab compares runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

COMPARED = ("reward", "loss")
"""Metrics that stand beside the hyperparameters, with their last value."""


def hyperparameters(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Three summaries that tell the HPARAMS tab of a run, to be added to its event file."""
    from torch.utils.tensorboard import summary

    hparams: Any = summary.hparams  # it has no types
    return tuple(hparams(dict(flattened(config)), dict.fromkeys(COMPARED, 0.0)))


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
