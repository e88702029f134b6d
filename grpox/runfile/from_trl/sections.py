"""Sections of a run file that depend on several of TRL's fields: inputs, loss, advantage, KL, correction."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpox.config import SamplingConfig
from grpox.errors import nearest
from grpox.runfile.checks import changed_distribution
from grpox.runfile.from_trl.draft import TRL_DEFAULT, Draft
from grpox.runfile.from_trl.fields import FIELDS, LORA, Verdict, parameters_of
from grpox.runfile.from_trl.setup import Reference, TrlData, TrlValue
from grpox.runfile.model_options import REFUSED_INIT
from grpox.runtime.files import read_mapping

ALL = "all-linear"
_DTYPES = ("dtype", "torch_dtype")
CLIPPED = ("grpo", "dr_grpo", "dapo", "bnpo")
LOSSES = (*CLIPPED, "cispo", "sapo", "luspo", "vespo")
RECOMMENDED_CAP = 5.0
"""TRL's recommendation for cispo; its default, epsilon, is below 1."""
UNBOUNDED = 1e9
"""Bound that means no bound."""
_SCALES = ("group", "batch", "none")
_CORRECTION = tuple(
    f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_max", "clip_min", "cap")
)
_ON, _MODE, _HIGH, _LOW, _CAP = _CORRECTION


def write_inputs(draft: Draft) -> None:
    """Write model, data, rewards, evaluation and adapters."""
    _model(draft)
    _dtype(draft)
    _rewards(draft)
    _episodes(draft)
    _data(draft)
    _evaluation(draft)
    if "peft_config" in draft.setup.arguments:
        given = draft.setup.arguments["peft_config"].shown
        draft.ask("model.lora", "{r: 16, alpha: 32}", f"peft_config: {given}")
    elif draft.setup.has_lora_config:
        _adapters(draft, "lora_config")
    elif draft.get("use_peft") is True:
        _adapters(draft, "adapter")


def _model(draft: Draft) -> None:
    given = draft.setup.model
    if given is None:
        draft.ask("model.path", "org/name", "a folder or hub id")
    elif not isinstance(given.value, str) or not given.literal:
        _leave(draft, "model", "model.path", given, "org/name", "a folder or hub id")
    else:
        why = _input(draft, "model.path", given.value)
        draft.report("model", given, Verdict.DIFFERS if why else Verdict.SAME, why or "model.path")
    _router_loss(draft)
    for name, value in _init(draft).items():
        draft.put(f"model.init.{name}", value)
    if draft.has("max_prompt_length"):
        draft.copy("max_prompt_length")
        draft.put("data.long_prompts", "cut")


