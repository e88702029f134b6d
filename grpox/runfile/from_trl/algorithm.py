"""Loss, advantage, KL and correction, as TRL's fields choose them together."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from grpox.config import SamplingConfig
from grpox.errors import nearest
from grpox.runfile.checks import changed_distribution
from grpox.runfile.from_trl.draft import Draft
from grpox.runfile.from_trl.fields import Verdict, parameters_of

CLIPPED = ("grpo", "dr_grpo", "dapo", "bnpo")
LOSSES = (*CLIPPED, "cispo", "sapo", "luspo", "vespo")
RECOMMENDED_CAP = 5.0
"""What TRL recommends for cispo; its default, epsilon, is below 1."""
UNBOUNDED = 1e9
"""In place of no bound."""
_SCALES = ("group", "batch", "none")
_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
_CORRECTION = tuple(
    f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_max", "clip_min", "cap")
)
_ON, _MODE, _HIGH, _LOW, _CAP = _CORRECTION


def write_algorithm(draft: Draft) -> None:
    """Write what the gradient is made of. What `sampling` says must have been written."""
    _loss(draft)
    _advantage(draft)
    _kl_and_entropy(draft)
    _correction(draft)


def _loss(draft: Draft) -> None:
    loss = draft.chosen("loss_type", LOSSES)
    comment, of = draft.default_of("loss_type"), "clipped" if loss in CLIPPED else loss
    parameters: dict[str, Any] = {"cap": _cap(draft)} if loss == "cispo" else draft.given_of(of)
    if loss == "vespo":
        comment = "of the plugin grpox-vespo, which is to be installed"
        draft.explain("loss_type", Verdict.DIFFERS, f"loss vespo is {comment}")
    if loss == "luspo":
        comment = "not in grpox: a loss of your own, clipped at level sequence, with Reduction.SEQUENCE_SUM"
        draft.explain("loss_type", Verdict.UNSUPPORTED, f"{comment}; `grpox plugins new` begins one")
    level = "importance_sampling_level"
    if draft.chosen(level, ("token", "sequence")) == "sequence" and loss in CLIPPED:
        parameters["level"] = "sequence"
    elif draft.get(level) == "sequence" and loss in ("cispo", "sapo"):
        draft.explain(level, Verdict.UNSUPPORTED, f"{loss} has one ratio per token: take a clipped loss")
    draft.put_component("loss", loss, parameters, comment)
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
    if scale not in _SCALES:
        draft.refuse("scale_rewards", "no such scaling", ", ".join(_SCALES), nearest(str(given), _SCALES))
        return
    order = draft.chosen("multi_objective_aggregation", ("sum_then_normalize", "normalize_then_sum"))
    if order == "normalize_then_sum":
        draft.put("advantage", {"name": "group", "aggregation": order})
        draft.unneeded("scale_rewards", "normalize_then_sum has a scale of its own, in TRL too")
    else:
        draft.put("advantage", scale, draft.default_of("scale_rewards"))
        draft.explain("scale_rewards", Verdict.SAME, f"advantage: {scale}")


def _kl_and_entropy(draft: Draft) -> None:
    """Write the KL; TRL's tokens of high entropy, and the mean of its bonus, are those of each micro-batch."""
    name = "use_bias_correction_kl"
    kl = "unbiased" if draft.get(name) else "k3"
    if not draft.get("beta") and not draft.unread("beta"):
        draft.unneeded(name, "beta is 0")
    elif draft.has(name) or kl != "k3":
        draft.put("train.kl", kl, draft.default_of(name))
        if kl == "unbiased" and draft.get("importance_sampling_level") == "token":
            draft.explain(name, Verdict.SAME, "train.kl: unbiased")
    if draft.has("top_entropy_quantile") and draft.get("top_entropy_quantile") != 1:
        message = "train.top_entropy_quantile: of the tokens of the optimizer step, in TRL of each micro-batch"
        draft.explain("top_entropy_quantile", Verdict.DIFFERS, message)
    if draft.has("entropy_coef") and draft.get("entropy_coef") != 0:
        message = "train.entropy_coef: times the mean over all tokens of the optimizer step"
        draft.explain("entropy_coef", Verdict.DIFFERS, f"{message}, in TRL over those kept of each micro-batch")


def _correction(draft: Draft) -> None:
    on, uses_vllm = draft.get(_ON), draft.get("use_vllm")
    if draft.get("loss_type") == "vespo":
        # VESPO takes the correction's weights itself, and so needs one; TRL bounds tokens' before it.
        if uses_vllm and on and draft.get(_MODE) == "token_truncate":
            _bounded_correction(draft)
        else:
            draft.put("correction", "vespo", "which the loss vespo needs; of the same plugin")
            why = "correction: vespo, which the loss vespo needs"
            draft.explain((*_CORRECTION, "use_vllm"), Verdict.DIFFERS, why)
    elif uses_vllm and not on:
        draft.put("correction", "none")
        draft.unneeded(_CORRECTION[1:], "there is no correction")
        draft.explain(_ON, Verdict.SAME, "correction: none")
    elif uses_vllm and (changed := _changed(draft)):
        why = f"it would be biased with {', '.join(changed)}, as TRL's is"
        draft.put("correction", "none", why)
        draft.explain((*_CORRECTION, "use_vllm"), Verdict.DIFFERS, f"correction none: {why}")
    elif uses_vllm:
        _bounded_correction(draft)


def _bounded_correction(draft: Draft) -> None:
    name = draft.chosen(_MODE, _MODES).replace("_", "-")
    low, high = draft.get(_LOW), draft.get(_CAP if draft.has(_CAP) else _HIGH)
    high = UNBOUNDED if high is None else high
    parameters: dict[str, Any] = {"cap": high}
    if name.endswith("mask"):
        parameters = {"low": 0.0 if low is None else low, "high": high}
        draft.explain(_HIGH, Verdict.SAME, f"correction.high: {high}")
    elif low is not None:
        draft.explain(_LOW, Verdict.UNSUPPORTED, "what truncates has no lower bound")
    draft.put_component("correction", name, parameters, draft.default_of(*_CORRECTION))
    draft.explain(_ON, Verdict.SAME, f"correction: {name}")


def _changed(draft: Draft) -> list[str]:
    """The settings of `sampling` that make the sampled distribution another than the trained one."""
    try:
        return changed_distribution(SamplingConfig.model_validate(draft.values.get("sampling", {})))
    except ValidationError:
        return []  # `grpox validate` says so
