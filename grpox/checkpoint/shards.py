"""A checkpoint's files of weights, DeepSpeed's and the reference's: written at once or by a thread, and read.

DeepSpeed's own checkpoint engine neither syncs files to the disk nor reads them with ``weights_only``, and its
errors on one rank leave the others in a barrier.
"""

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
from grpox.checkpoint.save_model import weights_on_main
from grpox.errors import text_of
from grpox.errors.redaction import redacted
from grpox.policy.deepspeed_import import CheckpointCommitInfo, CheckpointEngine
from grpox.policy.weight_stream import persistent_buffers, stream_weights
from grpox.runtime.files import sync
from grpox.runtime.setup import preserve_env
from grpox.runtime.world import World

if TYPE_CHECKING:
    from grpox.update.policy_update import PolicyUpdate

DS_CONFIG = "ds_config"
"""Key of DeepSpeed's configuration in each file, which includes `deepspeed.settings`."""

_FORCED, _REFUSED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""Environment variables of torch that override the arguments of a call."""

REFERENCE = "reference.pt"


class ShardFiles(CheckpointEngine):  # type: ignore[misc]
    """Writes and reads the files of DeepSpeed's engine.

    Args:
        background: copy the state; a thread writes it while the run goes on.
    """

    def __init__(self, background: bool) -> None:
        super().__init__()
        self.name = "grpox"
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._copies: dict[str, list[torch.Tensor]] = {}
        """File name -> written copies, whose memory is reused: new memory takes thrice as long."""
        self._writing: dict[Path, tuple[Future[FileFacts], list[torch.Tensor]]] = {}
        self.written: dict[Path, FileFacts] = {}
        """Facts of the files that `finished` waited for."""

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: DeepSpeed announces a checkpoint."""

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return True: the manifest commits the checkpoint, when all ranks have written."""
        return True

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file, now or by the thread; `finished` returns its error."""
        if DS_CONFIG in state_dict:
            state_dict = {**state_dict, DS_CONFIG: redacted(state_dict[DS_CONFIG])}
        self.submit(state_dict, Path(path))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file, with the classes of `only_weights`."""
        with only_weights():
            return torch.load(path, map_location=map_location, weights_only=True)

    def submit(self, state: Any, path: Path) -> None:
        """Write `state` to `path`, now or by the thread; `finished` returns its error."""
        copies: list[torch.Tensor] = []
        if self._thread is None:
            future: Future[FileFacts] = Future()
            try:
                future.set_result(_write(state, path))
            except OSError as error:
                future.set_exception(error)
        else:
            # A copy, because the run goes on changing the state.
            copied = _copied(state, iter(self._copies.pop(path.name, [])), copies)
            future = self._thread.submit(_write, copied, path)
        self._writing[path] = future, copies

    @property
    def done(self) -> bool:
        """True if all files are written."""
        return all(future.done() for future, _ in self._writing.values())

    def finished(self) -> list[OSError]:
        """Wait for the thread, and return the errors of files that could not be written."""
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
    """Let torch build nothing but tensors, plain values and DeepSpeed's loss scaler during the block.

    DeepSpeed's own functions would let torch build any object in a file.
    """
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    with preserve_env(_FORCED, _REFUSED):
        os.environ.pop(_REFUSED, None)
        os.environ[_FORCED] = "1"
        # Python 3.11.0 to 3.11.3 saves members of an enum by getattr.
        of_enum: Any = (_member, "builtins.getattr")
        known = [loss_scaler.LossScaler, loss_scaler.DynamicLossScaler, ZeroStageEnum, of_enum]
        # On exit torch removes all classes in its list, so classes of an outer block are not in it.
        allowed = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([each for each in known if each not in allowed]):
            yield


def _write(state: Any, path: Path) -> FileFacts:
    with path.open("wb") as file:
        hashed = Hashed(file)
        try:
            torch.save(state, hashed)  # type: ignore[arg-type]  # it only writes and flushes
        except RuntimeError as error:
            # torch's message does not mention a full disk; the context does.
            reason = error.__context__
            if isinstance(reason, OSError):
                raise OSError(reason.errno, reason.strerror, str(path)) from error
            raise OSError(next(iter(text_of(error).splitlines()), type(error).__name__)) from error
    sync(path)
    return hashed.facts


def _copied(value: Any, old: Iterator[torch.Tensor], copies: list[torch.Tensor]) -> Any:
    """Copy a state into this machine's memory; where its tensors fit, into that of `old` copies, in order."""
    if isinstance(value, dict):
        return {key: _copied(item, old, copies) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item, old, copies) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    tensor, before = value.detach(), next(old, None)
    layout = tensor.shape, tensor.dtype, tensor.stride()
    fits = before is not None and layout == (before.shape, before.dtype, before.stride())
    copies.append(before.copy_(tensor) if before is not None and fits else tensor.to("cpu", copy=True))
    return copies[-1]


def _member(of: Any, name: str) -> Enum:
    """Return ``getattr(of, name)`` for a member of an enum; refuse anything else."""
    if not (isinstance(of, type) and issubclass(of, Enum)):
        raise UnpicklingError(f"weights_only: {name} of {of} is no member of an enum")
    return of[name]


def write_reference(policy: PolicyUpdate, folder: Path, shards: ShardFiles, world: World) -> None:
    """Gather the weights of a synced reference and write them on rank 0; a collective."""
    if policy.reference is None or policy.reference_sync is None:
        return
    weights = weights_on_main(stream_weights(policy.reference.module), world)
    if world.is_main:
        shards.submit(weights, folder / REFERENCE)


@torch.no_grad()
def read_reference(policy: PolicyUpdate, folder: Path, world: World) -> None:
    """Load the file of `write_reference`; a collective."""
    from deepspeed import zero

    if policy.reference is None or policy.reference_sync is None:
        return
    weights = read_state(folder / REFERENCE) if world.is_main else {}
    for name, parameter in policy.reference.module.named_parameters():
        # With a modifier rank, rank 0's values are sharded over all ranks on exit.
        with zero.GatheredParameters([parameter], modifier_rank=0):
            if world.is_main:
                parameter.copy_(weights[name])
    for name, buffer in persistent_buffers(policy.reference.module):
        if world.is_main:
            buffer.copy_(weights[name])
        if world.size > 1:
            dist.broadcast(buffer, src=0)
