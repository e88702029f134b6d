"""Runs a component on tensors of another device, also where the machine has none.

With a GPU, the tensors are moved there. Without one, a mode knows the tensors of the CPU: those that were there
before, and those that torch computes from them, or creates on the CPU. All others count as being elsewhere, and
an operation that mixes the two is refused, as CUDA does. Tensors of no dimension may be mixed, and a tensor of
the CPU may index another, or be copied into it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from grpox.errors import chain

_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
_MOVES = (Tensor.copy_, Tensor.to, Tensor.type_as)
_CPU, _ELSEWHERE = torch.device("cpu"), torch.device("cpu", 0)
"""The CPU, and the device that tensors elsewhere report: to torch they are the same."""


class MixedDevices(Exception):
    """An operation on tensors of two devices."""


class _Elsewhere(TorchFunctionMode):
    """Knows the tensors of the CPU; in truth the others are there too."""

    def __init__(self) -> None:
        super().__init__()
        tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
        self._here = {id(each): each for each in tensors}  # kept, so that no other tensor gets their identity

    def move(self, tensor: Tensor) -> Tensor:
        """Copy a tensor there."""
        moved = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        self._here.pop(id(moved), None)
        return moved

    def has(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is there."""
        return id(tensor) not in self._here

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        is_there = any(map(self.has, tensors))
        if is_there and function == Tensor.device.__get__:
            return _ELSEWHERE
        if is_there:
            self._check(function, args, tensors)
        result = function(*args, **kwargs)
        named = [each for each in args if isinstance(each, torch.device) or function is Tensor.to]
        named += ["cpu"] if function is Tensor.cpu else [kwargs.get("device")]
        targets = [torch.device(each) for each in named if isinstance(each, str | torch.device)]
        if function in (Tensor.to, Tensor.type_as):
            targets += [_ELSEWHERE if self.has(each) else _CPU for each in args[1:] if isinstance(each, Tensor)]
        is_same = any(result is each for each in tensors)
        if is_same and not targets:  # changed in place
            return result
        if targets:
            is_there, result = _CPU not in targets, result.clone() if is_same else result
        results = {id(each): each for each in tree_leaves(result) if isinstance(each, Tensor)}
        for identity in results if is_there else ():
            self._here.pop(identity, None)
        self._here |= {} if is_there else results
        return result

    def _check(self, function: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        if function in (Tensor.numpy, Tensor.__array__):
            raise MixedDevices("numpy() of a tensor that is not on the CPU: call .cpu() first")
        others = [each for each in tensors if not self.has(each) and each.ndim > 0]
        if function in _INDEXING and self.has(args[0]):
            is_copy = not any(isinstance(each, Tensor) for each in tree_leaves(args[1]))
            kinds = (torch.bool, torch.int64, torch.uint8)
            others = [each for each in others if each.dtype not in kinds and not is_copy]
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
            # torch.from_numpy passes by the mode.
            with _Elsewhere() as elsewhere, patch.object(torch, "from_numpy", torch.as_tensor):
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
