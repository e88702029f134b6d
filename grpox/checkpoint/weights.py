"""The weights of a checkpoint, whole, out of the shards of all ranks; without an engine or other ranks."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from torch import Tensor

from grpox.checkpoint.saver import ENGINE
from grpox.checkpoint.shards import only_weights


def whole_weights(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight in float32, under its name; tied ones under each of their names.

    The shards stay on disk until they are asked for: one weight at a time is in memory.
    """
    from deepspeed.utils import zero_to_fp32

    with only_weights(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        sharded = zero_to_fp32._get_fp32_state_dict_from_zero_checkpoint(
            str(checkpoint / ENGINE), exclude_frozen_parameters=False
        )
    for name, weight in sharded.items():
        yield name, weight.contiguous()
