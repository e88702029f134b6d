"""The optimal reward baseline: a mean reward in which long completions weigh more."""

from __future__ import annotations

import torch
from torch import Tensor

from grpox.contracts import AdvantageInputs
from grpox_advantages.configs import OpoConfig
from grpox_advantages.scalers import centre


class Opo:
    """`r - sum_j n_j r_j / sum_j n_j` over the scored members of the group (OPO, arXiv 2505.23585).

    This baseline minimises the variance of the policy gradient, if the squared gradient of a completion is
    proportional to its length. n_j counts the tokens that the model wrote.
    """

    signal = "sum"

    def __init__(self, config: OpoConfig) -> None:
        self.config = config

    def scale(self, inputs: AdvantageInputs) -> Tensor:
        """Return the advantages of N completions, f32[N]; they need not add up to 0 in a group."""
        centred = centre(inputs.rewards, inputs.weights, inputs.group_ids)
        lengths = torch.stack([mask.sum() for mask in inputs.model_masks]).to(centred.deviations)  # f64[N]
        lengths = torch.where(centred.rewards.isnan(), 0.0, lengths)
        zeros = torch.zeros_like(centred.counts)
        total = zeros.index_add(0, centred.groups, lengths)
        # Deviations from the plain mean in place of rewards: the result is the same, and rounds less.
        weighted = zeros.index_add(0, centred.groups, lengths * centred.deviations)
        shift = (weighted / total.clamp(min=1))[centred.groups]
        return torch.where(centred.signal, centred.deviations - shift, 0.0).float()
