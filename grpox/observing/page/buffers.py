"""Numbers for JSON; Arrow arrays from numpy arrays and back.

pyarrow's own conversions import pandas, which takes 36 MiB and part of a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pyarrow
    from numpy.typing import NDArray


def finite(value: float | None) -> float | None:
    """Return a number for JSON: None for what is not finite."""
    return None if value is None or not math.isfinite(value) else value


def numbers(array: pyarrow.Array, kind: str) -> NDArray[Any]:
    """Return the numbers of an array; a missing one is NaN among floating-point numbers, else 0.

    Args:
        kind: numpy's name of their type: ``i8``, ``f8``, ``i4`` or ``u1``.
    """
    import numpy as np
    import pyarrow

    types = {"i8": pyarrow.int64(), "f8": pyarrow.float64(), "i4": pyarrow.int32(), "u1": pyarrow.uint8()}
    array = array.cast(types[kind])
    if array.null_count:
        missing: Any = np.nan if kind == "f8" else 0
        return np.array([missing if value is None else value for value in array.to_pylist()], kind)
    if not len(array):
        return np.empty(0, kind)
    return np.frombuffer(array.buffers()[1], kind)[array.offset : array.offset + len(array)]


def integers(values: NDArray[Any] | Sequence[int]) -> pyarrow.Array:
    """Return an array of integers, such as places to take."""
    import numpy as np
    import pyarrow

    content = pyarrow.py_buffer(np.ascontiguousarray(values, "i8"))
    return pyarrow.Array.from_buffers(pyarrow.int64(), len(values), [None, content])


def texts(data: bytes, ends: NDArray[np.int64], kind: pyarrow.DataType) -> pyarrow.Array:
    """Return an array of the texts that stand one behind the other.

    Args:
        data: the texts in UTF-8.
        ends: end of each.
        kind: a type of long texts: large_string or large_binary.
    """
    import numpy as np
    import pyarrow

    offsets = pyarrow.py_buffer(np.concatenate([[0], ends]).astype("i8"))
    return pyarrow.Array.from_buffers(kind, len(ends), [None, offsets, pyarrow.py_buffer(data)])
