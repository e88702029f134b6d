"""Losses whose gradient alone has a meaning: GSPO-token, DPPO and TOPR."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from grpox.contracts import LossInputs, LossOutput, Reduction
from grpox_losses.configs import DppoConfig, GspoTokenConfig, ToprConfig
from grpox_losses.losses import clip_ratios, sequence_ratio, token_ratio


class GspoToken:
    """`-min(s A_t, clip(s, 1-clip_low, 1+clip_high) A_t)`, `s = sg[w_i] pi/sg[pi]` (arXiv 2507.18071, 4.3).

    s has the value of the sequence's ratio, and a gradient through its own token alone. If all tokens of a
    sequence have one advantage, the gradient equals that of GSPO (`grpo` with `level: sequence`); tokens of
    different turns may have different advantages. The loss is a surrogate: its value depends on all tokens.
    """

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN
    gradient: ClassVar[Literal["value", "surrogate"]] = "surrogate"
    zero_at_zero_advantage: ClassVar[bool] = True
    hyperparameters: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")

    def __init__(self, config: GspoTokenConfig) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """Compute the loss of every token.

        Returns:
            loss f32[B, T], and the diagnostics of `clip_ratios`.
        """
        own = (inputs.logprobs - inputs.logprobs.detach()).exp()  # f32[B, T]: 1, with the token's gradient
        ratio = sequence_ratio(inputs).detach() * own
        clipped = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        loss = -torch.min(ratio * inputs.advantages, clipped * inputs.advantages)
        return LossOutput(loss, clip_ratios(*self._clipped(inputs), inputs, "sequence"))

    def expected_gradient(self, inputs: LossInputs) -> Tensor:
        """The derivative of each token's loss by its log-probability, `-w_i A_t`, or 0: f32[B, T]."""
        low, high = self._clipped(inputs)
        slope = -sequence_ratio(inputs).detach() * inputs.advantages
        return slope.masked_fill(low | high, 0.0)

    def _clipped(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Tokens whose gradient the lower and the upper clip removed: bool[B, T] each."""
        ratio = sequence_ratio(inputs).detach()
        low = (ratio < 1 - self.config.clip_low) & (inputs.advantages < 0)
        return low, (ratio > 1 + self.config.clip_high) & (inputs.advantages > 0)


class Dppo:
    """`-keep sg[min(w, cap)] A log pi`, `sum_i,t / N_tok` (DPPO, arXiv 2602.04879).

    keep is 0 if the token has moved by more than delta in the direction of its advantage: in its
    probability, `A > 0 and pi - mu > delta` or `A < 0 and pi - mu < -delta` (divergence tv), or in the KL of
    the two Bernoulli distributions "this token or another" (divergence kl). A clipped ratio stops a rare token
    after a tiny move of probability and lets a likely one go far; this loss does neither.

    mu is pi_old of the run. With `train.old_logprobs: generator` it is what the generator reported, as in the
    paper. The loss is a surrogate: only its gradient has a meaning.

    The gradient of a token follows the paper's equation 23. Two things differ. The paper sums over the
    tokens of a completion, and here all tokens of a step are averaged, as in TRL. Its advantages are those of
    `advantage: none`, without a division by the standard deviation.
    """

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    gradient: ClassVar[Literal["value", "surrogate"]] = "surrogate"
    zero_at_zero_advantage: ClassVar[bool] = True
    hyperparameters: ClassVar[tuple[str, ...]] = ("delta", "cap")

    def __init__(self, config: DppoConfig) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """Compute the surrogate of every token.

        Returns:
            loss f32[B, T], and diagnostics of 1 and 0: ``clip_ratio/low`` and
            ``clip_ratio/high``, tokens dropped with a negative or positive advantage; ``clip_ratio/region``,
            either; ``clip_ratio/cap``, kept tokens whose weight the cap bounds.
        """
        loss = self.expected_gradient(inputs) * inputs.logprobs
        dropped = self._dropped(inputs)
        capped = (token_ratio(inputs).detach() > self.config.cap) & ~dropped & (inputs.advantages != 0)
        diagnostics = {
            "clip_ratio/low": dropped & (inputs.advantages < 0),
            "clip_ratio/high": dropped & (inputs.advantages > 0),
            "clip_ratio/region": dropped,
            "clip_ratio/cap": capped,
        }
        return LossOutput(loss, {name: where.to(loss.dtype) for name, where in diagnostics.items()})

    def expected_gradient(self, inputs: LossInputs) -> Tensor:
        """The derivative of each token's loss by its log-probability, `-keep min(w, cap) A`: f32[B, T]."""
        weight = token_ratio(inputs).detach().clamp(max=self.config.cap)
        return (-weight * inputs.advantages).masked_fill(self._dropped(inputs), 0.0)

    def _dropped(self, inputs: LossInputs) -> Tensor:
        """Tokens outside of the trust region that would move further out: bool[B, T]."""
        pi, mu = inputs.logprobs.detach().exp(), inputs.old_logprobs.exp()  # f32[B, T]
        outwards = (pi - mu) * inputs.advantages.sign() > 0
        divergence = (pi - mu).abs() if self.config.divergence == "tv" else bernoulli_kl(mu, pi)
        return outwards & (divergence > self.config.bound)


def bernoulli_kl(mu: Tensor, pi: Tensor) -> Tensor:
    """`mu log(mu/pi) + (1-mu) log((1-mu)/(1-pi))` of probabilities, elementwise.

    Both are clamped away from 0 and 1 by the rounding of their type, so that the result is finite.
    """
    information = torch.finfo(mu.dtype)
    mu, pi = (p.clamp(information.tiny, 1 - information.eps) for p in (mu, pi))
    return mu * (mu.log() - pi.log()) + (1 - mu) * (torch.log1p(-mu) - torch.log1p(-pi))


class Topr:
    """`-sg[a] A log pi`, `(1/N_seq) sum_i sum_t` (TOPR, arXiv 2503.14286).

    a is 1 if A > 0, and min(product of the completion's token ratios, 1) if A < 0. A good completion is learnt
    like supervised data, even if it has become unlikely. A bad one counts less as the policy moves away from
    it, which bounds the loss without clipping. The sum over tokens is log pi of the whole completion, as in the
    paper. The loss is a surrogate: only its gradient has a meaning.
    """

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_SUM
    gradient: ClassVar[Literal["value", "surrogate"]] = "surrogate"
    zero_at_zero_advantage: ClassVar[bool] = True

    def __init__(self, config: ToprConfig) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """The surrogate of every token, f32[B, T]; ``topr/weight`` is a, 1 where the advantage is positive."""
        loss = self.expected_gradient(inputs) * inputs.logprobs
        return LossOutput(loss, {"topr/weight": _weight(inputs)})

    def expected_gradient(self, inputs: LossInputs) -> Tensor:
        """The derivative of each token's loss by its log-probability, `-a A`: f32[B, T]."""
        return -_weight(inputs) * inputs.advantages


def _weight(inputs: LossInputs) -> Tensor:
    """The weight a of every token, without gradient: f32[B, T]."""
    log_ratios = torch.where(inputs.token_mask, inputs.logprobs.detach() - inputs.old_logprobs, 0.0)
    tapered = log_ratios.sum(dim=-1, keepdim=True).clamp(max=0).exp()  # f32[B, 1], at most 1
    return torch.where(inputs.advantages < 0, tapered, 1.0)
