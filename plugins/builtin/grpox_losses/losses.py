"""The built-in losses, of the importance ratio `w = pi / pi_old` of each token or of each sequence.

Token level: `w[i,t] = exp(log pi - log pi_old)`.
Sequence level: `w_i = exp((1/n_i) sum_t m (log pi - log pi_old))` (GSPO, arXiv 2507.18071).
Clipped: `-min(w~ A, clip(w, 1-clip_low, 1+clip_high) A)`, `w~ = min(w, delta)` or w.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from grpox.contracts import LossInputs, LossOutput, Reduction
from grpox_losses.configs import CispoConfig, ClippedConfig, LuspoConfig, SapoConfig

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20, a ratio of 4.9e8. An overflow to infinity would make the gradient NaN even on
the branch that was not chosen (0 * inf)."""


class Clipped:
    """The clipped surrogate of every token (PPO, arXiv 1707.06347, eq. 7), bounded by delta if that is set."""

    zero_at_zero_advantage: ClassVar[bool] = True
    hyperparameters: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "delta")

    def __init__(self, config: ClippedConfig | LuspoConfig) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """Compute the clipped loss of every token.

        Returns:
            loss f32[B, T], and the diagnostics of `clip_ratios`.
        """
        config, advantages = self.config, inputs.advantages
        ratio = token_ratio(inputs) if config.level == "token" else sequence_ratio(inputs)  # f32[B, T]
        clip_high = config.clip_low if config.clip_high is None else config.clip_high
        lower, upper = 1 - config.clip_low, 1 + clip_high
        bounded = ratio if config.delta is None else ratio.clamp(max=config.delta)
        loss = -torch.min(bounded * advantages, ratio.clamp(lower, upper) * advantages)
        low = (ratio < lower) & (advantages < 0)
        high = (ratio > upper) & (advantages > 0)
        return LossOutput(loss, clip_ratios(low, high, inputs, config.level))


class Grpo(Clipped):
    """Every sequence counts the same, however long: `(1/N_seq) sum_i (1/n_i) sum_t`.

    A token of a short sequence therefore weighs more than one of a long sequence (DeepSeekMath, arXiv
    2402.03300, eq. 3). With `level: sequence` this is GSPO (arXiv 2507.18071, eq. 5).
    """

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN


class DrGrpo(Clipped):
    """Every token counts the same, in every batch: `sum_i,t / (N_seq * max_completion_length)`.

    The divisor is a constant (arXiv 2503.20783). The paper pairs it with advantages that are not divided by
    their standard deviation (`advantage: none`).
    """

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_SUM_BY_MAX_LENGTH


class Dapo(Clipped):
    """Every token of the optimizer step counts the same: `sum_i,t / N_tok` (arXiv 2503.14476, eq. 8).

    The paper clips higher than lower, `clip_high: 0.28`.
    """

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN


class Bnpo(Clipped):
    """Every token of a micro-batch counts the same: mean over micro-batches of `sum_i,t / n_tok`.

    It is TRL's `loss_type: bnpo`. Its gradient depends on the micro-batch size by definition; with one sequence
    per micro-batch it is grpo.
    """

    reduction: ClassVar[Reduction] = Reduction.LOCAL_TOKEN_MEAN


class Luspo(Clipped):
    """GSPO without its bias by length: `(1/N_seq) sum_i n_i min(w_i A, clip(w_i) A)` (LUSPO, arXiv 2602.05261).

    The ratio of a sequence is the geometric mean of its tokens' ratios, so each token gets 1/n_i of its
    gradient. The factor n_i, a sum over the tokens, undoes that: a token weighs the same in a short sequence as
    in a long one.
    """

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_SUM


