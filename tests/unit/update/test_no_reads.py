"""A pass reads no value of a tensor: on the meta device, where tensors have none, it would fail.

On a GPU the host would wait at such a place until the GPU has done all that it was given.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.small_models import model_of
from test_packing import LONGEST, REGISTRY, SHARED, loss_of, micro_batches_of

from grpox.config import ComponentRef, TrainConfig
from grpox.policy.attention import VARLEN
from grpox.policy.batch import ForwardMode, Sample, TokenRecord, collate
from grpox.policy.scoring_forward import install_scoring_forward
from grpox.update.objective import StepLoss
from grpox.update.packing import StepTotals
from grpox.update.policy_update import forward_pass, keep_logprobs, loss_shares
from grpox.update.token_metrics import measure

NOWHERE = torch.device("meta")
TOTALS = StepTotals(40, 8, 1, LONGEST)
LOSSES, CORRECTIONS = (
    sorted(
        each.spec.name for each in REGISTRY.plugins.offers if each.kind == kind and each.distribution == "grpox"
    )
    for kind in ("loss", "correction")
)
"""Names of the built-in ones."""


@pytest.fixture(scope="module")
def model() -> Any:
    made = model_of("llama", dtype=torch.float32, num_hidden_layers=1)
    install_scoring_forward(made, TrainConfig())
    return made.to(NOWHERE)


def samples(seed: int = 5) -> list[Sample]:
    (made,) = micro_batches_of(seed, count=1)
    for sample in made[:5]:
        sample.old_logprobs = torch.empty(len(sample.completion), device=NOWHERE)
    for number, sample in enumerate(made):
        turns = np.zeros(len(sample.completion), np.int32)
        sample.token_record = TokenRecord(1, 1, number, 0, turns)
        sample.reference_logprobs = torch.empty(len(sample.completion), device=NOWHERE)
        sample.policy_keep = torch.empty(len(sample.completion), dtype=torch.bool, device=NOWHERE)
    return made


def take_pass(model: Any, step_loss: StepLoss, mode: ForwardMode = SHARED) -> None:
    batch = collate(samples(), NOWHERE, mode)
    result = forward_pass(model, batch, step_loss, TOTALS, 0.8)
    assert result.loss.device == NOWHERE
    result.loss.backward()
    passes = [(batch, result.detached())]
    loss_shares(passes)
    facts = measure(passes, step_loss.correction, ["ratio"]).facts
    assert facts is not None
    assert facts.device == NOWHERE
    keep_logprobs(batch, result.inputs.logprobs)


def correction_of(name: str) -> Any:
    return REGISTRY.build(REGISTRY.parse("correction", ComponentRef(name=name), "correction"))


@pytest.mark.parametrize("loss", LOSSES)
def test_forward_loss_metrics_and_backward_read_no_value(model: Any, loss: str) -> None:
    terms = {"beta": 0.1, "entropy_coef": 0.01, "off_policy_mask_threshold": 0.5}
    take_pass(model, StepLoss(loss_of(loss), correction_of("token-truncate"), **terms))


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_corrections_and_their_metrics_read_no_value(model: Any, correction: str) -> None:
    take_pass(model, StepLoss(loss_of("dapo"), correction_of(correction)))


@pytest.mark.parametrize("packed", [False, True])
def test_a_pass_by_lengths_reads_no_value_in_transformers_either(packed: bool) -> None:
    made = model_of("llama", dtype=torch.float32, num_hidden_layers=1, attn_implementation=VARLEN)
    install_scoring_forward(made, TrainConfig())
    mode = ForwardMode(chunked=True, packed=packed, by_lengths=True)
    take_pass(made.to(NOWHERE), StepLoss(loss_of("dapo"), correction_of("none")), mode)
