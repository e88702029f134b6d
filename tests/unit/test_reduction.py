"""The step normaliser against counts done by hand."""

import pytest
import torch

from grpox.contracts import Reduction
from grpox.reduction import StepTotals, count_step, token_weights
from grpox.world import World

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
    expected = torch.tensor([[long, long, long, 0], [short, 0, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(token_weights(reduction, MASK, TOTALS), expected)


def test_count_includes_sequences_without_tokens():
    totals = count_step([MASK, MASK[:2]], ALONE, max_completion_length=5)
    assert totals == StepTotals(tokens=8, sequences=5, micro_batches=2, max_completion_length=5)


@pytest.mark.parametrize("reduction", list(Reduction))
def test_a_step_without_any_token_has_finite_weights(reduction):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    weights = token_weights(reduction, mask, count_step([mask], ALONE, 5))
    assert torch.equal(weights, torch.zeros(2, 3))
