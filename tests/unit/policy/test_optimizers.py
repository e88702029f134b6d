"""AdamW as the run file sets it: which weights decay, and one update worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from grpox.config import TrainConfig
from grpox.policy.optimizers import AdamW


def layer() -> nn.Module:
    """A matrix, a bias and a normalisation, all of ones."""
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def test_matrices_decay_and_biases_and_norms_do_not() -> None:
    """Without a gradient AdamW only decays: 1 - 0.1 * 0.5."""
    model = layer()
    optimizer = AdamW(TrainConfig(weight_decay=0.5)).build(model.parameters(), 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        expected = 0.95 if name == "0.weight" else 1.0
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, expected))


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_two_updates_by_hand(optim: str) -> None:
    """Gradients 2 and -1 at betas (0.5, 0.75), epsilon 1, rate 0.1.

    First: m = 1, v = 1; unbiased 2 and 4; 0.1 * 2 / (2 + 1).
    Second: m = 0, v = 1; unbiased 0.
    """
    config = TrainConfig.model_validate(
        {"optim": optim, "adam_beta1": 0.5, "adam_beta2": 0.75, "adam_epsilon": 1.0}
    )
    weight = nn.Parameter(torch.ones(1, 1))
    optimizer = AdamW(config).build([weight], 0.1)
    for gradient, expected in ((2.0, 1 - 0.2 / 3), (-1.0, 1 - 0.2 / 3)):
        weight.grad = torch.full((1, 1), gradient)
        optimizer.step()
        assert weight.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("optim", "fused"), [("adamw_torch", None), ("adamw_torch_fused", True)])
def test_the_kernel_is_the_one_chosen_and_frozen_weights_are_left_out(optim: str, fused: bool | None) -> None:
    model = layer()
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    optimizer = AdamW(TrainConfig.model_validate({"optim": optim})).build(model.parameters(), 0.1)
    assert {group["fused"] for group in optimizer.param_groups} == {fused}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 3
