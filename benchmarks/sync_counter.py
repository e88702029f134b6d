"""Counts, on a CPU, the operations at which a program with a GPU would wait for the GPU.

The device ``cpu:0`` stands for the GPU and ``cpu`` for the host: PyTorch computes on both alike, and an
argument tells them apart. A tensor that is made on ``cpu:0``, or computed from one that was, is marked by its
storage. A subclass of Tensor would not do: DeepSpeed exchanges the storage of parameters, and collectives take
plain tensors.

The host waits for the GPU when it reads a value (`item`, `tolist`, a condition, `nonzero`, a boolean index),
and when it copies ordinary memory to the GPU or back. `TorchDispatchMode` sees the operations, those of
backward passes included; `TorchFunctionMode` sees what never becomes an operation, such as `tolist` and `cpu`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU, HOST = torch.device("cpu", 0), torch.device("cpu")
"""The device that stands for a GPU, and the one that stands for the host."""
ROOT = Path(__file__).parents[1]
OURS = (f"{ROOT}/grpox/", f"{ROOT}/plugins/")
OTHERS = ("/deepspeed/", "/transformers/", "/torch/optim/", "/accelerate/", "/peft/")
"""Parts of the paths of libraries whose operations are listed apart."""
UPLOAD = ("grpox/policy/batch.py", "upload")
"""File and name of the function that copies to a GPU without waiting."""

READS = {
    "aten._local_scalar_dense.default": "reads a value",
    "aten.item.default": "reads a value",
    "aten.is_nonzero.default": "reads a value",
    "aten.equal.default": "reads a comparison",
    "aten.allclose.default": "reads a comparison",
    "aten.nonzero.default": "nonzero: the size of the result",
    "aten.masked_select.default": "masked_select: the size of the result",
    "aten.repeat_interleave.Tensor": "repeat_interleave: the size of the result",
    "aten.bincount.default": "bincount: the size of the result",
    "aten._unique2.default": "unique: the size of the result",
    "aten.unique_dim.default": "unique: the size of the result",
    "aten.unique_consecutive.default": "unique: the size of the result",
}
INDEXING = ("aten.index.Tensor", "aten.index_put_.default", "aten.index_put.default",
            "aten._index_put_impl_.default")  # fmt: skip
_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.frombuffer, Tensor.new_tensor)


@dataclass
class Waits:
    """The operations that wait for the GPU: (file:line, what it does) -> how often."""

    own: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Operations of grpox and of plugins."""
    others: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Operations of DeepSpeed, torch.optim, transformers and the like."""
    mixed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Operations of grpox on tensors of both devices, which CUDA refuses."""
    uploads: int = 0
    """Tensors that came to the GPU without a wait."""
    _paused: bool = False

    def add(self, what: str, kind: str = "") -> None:
        """Count an operation where the innermost frame of grpox or of a library called it."""
        place, is_own = _caller()
        if place is None or self._paused:
            return
        if kind == "mixed":
            self.mixed.update([(place, what)] if is_own else [])
        elif place == UPLOAD[1]:
            self.uploads += 1
        else:
            (self.own if is_own else self.others).update([(place, what)])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing in this block: on a GPU other code would run."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


