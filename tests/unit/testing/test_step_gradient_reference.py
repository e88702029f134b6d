"""Loss and gradient of a step against the float64 reference, which follows the papers in plain loops."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.reference import step as reference
from support.reference.batches import ragged_batch, split, with_token_advantages
from support.reference.corrections import gaps
from support.reference.policy_terms import sequence_ratios, token_ratios

from grpox.testing import step_gradient

TOLERANCE = 1e-9
MAX_LENGTH = 16
PARTS = [[3, 0, 7], [8], [1, 9, 2], [5, 4], [6]]
"""Five uneven micro-batches; on two ranks they are three and two."""

Parameters = Mapping[str, Any]

LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo")
KLS = (None, "k1", "k2", "k3", "unbiased")
CORRECTIONS: tuple[str | Parameters, ...] = (
    "none",
    "token-truncate",
    {"name": "token-truncate", "cap": 1.3},
    "token-mask",
    {"name": "token-mask", "low": 0.8, "high": 1.5},
    "sequence-truncate",
    {"name": "sequence-truncate", "cap": 1.1},
    "sequence-mask",
    {"name": "sequence-mask", "low": 0.5, "high": 8.0},
    "geometric-mask",
    {"name": "geometric-mask", "low": 0.8, "high": 1.2},
)
CLIPPED: tuple[Parameters, ...] = (
    {"clip_low": 0.1},
    {"clip_high": 0.28},
    {"clip_low": 0.3, "clip_high": 0.1},
    {"delta": 3.0},
    {"level": "sequence"},
    {"level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    {"level": "sequence", "clip_high": 0.28, "delta": 2.0},
)
MASKS: tuple[Parameters, ...] = (
    {"off_policy_mask_threshold": 0.4},
    {"off_policy_mask_threshold": 0.0},
    {"top_entropy_quantile": 0.2},
    {"top_entropy_quantile": 0.75},
    {"top_entropy_quantile": 0.0},
    {"top_entropy_quantile": 0.5, "off_policy_mask_threshold": 0.4, "entropy_coef": 0.01},
)
OPTIONS: tuple[Parameters, ...] = (
    *({"name": name, **options} for name in ("grpo", "dr_grpo", "dapo", "bnpo") for options in CLIPPED),
    {"name": "cispo", "cap": 1.5},
    {"name": "sapo", "tau_pos": 2.0},
    {"name": "sapo", "tau_pos": 0.7, "tau_neg": 3.0},
)


def agree(loss: str | Parameters, batch: dict[str, torch.Tensor], **options: Any) -> None:
    """Fails unless both give the same loss and the same gradient for every token."""
    micro_batches = split(batch, PARTS)
    options = {"max_completion_length": MAX_LENGTH, **options}
    expected, expected_gradients = reference.step_gradient(loss, micro_batches, **options)

    value, gradients = step_gradient(loss, micro_batches, **options, world_size=2)

    torch.testing.assert_close(value, expected, rtol=0, atol=TOLERANCE)
    assert len(gradients) == len(PARTS)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=TOLERANCE)


def label(value: object) -> str:
    if isinstance(value, Mapping):
        return "-".join(str(value[key]) if key == "name" else f"{key}={value[key]}" for key in value)
    return str(value)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=label)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_with_every_correction(loss: str, correction: str | Parameters) -> None:
    """The KL terms rotate: every pair of loss, correction and KL term occurs, not every triple."""
    kl = KLS[(LOSSES.index(loss) + CORRECTIONS.index(correction)) % len(KLS)]
    options = {} if kl is None else {"beta": 0.3, "kl": kl}

    agree(loss, ragged_batch(), correction=correction, **options)


@pytest.mark.parametrize("loss", OPTIONS, ids=label)
def test_every_option_of_every_loss(loss: Parameters) -> None:
    index = OPTIONS.index(loss)
    kl = KLS[1 + index % (len(KLS) - 1)]

    agree(loss, ragged_batch())
    agree(loss, ragged_batch(seed=1), beta=0.04, kl=kl, correction=CORRECTIONS[1 + index % 10])


@pytest.mark.parametrize("loss", [*LOSSES, {"name": "grpo", "level": "sequence"}], ids=label)
def test_an_advantage_for_every_token(loss: str | Parameters) -> None:
    agree(loss, with_token_advantages(ragged_batch()), correction="token-truncate", beta=0.1)


@pytest.mark.parametrize("masks", MASKS, ids=lambda masks: str(dict(masks)))
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_with_tokens_and_completions_left_out(loss: str, masks: Parameters) -> None:
    correction = CORRECTIONS[(LOSSES.index(loss) + MASKS.index(masks)) % len(CORRECTIONS)]
    agree(loss, ragged_batch(), correction=correction, beta=0.2, **masks)


@pytest.mark.parametrize("max_length", [1, 7, 4096])
def test_max_completion_length_divides_dr_grpo(max_length: int) -> None:
    agree("dr_grpo", ragged_batch(), max_completion_length=max_length, beta=0.1)


@pytest.mark.parametrize("seed", range(2, 12))
def test_other_batches(seed: int) -> None:
    loss = {"name": LOSSES[seed % 4], "clip_high": 0.28, "delta": 1.9, "level": ("token", "sequence")[seed % 2]}

    agree(loss, ragged_batch(seed), correction=CORRECTIONS[seed % 11], beta=0.2, kl=KLS[1 + seed % 4])


# -- The batch that the tests above stand on ---------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_batch_reaches_every_branch_of_the_losses(level: str) -> None:
    """Both signs of A: w below, inside and above the clip range, above delta, and above the cap of cispo."""
    seen: Counter[tuple[str, str]] = Counter()
    batch = ragged_batch()
    for completion in reference.completions(batch, batch["logprobs"]):
        ratios = {"token": token_ratios, "sequence": sequence_ratios}[level](completion)
        for token, w in zip(completion, ratios, strict=True):
            sign = "zero" if token.advantage == 0 else "positive" if token.advantage > 0 else "negative"
            seen[sign, "below" if w < 0.8 else "above" if w > 1.28 else "inside"] += 1
            seen[sign, "beyond delta"] += bool(w > 3)
            seen[sign, "beyond cap"] += bool(w > 5)

    reached = {place for place, count in seen.items() if count}
    assert {
        (sign, place) for sign in ("positive", "negative") for place in ("below", "inside", "above")
    } <= reached
    assert ("negative", "beyond delta") in reached
    assert "zero" in {sign for sign, _ in reached}
    if level == "token":
        assert ("negative", "beyond cap") in reached


def test_the_batch_reaches_every_branch_of_the_corrections() -> None:
    batch = ragged_batch()
    completions = [c for c in reference.completions(batch, batch["logprobs"]) if c]
    tokens = [math.exp(d) for completion in completions for d in gaps(completion)]
    sequences = [math.exp(sum(gaps(completion))) for completion in completions]
    means = [math.exp(sum(gaps(completion)) / len(completion)) for completion in completions]

    assert batch["sampler_logprobs"].isnan().any()
    assert all(branches(tokens, low, high) for low, high in [(0.5, 5.0), (0.8, 1.5)])
    assert any(w > 2 for w in tokens)
    assert all(branches(sequences, 0.5, high) for high in (1.1, 2.0, 3.0, 8.0))
    assert all(branches(means, low, high) for low, high in [(0.999, 1.001), (0.8, 1.2)])


def branches(values: list[float], low: float, high: float) -> bool:
    """Tell whether there are values below, inside and above."""
    below, above = [v for v in values if v < low], [v for v in values if v > high]
    return bool(below) and bool(above) and len(below) + len(above) < len(values)


def test_no_value_is_near_a_bound() -> None:
    """Else the last bit of an exponential would decide the branch, and both sides could be right."""
    batch = ragged_batch()
    completions = reference.completions(batch, batch["logprobs"])
    ratios = [float(w) for c in completions for w in [*token_ratios(c), *sequence_ratios(c)]]

    bounds = (0.7, 0.8, 0.9, 0.9997, 1.0004, 1.1, 1.2, 1.28, 1.5, 2.0, 3.0, 5.0)
    assert min(abs(w - bound) for w in ratios for bound in bounds) > 1e-6
