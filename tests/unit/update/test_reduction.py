"""The step normaliser against counts done by hand."""

import pytest
import torch
import torch.distributed as dist

from grpox.contracts import Reduction
from grpox.runtime.world import World
from grpox.update.packing import StepTotals, count_step, token_weights

ALONE = World(rank=0, size=1, device=torch.device("cpu"))

# Two sequences of 3 and 1 tokens, and one whose tokens are all masked.
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
# A step of which MASK is one micro-batch of four.
TOTALS = StepTotals(tokens=10, sequences=12, micro_batches=4, max_completion_length=5)


@pytest.mark.parametrize(
    ("reduction", "long", "short"),
    [
        (Reduction.TOKEN_MEAN, 1 / 10, 1 / 10),
        (Reduction.SEQUENCE_MEAN, 1 / (12 * 3), 1 / 12),
        (Reduction.SEQUENCE_SUM, 1 / 12, 1 / 12),
        (Reduction.SEQUENCE_SUM_BY_MAX_LENGTH, 1 / (12 * 5), 1 / (12 * 5)),
        (Reduction.LOCAL_TOKEN_MEAN, 1 / (4 * 4), 1 / (4 * 4)),
    ],
)
def test_weight_of_a_token_in_a_long_and_a_short_sequence(reduction, long, short):
    for dtype in (torch.float32, torch.float64):
        expected = torch.tensor([[long, long, long, 0], [short, 0, 0, 0], [0, 0, 0, 0]], dtype=dtype)
        torch.testing.assert_close(token_weights(reduction, MASK, TOTALS, dtype), expected)
    assert token_weights(reduction, MASK, TOTALS).dtype == torch.float32
    assert token_weights(reduction, torch.ones(1, 1).bool(), StepTotals(1, 1, 1, 1)).tolist() == [[1.0]]


def test_count_includes_sequences_without_tokens():
    totals = count_step([MASK, MASK[:2]], ALONE, max_completion_length=5)
    assert totals == StepTotals(tokens=8, sequences=5, micro_batches=2, max_completion_length=5)


@pytest.mark.parametrize("reduction", list(Reduction))
def test_counts_of_0_divide_nothing_by_0(reduction):
    """An iterable of no masks has no counts; a blank row beside it is of weight 0."""
    totals = count_step([], ALONE, 5)
    assert totals == StepTotals(0, 0, 0, 5)
    assert token_weights(reduction, torch.zeros(1, 2).bool(), totals).tolist() == [[0.0, 0.0]]


class BesideMany:
    """A rank whose others hold 2^24 of everything, the first count after which float32 leaves numbers out."""

    device = torch.device("meta")

    def reduce(self, values, op):
        assert values.device.type == "cpu"  # a GPU would have to end its work before the host could read
        assert op == dist.ReduceOp.SUM
        return torch.tensor([2.0**24 + each for each in (4, 3, 1)], dtype=values.dtype)


def test_the_sum_over_ranks_is_exact_for_many_tokens():
    totals = count_step((mask for mask in [MASK]), BesideMany(), 5)
    assert totals == StepTotals(2**24 + 4, 2**24 + 3, 2**24 + 1, 5)