def _router_loss(draft: Draft) -> None:
    """Write the weight of the load-balancing loss that TRL takes from the configuration of a model's folder."""
    name, model = "router_aux_loss_coef", draft.setup.model
    if draft.has(name):
        draft.copy(name)
    elif model is not None and isinstance(model.value, str) and not draft.unread(name):
        config = read_mapping(draft.setup.home / Path(model.value).expanduser() / "config.json")
        own = _text_config(config).get(name)
        if isinstance(own, int | float) and own > 0:
            draft.put(FIELDS[name].key, own, "the model's own, which TRL uses")


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part for text of a model's configuration, with the defaults of its class, as TRL reads it.

    A class without `output_router_logits` has no load-balancing loss in TRL, whatever its weight. A model of
    another type has only what the file says.
    """
    from transformers import CONFIG_MAPPING

    text = config.get("text_config")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return text if isinstance(text, dict) else config
    try:
        read = CONFIG_MAPPING[kind].from_dict(config).get_text_config()
    except Exception:  # noqa: BLE001 - the run, which loads the model, reports an invalid configuration
        return {}
    return dict(read.to_dict()) if hasattr(read, "output_router_logits") else {}


def _input(draft: Draft, key: str, given: str, suffixes: tuple[str, ...] = ()) -> str:
    """Write a path or hub id, or return what it lacks; a text with an ending of `suffixes` is a path."""
    is_path = draft.is_path(given) or given.endswith(suffixes)
    if not is_path and "/" not in given:
        return draft.ask(key, f"org/{given}", "a hub id with its owner")
    draft.put(key, draft.path(given) if is_path else given)
    return ""


def _init(draft: Draft) -> dict[str, Any]:
    """Collect the arguments of from_pretrained without those that grpox sets itself."""
    given: dict[str, Any] = {}
    for name, option in draft.setup.model_options.items():
        if option.literal:
            given[name] = option.value
        else:
            draft.ask(f"model.init.{name}", "?", _at(option))
    given |= draft.mapping("model_init_kwargs", "arguments of from_pretrained")
    if draft.get("trust_remote_code"):
        given.setdefault("trust_remote_code", True)
    if draft.has("attn_implementation"):
        given.setdefault("attn_implementation", draft.get("attn_implementation"))
    if draft.has("model_revision") and draft.get("model_revision") != "main":
        given.setdefault("revision", draft.get("model_revision"))
    refused = [name for name in given if name in REFUSED_INIT and name not in _DTYPES]
    if refused:
        draft.explain("model_init_kwargs", Verdict.DIFFERS, f"model.init without {', '.join(refused)}")
    return {name: value for name, value in given.items() if name not in REFUSED_INIT and value is not None}


def _dtype(draft: Draft) -> None:
    """Write bfloat16 if TRL trains in bfloat16, by default or by the type of the weights; else float32."""
    kwargs, options = draft.get("model_init_kwargs"), draft.setup.model_options
    loaded = [draft.get(name) for name in _DTYPES if draft.has(name)]
    loaded += [options[name].value for name in _DTYPES if name in options]
    loaded += [kwargs[name] for name in _DTYPES if name in kwargs] if isinstance(kwargs, dict) else []
    half = draft.get("bf16") if draft.has("bf16") else not draft.get("fp16")
    if half or "bfloat16" in loaded:
        if draft.get("cast_lm_head_to_fp32"):
            message = "model.cast_lm_head_to_fp32: its weights keep bfloat16; in TRL they are float32"
            draft.explain("cast_lm_head_to_fp32", Verdict.DIFFERS, message)
        given = draft.has("bf16") or bool(loaded)
        draft.put("model.dtype", "bfloat16", "" if given else f"{TRL_DEFAULT}: bf16 unless fp16")
        return
    draft.put("model.dtype", "float32")
    if not draft.get("fp16"):
        draft.explain("bf16", Verdict.SAME, "model.dtype: float32")


def _data(draft: Draft) -> None:
    given = draft.setup.data or TrlData(problem="a .jsonl, .json, .csv or .parquet file, or a hub dataset")
    if given.problem or given.path is None:
        why = draft.ask("data.path", given.path or "train.jsonl", given.problem or "the file or hub dataset")
    else:
        why = _input(draft, "data.path", given.path, (".jsonl", ".json", ".csv", ".parquet"))
    if draft.setup.data is not None and given.problem:
        draft.report("train_dataset", given, Verdict.UNREAD, f"fill in data.path: {given.problem}")
    elif draft.setup.data is not None:
        draft.report("train_dataset", given, Verdict.SAME, why or "data.path")
    for name, value in (("subset", given.subset), ("split", given.split), ("streaming", given.streaming)):
        if value and (name, value) != ("split", "train"):
            draft.put(f"data.{name}", value)


def _rewards(draft: Draft) -> None:
    given, example = draft.setup.rewards, "{path: 'rewards.py:name'}"
    if not given:
        draft.ask("rewards", example, "the reward functions")
        return
    if isinstance(given, TrlValue):
        _leave(draft, "reward_funcs", "rewards", given, example, "the reward functions")
        return
    weights = draft.get("reward_weights")
    if weights is None:
        weights = [None] * len(given)
    if not isinstance(weights, list) or len(weights) != len(given):
        what, allowed = f"does not fit {len(given)} reward functions", f"a list of {len(given)} numbers"
        draft.refuse("reward_weights", what, allowed)
        return
    for reward, factor in zip(given, weights, strict=True):
        own = (reward.entry or {}).get("weight", 1)  # of TRL's argument max_penalty
        weight = own if factor is None else factor if own == 1 else own * factor
        weighed = {} if weight in (1, 1.0) else {"weight": weight}
        named = "".join(f", {key}: {value}" for key, value in weighed.items())
        if entry := _entry(draft, "reward_funcs", "rewards", reward, f"{{path: 'rewards.py:name'{named}}}"):
            draft.values.setdefault("rewards", []).append(entry | weighed)


def _leave(draft: Draft, argument: str, key: str, given: TrlValue, example: str, what: str) -> None:
    """Leave to the user what the setup does not show."""
    draft.ask(key, example, f"{what}; {_at(given)}")
    draft.report(argument, given, Verdict.UNREAD, f"fill in {key}")


def _entry(draft: Draft, argument: str, key: str, each: Reference, example: str) -> dict[str, Any] | None:
    """Return the entry of a function or class with its paths relative to the run file, or ask for it."""
    if each.entry is None:
        draft.ask(key, example, f"{each.shown}: {each.note}")
        draft.report(argument, each, Verdict.UNSUPPORTED, each.note)
        return None
    entry = dict(each.entry)
    named = ", ".join(f"{name}: {value}" for name, value in entry.items())
    shown = named if key == "rewards" else entry["path"]
    verdict = Verdict.DIFFERS if each.note else Verdict.SAME
    draft.report(argument, each, verdict, each.note or f"{key}: {shown}")
    if "path" in entry:
        file, _, name = entry["path"].rpartition(":")
        entry["path"] = f"{draft.path(file)}:{name}"
    if draft.is_path(str(entry.get("model", "org"))):
        entry["model"] = draft.path(entry["model"])
    return entry


def _episodes(draft: Draft) -> None:
    """Write tools, environments, and the number of turns."""
    tools, environments = draft.setup.tools, draft.setup.environments
    example = "['tools.py:name']"
    if isinstance(tools, TrlValue):
        _leave(draft, "tools", "tools", tools, example, "the tools")
    for tool in tools if isinstance(tools, list) else []:
        if entry := _entry(draft, "tools", "tools", tool, example):
            draft.values.setdefault("tools", []).append(entry["path"])
    argument, example, written = "environment_factory", "{path: 'environment.py:Name'}", []
    if isinstance(environments, TrlValue):
        _leave(draft, argument, "environment", environments, example, "the environment")
    for value, each in environments.items() if isinstance(environments, dict) else ():
        if entry := _entry(draft, argument, "environment", each, example):
            when = {"when": {"column": "environment", "is": value}} if value else {}
            written.append(entry | when)
    if written:
        draft.put("environment", written[0] if len(written) == 1 and "when" not in written[0] else written)
    if environments and draft.setup.has_get_reward:
        draft.values.setdefault("rewards", []).append({"name": "environment"})
    most = draft.get("max_tool_calling_iterations")
    if (tools or environments) and isinstance(most, int):
        draft.put("episodes.max_turns", most + 1)


def _evaluation(draft: Draft) -> None:
    """Leave the evaluation to the user: its prompts must be a file, not a hub dataset."""
    old, given = "evaluation_strategy", draft.setup.arguments.get("eval_dataset")
    strategy = draft.get(old if draft.has(old) else "eval_strategy")
    if strategy in ("no", False) and given is None:
        fields = ("eval_steps", "per_device_eval_batch_size", "dataset_test_split", "num_generations_eval")
        draft.unneeded(fields, "nothing is evaluated")
        return
    every = draft.get("eval_steps") or (draft.get("logging_steps") or 10 if strategy == "steps" else 0)
    example = f"path: held-out.jsonl, every: {every}"
    if draft.has("num_generations_eval"):
        # TRL samples in its evaluations as in training.
        example += f", num_generations: {draft.get('num_generations_eval')}"
        example += f", temperature: {draft.get('temperature')}"
    where = f"; {_at(given)}" if given else ""
    draft.ask("evaluation", f"{{{example}}}", f"held-out prompts as a file{where}")


def _at(given: TrlValue) -> str:
    place = "not a literal" if given.line is None else f"line {given.line}"
    return f"{place}: {given.shown}"


def _adapters(draft: Draft, component: str) -> None:
    """Write `model.lora` from the fields of `component`."""
    names = {FIELDS[name].key.rpartition(".")[2]: name for name in parameters_of(component)}
    lora = {ours: draft.get(name) for ours, name in names.items()}
    targets, excluded = (_layers(lora.get(name)) for name in ("target_modules", "exclude_modules"))
    if lora["target_modules"] and targets is None:
        message = f"model.lora.target_modules: {ALL}, because it accepts no regular expression"
        draft.explain(names["target_modules"], Verdict.DIFFERS, message)
    if lora.get("exclude_modules") and excluded is None:
        message = "no model.lora.exclude_modules, because it accepts no regular expression"
        draft.explain(names["exclude_modules"], Verdict.DIFFERS, message)
    parameters = lora.get("target_parameters")
    # peft adapts the named parameters alone where no layers are named.
    default = [] if parameters and not lora["target_modules"] else ALL
    written = {"r": lora["r"], "alpha": lora["alpha"], "target_modules": targets or default}
    if parameters:
        written["target_parameters"] = [parameters] if isinstance(parameters, str) else list(parameters)
    written |= {"exclude_modules": excluded} if excluded else {}
    written |= {"use_rslora": True} if lora["use_rslora"] else {}
    of_peft = component == "lora_config" and not draft.has(f"{LORA}r", f"{LORA}lora_alpha")
    draft.put("model.lora", written, "peft's default" if of_peft else "")


def _layers(value: Any) -> Any:
    """Return a list of names or ``all-linear``; None for values that a run file does not accept."""
    if isinstance(value, list):
        return value[0] if value == [ALL] else value
    if value == ALL or not isinstance(value, str):
        return value if value == ALL else None
    # TRL unwraps a list of one name; other than a plain name, it is a regular expression.
    is_name = all(part.isidentifier() or part.isdigit() for part in value.split("."))
    return [value] if is_name else None


def write_algorithm(draft: Draft) -> None:
    """Write loss, advantage, KL and correction; `sampling` must have been written."""
    _loss(draft)
    _advantage(draft)
    _kl_and_entropy(draft)
    _correction(draft)


def _loss(draft: Draft) -> None:
    loss = draft.chosen("loss_type", LOSSES)
    comment, of = draft.default_of("loss_type"), "clipped" if loss in CLIPPED else loss
    parameters: dict[str, Any] = {"cap": _cap(draft)} if loss == "cispo" else draft.given_of(of)
    if loss == "vespo":
        comment = "from the plugin grpox-vespo; install the plugin"
        draft.explain("loss_type", Verdict.DIFFERS, f"loss vespo is {comment}")
    level = "importance_sampling_level"
    if loss == "luspo":
        parameters = draft.given_of("clipped")
        if draft.get(level) == "token":
            message = "loss: luspo, with one ratio per sequence as in the paper; TRL's is given one per token"
            draft.explain("loss_type", Verdict.DIFFERS, message)
    if draft.chosen(level, ("token", "sequence")) == "sequence" and loss in CLIPPED:
        parameters["level"] = "sequence"
    elif draft.get(level) == "sequence" and loss in ("cispo", "sapo"):
        draft.explain(level, Verdict.UNSUPPORTED, f"{loss} has one ratio per token: use a clipped loss")
    draft.put_component("loss", loss, parameters, comment)
    _explain_loss(draft, loss)


def _cap(draft: Draft) -> float:
    """Return the largest weight of cispo: epsilon_high, or in TRL epsilon if that is not given."""
    name = "epsilon_high" if draft.has("epsilon_high") else "epsilon"
    value = draft.get(name)
    if isinstance(value, int | float) and value >= 1:
        return float(value)
    why = f"TRL caps all weights at {name} {value}, below 1, which only scales the loss"
    message = f"loss.cap is {RECOMMENDED_CAP:g}, as TRL recommends: {why}"
    draft.explain(("loss_type", name), Verdict.DIFFERS, message)
    return RECOMMENDED_CAP


def _explain_loss(draft: Draft, loss: str) -> None:
    """Report the fields that belong to other losses, and differences from TRL's loss."""
    used = set(parameters_of(loss if loss in ("sapo", "vespo") else "clipped"))
    if loss == "cispo":
        used.remove("delta")
    others = tuple(name for name in parameters_of("clipped", "sapo", "vespo") if name not in used)
    draft.unneeded(others, f"the loss {loss} has no such parameter, also not in TRL")
    if "loss_type" in draft.explained:
        return
    accumulated = (None, draft.get("gradient_accumulation_steps"))
    several = draft.has("generation_batch_size") or draft.get("steps_per_generation") not in accumulated
    if loss in ("dapo", "cispo") and several:
        averaged = "averaged over the tokens of each optimizer step; in TRL, of the generation batch"
        draft.explain("loss_type", Verdict.DIFFERS, f"loss {loss}: {averaged}")
    else:
        draft.explain("loss_type", Verdict.SAME, f"loss: {loss}")


