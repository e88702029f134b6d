"""`train.deterministic`: the update computes the same bits again on the same GPUs, wherever torch can.

On a CPU it already does. https://docs.pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from grpox.errors import ConfigError, RunFailed, text_of
from grpox.runtime.setup import preserve_env

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""Values with which cuBLAS gives the same sums on every call; the second needs less memory and is slower."""
FLASH = "FLASH_ATTENTION_DETERMINISTIC"
"""Variable from which transformers tells flash attention to sum in a fixed order."""
NO_SUCH_ALGORITHM = "deterministic"
"""Word of torch's errors about an operation that it computes in no fixed order."""


def prepare_determinism() -> None:
    """Give cuBLAS a workspace with which its sums are the same on every call; call before CUDA is used.

    Raises:
        ConfigError: the user has set another workspace, or has used CUDA without one: torch reads the variable
            once, at the first product.
    """
    cure = " or ".join(WORKSPACES)
    if WORKSPACE not in os.environ and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        what = (
            "train.deterministic is true, but this process has already used CUDA without this variable, which "
            "torch reads only once: set it before CUDA is used, or train in a new process"
        )
        raise ConfigError(what, WORKSPACE, given="not set", allowed=cure)
    given = os.environ.setdefault(WORKSPACE, WORKSPACES[0])
    if given not in WORKSPACES:
        what = "with this value cuBLAS gives different sums from call to call, but train.deterministic is true"
        raise ConfigError(what, WORKSPACE, given=given, allowed=cure)


def check_determinism(generator: str, has_own_numerics: bool, device: torch.device) -> None:
    """Refuse a generator whose results on a GPU grpox cannot fix.

    Args:
        has_own_numerics: it declares `Capability.OTHER_NUMERICS`.

    Raises:
        ConfigError: it computes outside of the training process's torch.
    """
    if has_own_numerics and device.type == "cuda":
        what = (
            f"generator '{generator}' cannot honour it on a GPU: its engine batches requests as they come, and "
            "their numbers depend on the batch"
        )
        raise ConfigError(what, "train.deterministic", given="true", allowed="false, or generator: hf")


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Let torch use only operations with a fixed order within this block.

    Raises:
        RunFailed: an operation has no such form.
    """
    settings: Any = torch.utils.deterministic
    before, fills = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    with preserve_env(FLASH):
        os.environ[FLASH] = "1"
        torch.set_deterministic_debug_mode("error")
        # It would write NaN into every new buffer, and the padding of DeepSpeed's buffers is summed.
        settings.fill_uninitialized_memory = False
        try:
            yield
        except RuntimeError as error:
            text = " ".join(text_of(error).split())
            if NO_SUCH_ALGORITHM not in text.lower():
                raise
            raise RunFailed(f"train.deterministic is true, and torch cannot honour it: {text[:300]}") from error
        finally:
            torch.set_deterministic_debug_mode(before)
            settings.fill_uninitialized_memory = fills
