"""Loss, advantage, KL and correction, as TRL's fields choose them together."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from grpox.config import SamplingConfig
from grpox.errors import nearest
from grpox.runfile.from_trl.draft import TRL_DEFAULT, Draft, component
from grpox.runfile.from_trl.fields import Verdict, parameters_of
from grpox.runfile.sampling_bias import changed_distribution

CLIPPED = ("grpo", "dr_grpo", "dapo", "bnpo")
LOSSES = (*CLIPPED, "cispo", "sapo", "luspo", "vespo")
RECOMMENDED_CAP = 5.0
"""What TRL recommends for cispo; its default, epsilon, is below 1."""
UNBOUNDED = 1e9
"""In place of no bound."""
_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
_CORRECTION = (
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_cap",
)


def write_algorithm(draft: Draft) -> None:
    """Write what the gradient is made of. What `sampling` says must have been written."""
    _loss(draft)
    _advantage(draft)
    _kl(draft)
    _entropy(draft)
    _correction(draft)


def _loss(draft: Draft) -> None:
    loss = draft.chosen("loss_type", LOSSES)
    comment = "" if draft.has("loss_type") else TRL_DEFAULT
    match loss:
        case "cispo":
            parameters = {"cap": _cap(draft)}
        case "vespo":
            parameters = draft.given_of("vespo")
            comment = "of the plugin grpox-vespo, which is to be installed"
            draft.explain("loss_type", Verdict.DIFFERS, f"loss vespo is {comment}")
        case "luspo":
            parameters = {}
            comment = "not in grpox: a loss of your own, clipped at level sequence, with Reduction.SEQUENCE_SUM"
            draft.explain("loss_type", Verdict.UNSUPPORTED, f"{comment}; `grpox plugins new` begins one")
        case _:
            parameters = draft.given_of("clipped" if loss in CLIPPED else loss)
    parameters |= _level(draft, loss)
    draft.put("loss", component(loss, parameters), comment)
    _explain_loss(draft, loss)


def _cap(draft: Draft) -> float:
    """The largest weight of cispo: epsilon_high, or in TRL epsilon where that is not given."""
    name = "epsilon_high" if draft.has("epsilon_high") else "epsilon"
    value = draft.get(name)
    if isinstance(value, int | float) and value >= 1:
        return float(value)
    why = f"TRL caps all weights at {name} {value}, below 1, which only scales the loss"
    message = f"loss.cap is {RECOMMENDED_CAP:g}, as TRL recommends: {why}"
    draft.explain(("loss_type", name), Verdict.DIFFERS, message)
    return RECOMMENDED_CAP


def _level(draft: Draft, loss: str) -> dict[str, Any]:
    name = "importance_sampling_level"
    if draft.chosen(name, ("token", "sequence")) == "token" or loss in ("luspo", "vespo"):
        return {}
    if loss in CLIPPED:
        return {"level": "sequence"}
    draft.explain(name, Verdict.UNSUPPORTED, f"{loss} has one ratio per token: take a clipped loss")
    return {}


def _explain_loss(draft: Draft, loss: str) -> None:
    """Say which loss the fields belong to, and where it is not TRL's in all."""
    used = set(parameters_of(loss if loss in ("sapo", "vespo") else "clipped"))
    if loss == "cispo":
        used.remove("delta")
    others = tuple(name for name in parameters_of("clipped", "sapo", "vespo") if name not in used)
    draft.unneeded(others, f"the loss {loss} has no such parameter, in TRL neither")
    if "loss_type" in draft.explained:
        return
    accumulated = (None, draft.get("gradient_accumulation_steps"))
    several = draft.has("generation_batch_size") or draft.get("steps_per_generation") not in accumulated
    if loss in ("dapo", "cispo") and several:
        averaged = "averaged over the tokens of each optimizer step, in TRL of the generation batch"
        draft.explain("loss_type", Verdict.DIFFERS, f"loss {loss}: {averaged}")
    else:
        draft.explain("loss_type", Verdict.SAME, f"loss: {loss}")


def _advantage(draft: Draft) -> None:
    given = draft.get("scale_rewards")
    scale = {"true": "group", "false": "none"}.get(str(given).lower(), given)
    if scale not in ("group", "batch", "none"):
        allowed = ("group", "batch", "none")
        draft.refuse("scale_rewards", "no such scaling", ", ".join(allowed), nearest(str(given), allowed))
        return
    order = draft.chosen("multi_objective_aggregation", ("sum_then_normalize", "normalize_then_sum"))
    if order == "normalize_then_sum":
        draft.put("advantage", {"name": "group", "aggregation": order})
        draft.unneeded(("scale_rewards",), "normalize_then_sum has a scale of its own, in TRL too")
    else:
        draft.put("advantage", scale, "" if draft.has("scale_rewards") else TRL_DEFAULT)
        draft.explain("scale_rewards", Verdict.SAME, f"advantage: {scale}")


