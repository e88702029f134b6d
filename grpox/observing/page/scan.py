"""Finds a text in many texts that stand one behind the other, without an index of words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from grpox.observing.page.buffers import numbers, texts

if TYPE_CHECKING:
    import numpy as np
    import pyarrow
    from numpy.typing import NDArray

    Mask = NDArray[np.bool_]

CHUNK = 8 << 20
"""Bytes that are searched at a time."""
GAP = 64 << 10
"""Bytes between two texts that are read too, because that is faster than a second reading."""
SAMPLE, DENSE = 256, 2
"""Number of places after which Arrow, which looks at each text, takes over if there are so many in a text."""


def scan(read: Callable[[int, int], bytes], ends: NDArray[np.int64], among: Mask, needle: bytes) -> Mask:
    """Return which of the texts contain `needle`.

    Args:
        read: returns the bytes from a position to another one.
        ends: position of the end of each text; the first one begins at 0.
        among: the texts in question.
    """
    import numpy as np

    matches = np.zeros(len(ends), bool)
    for first, last in _stretches(ends, np.flatnonzero(among)):
        while first < last:
            start = int(ends[first - 1]) if first else 0
            stop = max(first + 1, min(last, int(np.searchsorted(ends, start + CHUNK, "right"))))
            data = read(start, int(ends[stop - 1]))
            matches[first:stop] = _contain(data, ends[first:stop] - start, needle)
            first = stop
    return matches & among


def lower(array: pyarrow.Array) -> tuple[memoryview, NDArray[np.int64]]:
    """Return texts in lower case, one behind the other, and the end of each."""
    import numpy as np
    import pyarrow
    from pyarrow import compute

    lowered = compute.utf8_lower(array.cast(pyarrow.large_string()))
    if not len(lowered):
        return memoryview(b""), np.empty(0, "i8")
    _, offsets, data = lowered.buffers()
    ends = np.frombuffer(offsets, "i8")[lowered.offset : lowered.offset + len(lowered) + 1]
    whole = memoryview(b"" if data is None else data)
    return whole[ends[0] : ends[-1]], ends[1:] - ends[0]


def lower_text(text: str) -> bytes:
    """Return one text in lower case, by the same rules."""
    import numpy as np
    import pyarrow

    data = text.encode("utf-8", "replace")
    return bytes(lower(texts(data, np.array([len(data)]), pyarrow.large_string()))[0])


def _stretches(ends: NDArray[np.int64], places: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of texts to read together: those in question without a wide gap between them."""
    import numpy as np

    if not len(places):
        return
    starts = np.where(places > 0, ends[places - 1], 0)
    breaks = np.flatnonzero(starts[1:] - ends[places[:-1]] > GAP) + 1
    for stretch in np.split(places, breaks) if len(breaks) < len(places) - 1 else places[:, None]:
        yield int(stretch[0]), int(stretch[-1]) + 1


def _contain(data: bytes, ends: NDArray[np.int64], needle: bytes) -> Mask:
    """Return which texts of a chunk contain the needle."""
    import numpy as np

    places: list[int] = []
    place = data.find(needle)
    while place >= 0:
        places.append(place)
        if len(places) == SAMPLE and np.searchsorted(ends, place) * DENSE < SAMPLE:
            return _contain_each(data, ends, needle)
        place = data.find(needle, place + 1)
    begins = np.array(places, "i8")
    texts_of = np.searchsorted(ends, begins, "right")
    matches = np.zeros(len(ends), bool)
    matches[texts_of[begins + len(needle) <= ends[texts_of]]] = True  # not those that go on in the next text
    return matches


def _contain_each(data: bytes, ends: NDArray[np.int64], needle: bytes) -> Mask:
    import pyarrow
    from pyarrow import compute

    matches = compute.match_substring(texts(data, ends, pyarrow.large_binary()), needle)
    mask: Mask = numbers(matches, "u1").astype(bool)
    return mask
