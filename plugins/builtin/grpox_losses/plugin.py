"""Offers the built-in losses: grpo, dr_grpo, dapo, bnpo, luspo, cispo, sapo, gspo-token, dppo and topr."""

from __future__ import annotations

from grpox import ComponentSpec, hookimpl

CLIPPED = "-min(w~ A, clip(w, 1-clip_low, 1+clip_high) A), w~ = min(w, delta) if delta is set, else w"


LOSSES = (
    ComponentSpec(
        name="grpo",
        target="grpox_losses.losses:Grpo",
        config="grpox_losses.configs:ClippedConfig",
        summary="Clipped surrogate, mean over tokens within a sequence, then over sequences",
        formula=f"{CLIPPED}; (1/N_seq) sum_i (1/n_i) sum_t",
        source="DeepSeekMath, arXiv 2402.03300, eq. 3",
    ),
    ComponentSpec(
        name="dr_grpo",
        target="grpox_losses.losses:DrGrpo",
        config="grpox_losses.configs:ClippedConfig",
        summary="Clipped surrogate, summed over tokens and divided by the maximum length",
        formula=f"{CLIPPED}; sum_i,t / (N_seq * max_completion_length)",
        source="Understanding R1-Zero-Like Training, arXiv 2503.20783",
    ),
    ComponentSpec(
        name="dapo",
        target="grpox_losses.losses:Dapo",
        config="grpox_losses.configs:ClippedConfig",
        summary="Clipped surrogate, mean over all tokens of the optimizer step",
        formula=f"{CLIPPED}; sum_i,t / N_tok",
        source="DAPO, arXiv 2503.14476, eq. 8",
    ),
    ComponentSpec(
        name="bnpo",
        target="grpox_losses.losses:Bnpo",
        config="grpox_losses.configs:ClippedConfig",
        summary="Clipped surrogate, mean over the tokens of each micro-batch (depends on its size)",
        formula=f"{CLIPPED}; mean over micro-batches of sum_i,t / n_tok",
        source="TRL's GRPOConfig, loss_type bnpo",
    ),
    ComponentSpec(
        name="luspo",
        target="grpox_losses.losses:Luspo",
        config="grpox_losses.configs:LuspoConfig",
        summary="GSPO times the length of the sequence, so that length is no bias",
        formula="-min(w_i A, clip(w_i, 1-clip_low, 1+clip_high) A), w_i = exp(mean_t log pi/pi_old); "
        "(1/N_seq) sum_i sum_t",
        source="Length-Unbiased Sequence Policy Optimization, arXiv 2602.05261",
    ),
    ComponentSpec(
        name="cispo",
        target="grpox_losses.losses:Cispo",
        config="grpox_losses.configs:CispoConfig",
        summary="Policy gradient weighted by a capped ratio, so that no token loses its gradient",
        formula="-sg[min(w, cap)] A log pi; sum_i,t / N_tok",
        source="MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786",
    ),
    ComponentSpec(
        name="sapo",
        target="grpox_losses.losses:Sapo",
        config="grpox_losses.configs:SapoConfig",
        summary="A soft gate on the ratio instead of clipping",
        formula="-A (4/tau) sigmoid(tau (w-1)), tau = tau_pos if A > 0 else tau_neg; as grpo",
        source="Soft Adaptive Policy Optimization, arXiv 2511.20347",
    ),
    ComponentSpec(
        name="gspo-token",
        target="grpox_losses.surrogates:GspoToken",
        config="grpox_losses.configs:GspoTokenConfig",
        summary="Clipped by the ratio of the sequence, with an advantage for each token",
        formula="-min(s A_t, clip(s, 1-clip_low, 1+clip_high) A_t), s = sg[w_i] pi / sg[pi]; as grpo",
        source="Group Sequence Policy Optimization, arXiv 2507.18071, section 4.3",
    ),
    ComponentSpec(
        name="dppo",
        target="grpox_losses.surrogates:Dppo",
        config="grpox_losses.configs:DppoConfig",
        summary="Policy gradient without the tokens whose probability has moved too far",
        formula="-keep sg[min(w, cap)] A log pi, keep = 0 if A > 0 and pi - mu > delta, or A < 0 and "
        "pi - mu < -delta; sum_i,t / N_tok",
        source="Rethinking the Trust Region in LLM RL (DPPO), arXiv 2602.04879",
    ),
    ComponentSpec(
        name="topr",
        target="grpox_losses.surrogates:Topr",
        config="grpox_losses.configs:ToprConfig",
        summary="REINFORCE, with importance weights of at most 1 on completions of negative advantage",
        formula="-sg[a] A log pi, a = 1 if A > 0 else min(prod_t w, 1); (1/N_seq) sum_i sum_t",
        source="Tapered Off-Policy REINFORCE, arXiv 2503.14286",
    ),
)


@hookimpl
def grpox_losses() -> tuple[ComponentSpec, ...]:
    """The ten losses; the first five share the clipped surrogate and differ in their reduction."""
    return LOSSES
