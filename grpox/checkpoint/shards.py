"""A checkpoint's files of weights, DeepSpeed's and the reference's: written at once or by a thread, and read.

DeepSpeed asks its checkpoint engine to save each file. Its own would neither sync them to the disk, nor read
them back with ``weights_only``; and what it raises on one rank would leave the others in a barrier."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from grpox.checkpoint.folders import FileFacts, Hashed
from grpox.checkpoint.rank_state import read_state
from grpox.errors import text_of
from grpox.errors.redaction import redacted
from grpox.policy.deepspeed_import import CheckpointCommitInfo, CheckpointEngine
from grpox.policy.weight_stream import persistent_buffers, stream_weights
from grpox.runtime.files import sync
from grpox.runtime.setup import variables_kept
from grpox.runtime.world import World

if TYPE_CHECKING:
    from grpox.update.policy_update import PolicyUpdate


DS_CONFIG = "ds_config"
"""Under which DeepSpeed keeps its configuration in each file, `deepspeed.settings` with it."""

_FORCED, _REFUSED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""What torch reads from the environment, above what a call asks for."""

REFERENCE = "reference.pt"


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
        self._writing: dict[Path, tuple[Future[FileFacts], list[torch.Tensor]]] = {}
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
        copies: list[torch.Tensor] = []
        if self._thread is None:
            future: Future[FileFacts] = Future()
            try:
                future.set_result(_write(state, path))
            except OSError as error:
                future.set_exception(error)
        else:
            # So that the run may go on changing it.
            copied = _copied(state, iter(self._copies.pop(path.name, [])), copies)
            future = self._thread.submit(_write, copied, path)
        self._writing[path] = future, copies

    @property
    def done(self) -> bool:
        """Whether all that was to be written is."""
        return all(future.done() for future, _ in self._writing.values())

    def finished(self) -> list[OSError]:
        """Wait for the thread; what could not be written."""
        failures: list[OSError] = []
        writing, self._writing, self.written = self._writing, {}, {}
        for path, (future, copies) in writing.items():
            error = future.exception()
            if error is None:
                self.written[path] = future.result()
            elif isinstance(error, OSError):
                failures.append(error)
            else:
                raise error
            self._copies[path.name] = copies
        return failures


@contextmanager
def only_weights() -> Iterator[None]:
    """Whatever is read meanwhile, nothing but tensors, plain values and DeepSpeed's own loss scaler is built.

    For DeepSpeed's functions, which ask torch for whatever a file holds.
    """
    with variables_kept(_FORCED, _REFUSED):
        os.environ.pop(_REFUSED, None)
        os.environ[_FORCED] = "1"
        # torch forgets all it is given when it leaves: what is allowed already, as in a call in a call, stays.
        allowed = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([each for each in _known_classes() if each not in allowed]):
            yield


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


def _copied(value: Any, old: Iterator[torch.Tensor], copies: list[torch.Tensor]) -> Any:
    """Copy a state into this machine's memory; where its tensors fit, into that of earlier copies.

    Args:
        old: copies of an earlier state of the same file, in their order.
        made: gets the copies.
    """
    if isinstance(value, dict):
        return {key: _copied(item, old, copies) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item, old, copies) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    tensor, before = value.detach(), next(old, None)
    if before is not None and _layout(before) == _layout(tensor):
        copies.append(before.copy_(tensor))
    else:
        copies.append(tensor.to("cpu", copy=True))
    return copies[-1]


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()


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


def write_reference(policy: PolicyUpdate, folder: Path, shards: ShardFiles, world: World) -> None:
    """Gather its weights and write them on rank 0, whole; a collective."""
    if policy.reference is None or policy.reference_sync is None:
        return
    weights = {}
    for name, tensor in stream_weights(policy.reference.module):
        if world.is_main:
            weights[name] = tensor.to("cpu", copy=True)
    if world.is_main:
        shards.submit(weights, folder / REFERENCE)


@torch.no_grad()
def read_reference(policy: PolicyUpdate, folder: Path, world: World) -> None:
    """Put back what `write_reference` wrote; a collective."""
    from deepspeed import zero

    if policy.reference is None or policy.reference_sync is None:
        return
    weights = read_state(folder / REFERENCE) if world.is_main else {}
    for name, parameter in policy.reference.module.named_parameters():
        # With a modifier rank the values that rank 0 leaves are sharded anew over all ranks.
        with zero.GatheredParameters([parameter], modifier_rank=0):
            if world.is_main:
                parameter.copy_(weights[name])
    for name, buffer in persistent_buffers(policy.reference.module):
        if world.is_main:
            buffer.copy_(weights[name])
        if world.size > 1:
            dist.broadcast(buffer, src=0)
