"""Size of the chunks in which the head computes its logits, a few rows of hidden states at a time.

On a CPU, products are at full speed with few rows. On a GPU, a chunk reads the head's weight three times, and
reads and writes its float32 gradient; from about 1,000 rows on, the products take longer.
"""

LOGITS_PER_CHUNK = 2**23
"""Number of logits in memory at once on a CPU: 32 MiB of float32, large enough for products at full speed."""
LOGITS_ON_GPU = 2**28
"""Largest number of logits in memory at once on a GPU: 1 GiB of float32."""
BYTES_PER_LOGIT = 8
"""Bytes of a logit in float32 and of the values computed from it at the same time; 12 for soft-capped logits
whose entropy has a gradient."""
SHARE = 32
"""On a GPU, the chunk takes at most one part in `SHARE` of its memory, if that is enough for `LEAST_ROWS`."""
LEAST_ROWS, MOST_ROWS, TILE = 1024, 8192, 256
"""Bounds of the rows of a chunk on a GPU, and the number that the rows are a multiple of."""


def rows_per_chunk(vocabulary: int, gpu_memory: int | None) -> int:
    """Choose the rows of a chunk.

    The result depends on the GPU's whole memory, and not on its free memory, so that the steps of a run and
    of a resumed run have the same chunks.

    Args:
        gpu_memory: bytes of the GPU; None: a CPU.
    """
    if gpu_memory is None:
        return max(1, LOGITS_PER_CHUNK // vocabulary)
    logits = min(LOGITS_ON_GPU, gpu_memory // (SHARE * BYTES_PER_LOGIT))
    return min(max(logits // vocabulary, LEAST_ROWS), MOST_ROWS) // TILE * TILE
