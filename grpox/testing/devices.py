"""Runs a component on tensors of another device, also where the machine has none.

With a GPU, the tensors are moved there. Without one, a mode follows them: what torch computes from them, or
creates on their device, counts as being elsewhere, and an operation that mixes it with a tensor of the CPU is
refused, as CUDA does. Tensors of no dimension may be mixed, and a tensor of the CPU may index another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from grpox.errors import chain

_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
_MOVES = (Tensor.copy_, Tensor.to)


class MixedDevices(Exception):
    """An operation on tensors of two devices."""


class _Elsewhere(TorchFunctionMode):
    """Knows the tensors that are elsewhere; in truth they are on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, Tensor] = {}  # kept, so that no other tensor gets their identity

    def move(self, tensor: Tensor) -> Tensor:
        """Copy a tensor there."""
        moved = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        self._tensors[id(moved)] = moved
        return moved

    def has(self, tensor: object) -> bool:
        """Tell whether a tensor is there."""
        return id(tensor) in self._tensors

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        is_there = any(map(self.has, tensors))
        if is_there:
            self._check(function, args, tensors)
        result = function(*args, **kwargs)
        targets = [each for each in (*args, kwargs.get("device")) if isinstance(each, str | torch.device)]
        if function is Tensor.cpu or "cpu" in targets:
            return result.clone()  # of another identity, and so on the CPU
        if is_there or targets:
            self._tensors |= {id(each): each for each in tree_leaves(result) if isinstance(each, Tensor)}
        return result

    def _check(self, function: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        if function is Tensor.numpy:
            raise MixedDevices("numpy() of a tensor that is not on the CPU: call .cpu() first")
        others = [each for each in tensors if not self.has(each) and each.ndim > 0]
        if function in _INDEXING and self.has(args[0]):
            others = [each for each in others if each.dtype not in (torch.bool, torch.int64, torch.uint8)]
        if others and function not in _MOVES:
            shapes = ", ".join(str(tuple(each.shape)) for each in others)
            name = getattr(function, "__name__", function)
            raise MixedDevices(f"{name} mixes the inputs' device with a tensor {shapes} of the CPU")


def device_problem(run: Callable[[Callable[[Tensor], Tensor]], Sequence[Tensor]]) -> tuple[str, str]:
    """Run a component on another device than the CPU.

    Args:
        run: builds the component, calls it with tensors that its argument has moved, and returns its results.

    Returns:
        Why it cannot be used there, empty if it can, and a remark on the way it was run.
    """
    try:
        if torch.cuda.is_available():
            remark, results = "on a GPU", run(lambda tensor: tensor.cuda())
            home = [not each.is_cuda for each in results]
        else:
            with _Elsewhere() as elsewhere:
                remark, results = "on a device that is imitated", run(elsewhere.move)
            home = [not elsewhere.has(each) for each in results]
    except Exception as error:
        for each in chain(error):
            if isinstance(each, MixedDevices) or "same device" in str(each):
                return str(each).splitlines()[0], ""
        if torch.cuda.is_available():
            raise
        # The imitation knows less than torch: no reason to refuse a component.
        return "", f"could not be tried on another device: {type(error).__name__}"
    return ("its result is a tensor of the CPU" if any(home) else ""), remark