def _kl(draft: Draft) -> None:
    name = "use_bias_correction_kl"
    if not draft.get("beta") and not draft.unread("beta"):
        draft.unneeded((name,), "beta is 0")
        return
    kl = "unbiased" if draft.get(name) else "k3"
    if draft.has(name):
        draft.put("train.kl", kl)
    elif kl != "k3":
        draft.put("train.kl", kl, TRL_DEFAULT)
    if kl == "unbiased" and draft.get("importance_sampling_level") == "token":
        draft.explain(name, Verdict.SAME, "train.kl: unbiased")


def _entropy(draft: Draft) -> None:
    """TRL's tokens of high entropy, and the mean that its bonus is, are those of each micro-batch."""
    if draft.has("top_entropy_quantile") and draft.get("top_entropy_quantile") != 1:
        message = "train.top_entropy_quantile: of the tokens of the optimizer step, in TRL of each micro-batch"
        draft.explain("top_entropy_quantile", Verdict.DIFFERS, message)
    if draft.has("entropy_coef") and draft.get("entropy_coef") != 0:
        message = "train.entropy_coef: times the mean over all tokens of the optimizer step"
        draft.explain("entropy_coef", Verdict.DIFFERS, f"{message}, in TRL over those kept of each micro-batch")


def _correction(draft: Draft) -> None:
    if draft.get("loss_type") == "vespo":
        _vespo_correction(draft)
    elif not draft.get("use_vllm"):
        return
    elif not draft.get("vllm_importance_sampling_correction"):
        draft.put("correction", "none")
        draft.unneeded(_CORRECTION[1:], "there is no correction")
        draft.explain(_CORRECTION[0], Verdict.SAME, "correction: none")
    elif changed := _changed(draft):
        message = f"correction none: it would be biased with {', '.join(changed)}, as TRL's is"
        draft.put("correction", "none", message.partition(": ")[2])
        draft.explain((*_CORRECTION, "use_vllm"), Verdict.DIFFERS, message)
    else:
        _bounded_correction(draft)


def _bounded_correction(draft: Draft) -> None:
    mode = draft.chosen("vllm_importance_sampling_mode", _MODES)
    capped = "vllm_importance_sampling_cap"
    high = draft.get(capped if draft.has(capped) else "vllm_importance_sampling_clip_max")
    low = draft.get("vllm_importance_sampling_clip_min")
    high = UNBOUNDED if high is None else high
    if mode.endswith("truncate"):
        parameters = {"cap": high}
        if low is not None:
            draft.explain(
                "vllm_importance_sampling_clip_min", Verdict.UNSUPPORTED, "what truncates has no lower bound"
            )
    else:
        parameters = {"low": 0.0 if low is None else low, "high": high}
        draft.explain("vllm_importance_sampling_clip_max", Verdict.SAME, f"correction.high: {high}")
    comment = "" if any(draft.has(name) for name in _CORRECTION) else TRL_DEFAULT
    draft.put("correction", component(mode.replace("_", "-"), parameters), comment)
    draft.explain(_CORRECTION[0], Verdict.SAME, f"correction: {mode.replace('_', '-')}")


def _vespo_correction(draft: Draft) -> None:
    """VESPO takes the correction's weights itself, and so needs one; TRL bounds tokens' before it."""
    mode, on = draft.get("vllm_importance_sampling_mode"), draft.get("vllm_importance_sampling_correction")
    if draft.get("use_vllm") and on and mode == "token_truncate":
        _bounded_correction(draft)
        return
    draft.put("correction", "vespo", "which the loss vespo needs; of the same plugin")
    why = "correction: vespo, which the loss vespo needs"
    draft.explain((*_CORRECTION, "use_vllm"), Verdict.DIFFERS, why)


def _changed(draft: Draft) -> list[str]:
    """The settings of `sampling` that make the sampled distribution another than the trained one."""
    try:
        return changed_distribution(SamplingConfig.model_validate(draft.values.get("sampling", {})))
    except ValidationError:
        return []  # `grpox validate` says so