def _advantage(draft: Draft) -> None:
    given = draft.get("scale_rewards")
    scale = {"true": "group", "false": "none"}.get(str(given).lower(), given)
    is_rloo = scale == "rloo" and draft.setup.fields["scale_rewards"].line is None  # of RLOOTrainer
    if scale not in _SCALES and not is_rloo:
        draft.refuse("scale_rewards", "no such scaling", ", ".join(_SCALES), nearest(str(given), _SCALES))
        return
    order = draft.chosen("multi_objective_aggregation", ("sum_then_normalize", "normalize_then_sum"))
    if order == "normalize_then_sum":
        draft.put("advantage", {"name": "group", "aggregation": order})
        draft.unneeded("scale_rewards", "normalize_then_sum has its own scale, as in TRL")
    else:
        draft.put("advantage", scale, draft.default_of("scale_rewards"))
        draft.explain("scale_rewards", Verdict.SAME, f"advantage: {scale}")


def _kl_and_entropy(draft: Draft) -> None:
    """Write KL and entropy keys."""
    name = "use_bias_correction_kl"
    kl = "unbiased" if draft.get(name) else "k3"
    if not draft.get("beta") and not draft.unread("beta"):
        draft.unneeded(name, "beta is 0")
    elif draft.has(name) or kl != "k3":
        draft.put("train.kl", kl, draft.default_of(name))
        if kl == "unbiased" and draft.get("importance_sampling_level") == "token":
            draft.explain(name, Verdict.SAME, "train.kl: unbiased")
    if draft.get("use_adaptive_entropy"):
        draft.put("train.adaptive_entropy", draft.given_of("adaptive_entropy"))