def _caller() -> tuple[str | None, bool]:
    """Return file:line of the innermost frame of grpox, a plugin or a library, and True unless a library's.

    The function `UPLOAD` is returned by its name.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        is_own = path.startswith(OURS)
        if is_own or any(part in path for part in OTHERS):
            name = frame.f_code.co_qualname.partition(".")[0]
            file = _short(path)
            return name if (file, name) == UPLOAD else f"{file}:{frame.f_lineno}", is_own
        frame = frame.f_back
    return None, False


def _short(path: str) -> str:
    return path.removeprefix(f"{ROOT}/").rpartition("/site-packages/")[2]


class Marks:
    """The storages that would lie on the GPU."""

    def __init__(self) -> None:
        self._on_gpu: dict[int, bool] = {}

    def has(self, tensor: Tensor) -> bool:
        """Return True for a tensor on the GPU."""
        return self._on_gpu.get(_storage(tensor), False)

    def set(self, tensor: Tensor, on_gpu: bool) -> None:
        """Mark a tensor's storage, which may lie where one that is gone lay."""
        self._on_gpu[_storage(tensor)] = on_gpu


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse and the like have none
        return 0


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device) == GPU


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks the results of operations, and counts those that wait."""

    def __init__(self, marks: Marks, waits: Waits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.marks, self.waits = marks, waits

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare the import of torch's compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            inputs = _tensors((args, kwargs))
            on_gpu = [self.marks.has(each) for each in inputs]
            self._count(str(function), args, kwargs, inputs, on_gpu)
            known = {_storage(each) for each in inputs}
            result = function(*args, **kwargs)
            device = kwargs.get("device")
            is_gpu = any(on_gpu) if device is None else _is_gpu(device)
            for each in _tensors(result):
                if _storage(each) not in known:
                    self.marks.set(each, is_gpu)
        return result

    def _count(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
        on_gpu: Sequence[bool],
    ) -> None:
        if name in READS:
            if any(on_gpu):
                self.waits.add(READS[name])
        elif name == "aten._to_copy.default":
            if (device := kwargs.get("device")) is not None and inputs and _is_gpu(device) != on_gpu[0]:
                self.waits.add("copies to the GPU" if _is_gpu(device) else "copies to the host")
        elif name == "aten.copy_.default":
            target, source = args[0], args[1]
            if self.marks.has(target) != self.marks.has(source) and source.numel():
                self.waits.add("copies to the GPU" if self.marks.has(target) else "copies to the host")
        elif name in INDEXING:
            self._count_index(args)
        elif any(on_gpu):
            hosts = [each for each, marked in zip(inputs, on_gpu, strict=True) if not marked and each.ndim > 0]
            if hosts:
                self.waits.add(f"{name} on both devices", "mixed")

    def _count_index(self, args: Sequence[Any]) -> None:
        indices = _tensors(args[1])
        if not self.marks.has(args[0]):
            return
        if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
            self.waits.add("boolean index: the size of the result")
        if any(not self.marks.has(each) for each in indices):
            self.waits.add("index on the host: copies to the GPU")


class _Calls(TorchFunctionMode):
    """Sees what never becomes an operation: reads of memory, and copies between devices that are one here."""

    def __init__(self, marks: Marks, waits: Waits) -> None:
        super().__init__()
        self.marks, self.waits = marks, waits

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        special = self._special(function)
        return function(*args, **kwargs) if special is None else special(function, *args, **kwargs)

    def _special(self, function: Any) -> Callable[..., Any] | None:
        return {
            Tensor.device.__get__: self._device,  # type: ignore[attr-defined]
            Tensor.tolist: self._read,
            Tensor.numpy: self._read,
            Tensor.__array__: self._read,
            Tensor.cpu: self._to_host,
            Tensor.to: self._to,
            **dict.fromkeys(_MAKERS, self._make),
        }.get(function)

    def _device(self, function: Any, tensor: Tensor, *_: Any) -> torch.device:
        return GPU if self.marks.has(tensor) else function(tensor)

    def _read(self, function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.marks.has(tensor):
            self.waits.add(f"{function.__name__}: reads the values")
        with torch.utils._python_dispatch._disable_current_modes():
            return function(tensor, *args, **kwargs)

    def _to_host(self, function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._to(Tensor.to, tensor, HOST)

    def _to(self, function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        parsed = {name: value for name, value in kwargs.items() if name != "copy"}
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **parsed)
        if args and isinstance(args[0], Tensor):
            device = GPU if self.marks.has(args[0]) else HOST
        on_gpu = self.marks.has(tensor)
        if device is None or device.type != "cpu" or _is_gpu(device) == on_gpu:
            wanted = tensor.dtype if dtype is None else dtype
            more = {"copy": True} if kwargs.get("copy") else {}
            more |= {} if layout is None else {"memory_format": layout}
            keep = device is None or device.type == "cpu"
            return function(tensor, wanted, **more) if keep else function(tensor, *args, **kwargs)
        self.waits.add("copies to the GPU" if _is_gpu(device) else "copies to the host")
        with torch.utils._python_dispatch._disable_current_modes():
            moved: Tensor = function(tensor, tensor.dtype if dtype is None else dtype, copy=True)
        self.marks.set(moved, _is_gpu(device))
        return moved

    def _make(self, function: Any, *args: Any, **kwargs: Any) -> Tensor:
        own = args[0] if function is Tensor.new_tensor else None
        device = kwargs.get("device", GPU if own is not None and self.marks.has(own) else None)
        made: Tensor = function(*args, **kwargs)
        if _is_gpu(device):
            self.waits.add("makes a tensor on the GPU from values of the host")
        self.marks.set(made, _is_gpu(device))
        return made


@contextmanager
def counting(waits: Waits, marks: Marks) -> Iterator[Waits]:
    """Count the operations within this block that would wait for the GPU."""
    calls = _Calls(marks, waits)
    from_numpy, backward = torch.from_numpy, BackwardCFunction.apply

    def host_array(array: Any) -> Tensor:  # no mode sees it
        made = from_numpy(array)
        marks.set(made, False)
        return made

    def backward_with_calls(self: Any, *gradients: Any) -> Any:  # autograd turns function modes off
        with calls:
            return backward(self, *gradients)

    torch.from_numpy, BackwardCFunction.apply = host_array, backward_with_calls  # type: ignore[method-assign]
    try:
        with calls, _Operations(marks, waits):
            yield waits
    finally:
        torch.from_numpy, BackwardCFunction.apply = from_numpy, backward  # type: ignore[method-assign]