class Cispo:
    """Policy gradient weighted by a capped, detached ratio: `-sg[min(w, cap)] A log pi`, `sum_i,t / N_tok`.

    Clipping removes the gradient of a token, while a cap on the weight only bounds it: rare tokens that start
    a line of reasoning go on learning (MiniMax-M1, arXiv 2506.13585). The loss is a surrogate: only its
    gradient has a meaning.
    """

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    gradient: ClassVar[Literal["value", "surrogate"]] = "surrogate"
    zero_at_zero_advantage: ClassVar[bool] = True
    hyperparameters: ClassVar[tuple[str, ...]] = ("cap",)

    def __init__(self, config: CispoConfig) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """Compute the surrogate of every token, f32[B, T]; ``clip_ratio/cap`` is 1 if w > cap and A > 0."""
        loss = self.expected_gradient(inputs) * inputs.logprobs
        capped = (token_ratio(inputs) > self.config.cap) & (inputs.advantages > 0)
        return LossOutput(loss, {"clip_ratio/cap": capped.to(loss.dtype)})

    def expected_gradient(self, inputs: LossInputs) -> Tensor:
        """The derivative of each token's loss by its log-probability, `-min(w, cap) A`: f32[B, T]."""
        weight = token_ratio(inputs).detach().clamp(max=self.config.cap)
        return -weight * inputs.advantages


class Sapo:
    """A soft gate in place of clipping: the gradient fades as the ratio leaves 1 (arXiv 2511.20347).

    `-A (4/tau) sigmoid(tau (w-1))`, tau by the sign of A, `(1/N_seq) sum_i (1/n_i) sum_t`. At w = 1 the value
    is -2A/tau and the slope in w is -A, that of the unclipped surrogate.
    """

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN
    zero_at_zero_advantage: ClassVar[bool] = True
    hyperparameters: ClassVar[tuple[str, ...]] = ("tau_pos", "tau_neg")

    def __init__(self, config: SapoConfig) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """Compute the gated loss of every token, f32[B, T]; ``sapo/gate`` is the slope left, 1 at w = 1."""
        advantages = inputs.advantages
        tau = torch.full_like(advantages, self.config.tau_neg)
        tau = tau.masked_fill(advantages > 0, self.config.tau_pos)
        gate = torch.sigmoid(tau * (token_ratio(inputs) - 1))  # f32[B, T]
        slope = 4 * gate * (1 - gate)
        return LossOutput(-advantages * 4 / tau * gate, {"sapo/gate": slope.detach()})


def token_ratio(inputs: LossInputs) -> Tensor:
    """The ratio of each token: f32[B, T]."""
    return _bounded_exp(inputs.logprobs - inputs.old_logprobs)


def sequence_ratio(inputs: LossInputs) -> Tensor:
    """The geometric mean of each sequence's token ratios, at every position: f32[B, T].

    It is 1 for a sequence without unmasked tokens. Its gradient reaches every unmasked token.
    """
    log_ratios = torch.where(inputs.token_mask, inputs.logprobs - inputs.old_logprobs, 0.0)  # f32[B, T]
    lengths = inputs.token_mask.sum(dim=-1, keepdim=True).clamp(min=1)  # i64[B, 1]
    mean = log_ratios.sum(dim=-1, keepdim=True) / lengths  # f32[B, 1]
    return _bounded_exp(mean).expand_as(inputs.logprobs)


def clip_ratios(low: Tensor, high: Tensor, inputs: LossInputs, level: str) -> dict[str, Tensor]:
    """Name the tokens whose gradient the lower or the upper clip removed, bool[B, T] each; region: either.

    A diagnostic is 1 or 0 for every token, f32[B, T]; for ratios of sequences a share of each, f32[B].
    """
    named = {"clip_ratio/low": low, "clip_ratio/high": high, "clip_ratio/region": low | high}
    if level == "token":
        return {name: where.to(inputs.logprobs.dtype) for name, where in named.items()}
    tokens = inputs.token_mask.sum(dim=1).clamp(min=1)  # i64[B]
    parts = {name: (where & inputs.token_mask).sum(dim=1) / tokens for name, where in named.items()}
    return {name: part.to(inputs.logprobs.dtype) for name, part in parts.items()}


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
