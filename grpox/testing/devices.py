"""Runs a component on tensors of another device, also where the machine has none.

With a GPU, the tensors are moved there. Without one, they are wrapped: the wrapper reports another device, has
its numbers on the CPU, and refuses an operation that mixes it with a tensor of the CPU, as CUDA does. Tensors
of no dimension may be mixed, and a tensor of the CPU may index another, as with CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from grpox.errors import chain

_ELSEWHERE = torch.device("meta")
"""The device that wrapped tensors report: one of which every build of torch knows that it is not the CPU."""
_INDEXING = (
    "aten.index.Tensor",
    "aten.index_put_.default",
    "aten.index_put.default",
    "aten._index_put_impl_.default",
)


_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, Tensor.new_tensor)


class MixedDevices(Exception):
    """An operation on tensors of two devices."""


class _Elsewhere(Tensor):
    """A tensor that seems to be on another device."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> _Elsewhere:
        """Wrap a tensor of the CPU."""
        wrapper: _Elsewhere = Tensor._make_wrapper_subclass(
            cls, numbers.shape, strides=numbers.stride(), dtype=numbers.dtype, device=_ELSEWHERE
        )
        wrapper.numbers = numbers
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute with the numbers, on the CPU."""
        return _dispatch(function, args, kwargs or {})


class _Factories(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Wraps the tensors that are created on the other device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare the import of torch's compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(function, args, kwargs or {})


class _Reads(TorchFunctionMode):
    """Lets Python read the numbers, which it does past torch's dispatch."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in (Tensor.tolist, Tensor.numpy) and isinstance(args[0], _Elsewhere):
            if function is Tensor.numpy:
                raise MixedDevices("numpy() of a tensor that is not on the CPU: call .cpu() first")
            args = (args[0].numbers,)
        kwargs = kwargs or {}
        own = getattr(args[0], "device", None) if function is Tensor.new_tensor else None
        target = kwargs.get("device", own)
        if function in _FROM_NUMBERS and target is not None and torch.device(target) == _ELSEWHERE:
            # torch would make a tensor without numbers.
            return _Elsewhere(function(*map(_unwrap, args), **{**kwargs, "device": torch.device("cpu")}))
        return function(*args, **kwargs)


def _dispatch(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    wrapped = [each for each in tensors if isinstance(each, _Elsewhere)]
    _check_mixture(function, args, tensors, wrapped)
    target = kwargs.get("device")
    is_elsewhere = bool(wrapped) if target is None else torch.device(target) == _ELSEWHERE
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain_args, plain_kwargs = tree_map(_unwrap, (tuple(args), kwargs))
    result = function(*plain_args, **plain_kwargs)
    same = {id(each.numbers): each for each in wrapped}
    return tree_map(lambda each: _wrap(each, same), result) if is_elsewhere else result


def _check_mixture(
    function: Any, args: Sequence[Any], tensors: list[Tensor], wrapped: list[_Elsewhere]
) -> None:
    is_index = str(function) in _INDEXING and isinstance(args[0], _Elsewhere)
    allowed = (torch.bool, torch.int64, torch.uint8) if is_index else ()
    others = [each for each in tensors if not isinstance(each, _Elsewhere) and each.ndim > 0]
    strangers = [each for each in others if each.dtype not in allowed]
    if wrapped and strangers and "copy_" not in str(function):
        shapes = ", ".join(str(tuple(each.shape)) for each in strangers)
        raise MixedDevices(f"{function} mixes the inputs' device with a tensor {shapes} of the CPU")


def _unwrap(value: Any) -> Any:
    return value.numbers if isinstance(value, _Elsewhere) else value


def _wrap(value: Any, same: dict[int, _Elsewhere]) -> Any:
    if not isinstance(value, Tensor):
        return value
    return same[id(value)] if id(value) in same else _Elsewhere(value)


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
            remark = "on a device that is imitated"
            with _Reads(), _Factories():  # type: ignore[no-untyped-call]
                results = run(_Elsewhere)
            home = [not isinstance(each, _Elsewhere) for each in results]
    except Exception as error:
        for each in chain(error):
            if isinstance(each, MixedDevices) or "same device" in str(each):
                return str(each).splitlines()[0], ""
        if torch.cuda.is_available():
            raise
        # The imitation knows less than torch: no reason to refuse a component.
        return "", f"could not be tried on another device: {type(error).__name__}"
    return ("its result is a tensor of the CPU" if any(home) else ""), remark
