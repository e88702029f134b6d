"""Model with its adapters, data, rewards and evaluation."""

from __future__ import annotations

from typing import Any

from grpox.runfile.from_trl.draft import TRL_DEFAULT, Draft
from grpox.runfile.from_trl.fields import FIELDS, LORA, Verdict, parameters_of
from grpox.runfile.from_trl.setup import DataGiven, Given
from grpox.runfile.model_options import REFUSED_INIT

ALL = "all-linear"
_DTYPES = ("dtype", "torch_dtype")


def write_inputs(draft: Draft) -> None:
    """Write what goes into the run."""
    _model(draft)
    _dtype(draft)
    _data(draft)
    _rewards(draft)
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
        draft.ask("model.path", "org/name", f"a folder or hub id; {_at(given)}")
    else:
        _input(draft, "model.path", given.value)
    for name, value in _init(draft).items():
        draft.put(f"model.init.{name}", value)
    if draft.has("max_prompt_length"):
        draft.copy("max_prompt_length")
        draft.put("data.long_prompts", "cut")


def _input(draft: Draft, key: str, given: str, suffixes: tuple[str, ...] = ()) -> None:
    """Write a path or hub id; what ends in one of `suffixes` is a path."""
    if draft.is_path(given) or given.endswith(suffixes):
        draft.put(key, draft.path(given))
    elif "/" in given:
        draft.put(key, given)
    else:
        draft.ask(key, f"org/{given}", "a hub id with its owner")


def _init(draft: Draft) -> dict[str, Any]:
    """Arguments of from_pretrained, but for those that grpox sets itself."""
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
    """bfloat16 where TRL trains in it, which is its default; the weights' own type counts where it does not."""
    kwargs, options = draft.get("model_init_kwargs"), draft.setup.model_options
    loaded = [draft.get(name) for name in _DTYPES if draft.has(name)]
    loaded += [options[name].value for name in _DTYPES if name in options]
    loaded += [kwargs[name] for name in _DTYPES if name in kwargs] if isinstance(kwargs, dict) else []
    half = draft.get("bf16") if draft.has("bf16") else not draft.get("fp16")
    if half or "bfloat16" in loaded:
        given = draft.has("bf16") or bool(loaded)
        draft.put("model.dtype", "bfloat16", "" if given else f"{TRL_DEFAULT}: bf16 unless fp16")
        return
    draft.put("model.dtype", "float32")
    if not draft.get("fp16"):
        draft.explain("bf16", Verdict.SAME, "model.dtype: float32")


def _data(draft: Draft) -> None:
    given = draft.setup.data or DataGiven(problem="a .jsonl, .json, .csv or .parquet file, or a hub dataset")
    if given.problem or given.path is None:
        draft.ask("data.path", given.path or "train.jsonl", given.problem or "the file or hub dataset")
    else:
        _input(draft, "data.path", given.path, (".jsonl", ".json", ".csv", ".parquet"))
    for name, value in (("subset", given.subset), ("split", given.split), ("streaming", given.streaming)):
        if value and (name, value) != ("split", "train"):
            draft.put(f"data.{name}", value)


def _rewards(draft: Draft) -> None:
    given = draft.setup.rewards
    if not given or isinstance(given, Given):
        where = f"; {_at(given)}" if isinstance(given, Given) else ""
        draft.ask("rewards", "{path: 'rewards.py:name'}", f"the reward functions{where}")
        return
    weights = draft.get("reward_weights")
    if weights is None:
        weights = [None] * len(given)
    if not isinstance(weights, list) or len(weights) != len(given):
        what, allowed = f"does not fit {len(given)} reward functions", f"a list of {len(given)} numbers"
        draft.refuse("reward_weights", what, allowed)
        return
    for reward, weight in zip(given, weights, strict=True):
        weighed = {} if weight in (None, 1, 1.0) else {"weight": weight}
        if reward.entry is None:
            named = "".join(f", {key}: {value}" for key, value in weighed.items())
            draft.ask("rewards", f"{{path: 'rewards.py:name'{named}}}", f"{reward.shown}: {reward.note}")
        else:
            draft.values.setdefault("rewards", []).append(_entry(draft, reward.entry) | weighed)


def _entry(draft: Draft, known: dict[str, Any]) -> dict[str, Any]:
    """The entry of one reward, its paths as the run file needs them."""
    entry = dict(known)
    if "path" in entry:
        file, _, name = entry["path"].rpartition(":")
        entry["path"] = f"{draft.path(file)}:{name}"
    if draft.is_path(str(entry.get("model", "org"))):
        entry["model"] = draft.path(entry["model"])
    return entry


def _evaluation(draft: Draft) -> None:
    """Held-out prompts are a file, which neither a script nor a hub dataset is."""
    old, given = "evaluation_strategy", draft.setup.evaluation
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


def _at(given: Given) -> str:
    place = "not a literal" if given.line is None else f"line {given.line}"
    return f"{place}: {given.shown}"


def _adapters(draft: Draft, component: str) -> None:
    """Write `model.lora` from the fields of `component`."""
    names = {FIELDS[name].key.rpartition(".")[2]: name for name in parameters_of(component)}
    lora = {ours: draft.get(name) for ours, name in names.items()}
    targets, excluded = (_layers(lora.get(name)) for name in ("target_modules", "exclude_modules"))
    if lora["target_modules"] and targets is None:
        message = f"model.lora.target_modules: {ALL}, as it takes no regular expression"
        draft.explain(names["target_modules"], Verdict.DIFFERS, message)
    if lora.get("exclude_modules") and excluded is None:
        message = "no model.lora.exclude_modules, as it takes no regular expression"
        draft.explain(names["exclude_modules"], Verdict.DIFFERS, message)
    written = {"r": lora["r"], "alpha": lora["alpha"], "target_modules": targets or ALL}
    written |= {"exclude_modules": excluded} if excluded else {}
    written |= {"use_rslora": True} if lora["use_rslora"] else {}
    of_peft = component == "lora_config" and not draft.has(f"{LORA}r", f"{LORA}lora_alpha")
    draft.put("model.lora", written, "peft's default" if of_peft else "")


def _layers(value: Any) -> Any:
    """A list of names; None where it is none that a run file takes."""
    if isinstance(value, list):
        return value[0] if value == [ALL] else value
    if value == ALL or not isinstance(value, str):
        return value if value == ALL else None
    # TRL makes a list of one name that name; what is no plain name is a regular expression.
    is_name = all(part.isidentifier() or part.isdigit() for part in value.split("."))
    return [value] if is_name else None
