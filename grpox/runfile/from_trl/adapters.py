"""Adapters: the fields `lora_*` of `trl grpo`, or the LoraConfig that a script gives to GRPOTrainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpox.runfile.from_trl.draft import Draft
from grpox.runfile.from_trl.field import TrlField, Verdict, differs, same, unneeded, unsupported
from grpox.runfile.from_trl.setup import Given

KEY = "model.lora"
ALL = "all-linear"
_ONLY = "adapters alone are trained, of linear layers"

LORA_CONFIG: dict[str, TrlField] = {
    "r": same(KEY, 8, "`r`"),
    "lora_alpha": same(KEY, 8, "`alpha`"),
    "lora_dropout": differs(KEY, "dropout is off in grpox", 0.0),
    "target_modules": same(KEY, None, "`target_modules`"),
    "exclude_modules": same(KEY, None, "`exclude_modules`"),
    "use_rslora": same(KEY, False, "`use_rslora`"),
    "bias": unsupported(_ONLY, "none"),
    "modules_to_save": unsupported(_ONLY),
    "target_parameters": unsupported(_ONLY),
    "trainable_token_indices": unsupported(_ONLY),
    "init_lora_weights": unsupported("A is drawn as peft draws it by default, and B is 0", True),
    "layers_to_transform": unsupported("name the layers in `target_modules`: `layers.3.self_attn.q_proj`"),
    "rank_pattern": unsupported("all adapters have one rank", {}),
    "alpha_pattern": unsupported("all adapters have one alpha", {}),
    "use_dora": unsupported("adapters are added to their weights, as of LoRA itself", False),
    "lora_bias": unsupported("an adapter has no bias", False),
    "task_type": unneeded("a language model is trained"),
    "inference_mode": unneeded("the adapter is trained", False),
    "fan_in_fan_out": unneeded("follows from the layer", False),
}
"""Argument of peft's LoraConfig -> what answers to it; the defaults are those of peft 0.21."""

YAML_NAMES = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "use_rslora": "use_rslora",
}
"""Field of `trl grpo` -> the argument of LoraConfig that it is passed as."""
YAML_OTHERS = ("lora_target_parameters", "lora_modules_to_save", "lora_task_type", "use_dora")


def write_adapters(draft: Draft) -> None:
    """Write `model.lora`, where adapters are asked for."""
    given = draft.setup.lora
    if given is not None:
        _write(draft, {name: value.value for name, value in given.items() if value.literal}, "peft's default")
        for name, value in given.items():
            _tell(draft, name, value)
    elif "peft_config" in draft.setup.arguments:
        draft.ask(KEY, "{r: 16, alpha: 32}", f"peft_config: {draft.setup.arguments['peft_config'].shown}")
    elif draft.get("use_peft") is True:
        given_ones = {ours: draft.get(name) for name, ours in YAML_NAMES.items() if draft.has(name)}
        _write(draft, {"r": draft.get("lora_r"), "lora_alpha": draft.get("lora_alpha")} | given_ones)
        if draft.get("lora_dropout"):
            draft.tell("lora_dropout", Verdict.DIFFERS, "0: dropout is off in grpox")
        _tell_targets(draft)
    else:
        draft.unneeded((*YAML_NAMES, *YAML_OTHERS), "without `use_peft` there is no adapter")


def _write(draft: Draft, values: Mapping[str, Any], comment: str = "") -> None:
    """`values` by the names of LoraConfig; what is missing has peft's default, as `comment` says."""

    def of(name: str) -> Any:
        return values.get(name, LORA_CONFIG[name].default)

    lora = {"r": of("r"), "alpha": of("lora_alpha"), "target_modules": _targets(of("target_modules")) or ALL}
    if excluded := _targets(of("exclude_modules")):
        lora["exclude_modules"] = excluded
    if of("use_rslora"):
        lora["use_rslora"] = True
    draft.put(KEY, lora, comment if values.keys().isdisjoint(("r", "lora_alpha")) else "")


def _targets(value: Any) -> Any:
    """A list of names; None where it is none that a run file takes."""
    if isinstance(value, list):
        return value[0] if value == [ALL] else value
    # TRL makes a list of one name that name; what is no plain name is a regular expression.
    return value if value == ALL else [value] if isinstance(value, str) and _is_name(value) else None


def _is_name(value: str) -> bool:
    return all(part.isidentifier() or part.isdigit() for part in value.split("."))


def _tell_targets(draft: Draft) -> None:
    name = "lora_target_modules"
    given = draft.get(name)
    if given and _targets(given) is None:
        draft.tell(name, Verdict.DIFFERS, f"{KEY}.target_modules: {ALL}, as it takes no regular expression")


def _tell(draft: Draft, name: str, given: Given) -> None:
    """A row on one argument of LoraConfig."""
    field = LORA_CONFIG.get(name)
    verdict, told = _verdict(name, given, field)
    draft.row(f"peft_config.{name}", given, given.line, verdict, told)


def _verdict(name: str, given: Given, field: TrlField | None) -> tuple[Verdict, str]:
    if not given.literal:
        return Verdict.UNREAD, f"fill in {KEY}"
    if field is None:
        return Verdict.UNSUPPORTED, "plain LoRA has no such setting"
    if field.verdict is Verdict.SAME:
        if name == "target_modules" and given.value and _targets(given.value) is None:
            return Verdict.DIFFERS, f"{KEY}.target_modules: {ALL}, as it takes no regular expression"
        return Verdict.SAME, f"{KEY}.{field.note.strip('`')}"
    if field.does_nothing_at(given.value):
        return Verdict.NOT_NEEDED, "does nothing at this value"
    return field.verdict, field.note