def _correction(draft: Draft) -> None:
    on, uses_vllm, changed = draft.get(_ON), draft.get("use_vllm"), list[str]()
    with suppress(ValidationError):  # which `grpox validate` reports
        changed = changed_distribution(SamplingConfig.model_validate(draft.values.get("sampling", {})))
    if draft.get("loss_type") == "vespo":
        # VESPO uses the correction's weights, and so needs one; TRL bounds the tokens' weights before.
        if uses_vllm and on and draft.get(_MODE) == "token_truncate":
            _bounded_correction(draft)
        else:
            draft.put("correction", "vespo", "the loss vespo needs it; from the same plugin")
            why = "correction: vespo, which the loss vespo needs"
            draft.explain((*_CORRECTION, "use_vllm"), Verdict.DIFFERS, why)
    elif uses_vllm and not on:
        draft.put("correction", "none")
        draft.unneeded(_CORRECTION[1:], "there is no correction")
        draft.explain(_ON, Verdict.SAME, "correction: none")
    elif uses_vllm and changed:
        why = f"it would be biased with {', '.join(changed)}, as in TRL"
        draft.put("correction", "none", why)
        draft.explain((*_CORRECTION, "use_vllm"), Verdict.DIFFERS, f"correction none: {why}")
    elif uses_vllm:
        _bounded_correction(draft)


def _bounded_correction(draft: Draft) -> None:
    modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    name = draft.chosen(_MODE, modes).replace("_", "-")
    low, high = draft.get(_LOW), draft.get(_CAP if draft.has(_CAP) else _HIGH)
    high = UNBOUNDED if high is None else high
    parameters: dict[str, Any] = {"cap": high}
    if name.endswith("mask"):
        parameters = {"low": 0.0 if low is None else low, "high": high}
        draft.explain(_HIGH, Verdict.SAME, f"correction.high: {high}")
    elif low is not None:
        draft.explain(_LOW, Verdict.UNSUPPORTED, "a truncating correction has no lower bound")
    draft.put_component("correction", name, parameters, draft.default_of(*_CORRECTION))
    draft.explain(_ON, Verdict.SAME, f"correction: {name}")
