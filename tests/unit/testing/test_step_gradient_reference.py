"""Loss and gradient of a step against the float64 reference, which follows the papers in plain loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.reference import step as reference
from support.reference.batches import ragged_batch, split, with_token_advantages

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
