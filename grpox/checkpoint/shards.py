"""How DeepSpeed's files of a checkpoint are written, at once or by a thread, and read.

DeepSpeed asks its checkpoint engine to save each file. Its own would neither sync them to the disk, nor read
them back with ``weights_only``; and what it raises on one rank would leave the others in a barrier.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from grpox.checkpoint.folders import FileFacts, Hashed
from grpox.errors import text_of
from grpox.errors.redaction import redacted
from grpox.policy.deepspeed_import import CheckpointCommitInfo, CheckpointEngine
from grpox.runtime.files import sync

DS_CONFIG = "ds_config"
"""Under which DeepSpeed keeps its configuration in each file, `deepspeed.settings` with it."""

_FORCED, _REFUSED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""What torch reads from the environment, above what a call asks for."""


class ShardFiles(CheckpointEngine):  # type: ignore[misc]
    """Writes and reads the files of DeepSpeed's engine.

    Args:
        background: only copy what is to be saved; a thread writes it while the run goes on.
    """

    def __init__(self, background: bool) -> None:
        super().__init__()
        self.name = "grpox"
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._copies: dict[str, list[torch.Tensor]] = {}
        """By file: copies that are written, whose memory is taken again: new memory takes thrice as long."""
        self._writing: list[Future[None]] = []
        self._failures: list[OSError] = []
        self._facts: dict[Path, FileFacts] = {}
        self.written: dict[Path, FileFacts] = {}
        """What the files are that `finished` waited for."""

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing is to be announced."""

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """The manifest commits the checkpoint, when all ranks have written."""
        return True

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file, or have it written. What goes wrong is told by `finished`."""
        if DS_CONFIG in state_dict:
            state_dict = {**state_dict, DS_CONFIG: redacted(state_dict[DS_CONFIG])}
        self.submit(state_dict, Path(path))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file; nothing but tensors, plain values and DeepSpeed's own loss scaler is built."""
        with only_weights():
            return torch.load(path, map_location=map_location, weights_only=True)

    def submit(self, state: Any, path: Path) -> None:
        """Write `state` to `path`, now or by the thread; what goes wrong is told by `finished`."""
        if self._thread is None:
            try:
                self._write(state, path)
            except OSError as error:
                self._failures.append(error)
        else:
            # So that the run may go on changing it.
            copies = _Copies(self._copies.pop(path.name, []))
            self._writing.append(self._thread.submit(self._write_copy, copies.of(state), path, copies.made))

    @property
    def done(self) -> bool:
        """Whether all that was to be written is."""
        return all(future.done() for future in self._writing)

    def finished(self) -> list[OSError]:
        """Wait for the thread; what could not be written."""
        for future in self._writing:
            error = future.exception()
            if isinstance(error, OSError):
                self._failures.append(error)
            elif error is not None:
                raise error
        failures = self._failures
        self.written = self._facts
        self._writing, self._failures, self._facts = [], [], {}
        return failures

    def _write_copy(self, state: Any, path: Path, copies: list[torch.Tensor]) -> None:
        try:
            self._write(state, path)
        finally:
            self._copies[path.name] = copies

    def _write(self, state: Any, path: Path) -> None:
        self._facts[path] = _write(state, path)


@contextmanager
def only_weights() -> Iterator[None]:
    """Whatever is read meanwhile, nothing but tensors, plain values and DeepSpeed's own loss scaler is built.

    For DeepSpeed's functions, which ask torch for whatever a file holds.
    """
    asked = {name: os.environ.pop(name, None) for name in (_FORCED, _REFUSED)}
    os.environ[_FORCED] = "1"
    # torch forgets all it is given when it leaves: what is allowed already, as in a call within a call, stays.
    allowed = torch.serialization.get_safe_globals()
    try:
        with torch.serialization.safe_globals([each for each in _known_classes() if each not in allowed]):
            yield
    finally:
        os.environ.pop(_FORCED, None)
        os.environ.update({name: value for name, value in asked.items() if value is not None})


def _write(state: Any, path: Path) -> FileFacts:
    with path.open("wb") as file:
        hashed = Hashed(file)
        try:
            torch.save(state, hashed)  # type: ignore[arg-type]  # it only writes and flushes
        except RuntimeError as error:
            # torch's own words for a full disk do not say so; the reason is what writing raised before.
            reason = error.__context__
            if isinstance(reason, OSError):
                raise OSError(reason.errno, reason.strerror, str(path)) from error
            raise OSError(next(iter(text_of(error).splitlines()), type(error).__name__)) from error
    sync(path)
    return hashed.facts


class _Copies:
    """Copies of the tensors of a state in this machine's memory; where they fit, in that of earlier ones.

    Args:
        old: copies of an earlier state of the same file, in their order.
    """

    def __init__(self, old: list[torch.Tensor]) -> None:
        self._old = list(reversed(old))
        self.made: list[torch.Tensor] = []

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach())
        if isinstance(value, dict):
            return {key: self.of(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.of(item) for item in value)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        old = self._old.pop() if self._old else None
        if old is not None and (old.shape, old.dtype, old.stride()) == (
            tensor.shape,
            tensor.dtype,
            tensor.stride(),
        ):
            copy = old.copy_(tensor)
        else:
            copy = tensor.to("cpu", copy=True)
        self.made.append(copy)
        return copy


def _known_classes() -> list[Any]:
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    # As Python 3.11.0 to 3.11.3 saves the members of an enum.
    of_enum = (_member, "builtins.getattr")
    return [loss_scaler.LossScaler, loss_scaler.DynamicLossScaler, ZeroStageEnum, of_enum]


def _member(of: Any, name: str) -> Enum:
    """``getattr(of, name)`` of an enum's member, and of nothing else."""
    if not (isinstance(of, type) and issubclass(of, Enum)):
        raise UnpicklingError(f"weights_only: {name} of {of} is no member of an enum")
    return of[name]
