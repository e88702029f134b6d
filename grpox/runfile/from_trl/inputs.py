"""Model with its adapters, data, rewards and evaluation."""

from __future__ import annotations

from typing import Any

from grpox.runfile.from_trl.draft import TRL_DEFAULT, Draft
from grpox.runfile.from_trl.fields import FIELDS, LORA, Verdict, parameters_of
from grpox.runfile.from_trl.setup import DataGiven, Given, RewardGiven
from grpox.runfile.model_options import REFUSED_INIT

_DTYPES = ("dtype", "torch_dtype")


def write_inputs(draft: Draft) -> None:
    """Write what goes into the run."""
    _model(draft)
    _dtype(draft)
    _data(draft)
    _rewards(draft)
    _evaluation(draft)


def _model(draft: Draft) -> None:
    given = draft.setup.model
    if given is None or not isinstance(given.value, str) or not given.literal:
        where = "" if given is None else f"{_at(given.line)}: {given.shown}"
        draft.ask("model.path", "org/name", f"a folder or hub id{'; ' + where if where else ''}")
    elif draft.is_path(given.value):
        draft.put("model.path", draft.path(given.value))
    elif "/" in given.value:
        draft.put("model.path", given.value)
    else:
        draft.ask("model.path", f"org/{given.value}", "a hub id with its owner")
    for name, value in _init(draft).items():
        draft.put(f"model.init.{name}", value)
    draft.copy("max_prompt_length")
    if draft.has("max_prompt_length"):
        draft.put("data.long_prompts", "cut")


def _init(draft: Draft) -> dict[str, Any]:
    """Arguments of from_pretrained, but for those that grpox sets itself."""
    kwargs = draft.mapping("model_init_kwargs", "arguments of from_pretrained")
    given = {name: option.value for name, option in draft.setup.model_options.items() if option.literal}
    for name, option in draft.setup.model_options.items():
        if not option.literal:
            draft.ask(f"model.init.{name}", "?", f"{_at(option.line)}: {option.shown}")
    given |= kwargs
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
    kwargs = draft.get("model_init_kwargs")
    kwargs = kwargs if isinstance(kwargs, dict) else {}
    loaded = [draft.get(name) for name in _DTYPES if draft.has(name)]
    loaded += [option.value for name, option in draft.setup.model_options.items() if name in _DTYPES]
    loaded += [kwargs[name] for name in _DTYPES if name in kwargs]
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
    elif draft.is_path(given.path) or given.path.endswith((".jsonl", ".json", ".csv", ".parquet")):
        draft.put("data.path", draft.path(given.path))
    elif "/" in given.path:
        draft.put("data.path", given.path)
    else:
        draft.ask("data.path", f"org/{given.path}", "a hub id with its owner")
    for name, value in (("subset", given.subset), ("split", given.split), ("streaming", given.streaming)):
        if value and (name, value) != ("split", "train"):
            draft.put(f"data.{name}", value)


def _rewards(draft: Draft) -> None:
    given = draft.setup.rewards
    if not given or isinstance(given, Given):
        where = f"; {_at(given.line)}: {given.shown}" if isinstance(given, Given) else ""
        draft.ask("rewards", "{path: 'rewards.py:name'}", f"the reward functions{where}")
        return
    weights = _weights(draft, len(given))
    entries = []
    for reward, weight in zip(given, weights, strict=True):
        entry = _entry(draft, reward)
        weighed = {} if weight in (None, 1, 1.0) else {"weight": weight}
        if entry is None:
            named = "".join(f", {key}: {value}" for key, value in weighed.items())
            draft.ask("rewards", f"{{path: 'rewards.py:name'{named}}}", f"{reward.shown}: {reward.note}")
        else:
            entries.append({**entry, **weighed})
    if entries:
        draft.put("rewards", entries)


def _weights(draft: Draft, rewards: int) -> list[Any]:
    weights = draft.get("reward_weights")
    if weights is None:
        return [None] * rewards
    if not isinstance(weights, list) or len(weights) != rewards:
        draft.refuse(
            "reward_weights", f"does not fit {rewards} reward functions", f"a list of {rewards} numbers"
        )
        return [None] * rewards
    return weights


def _entry(draft: Draft, reward: RewardGiven) -> dict[str, Any] | None:
    """The entry of one reward, its paths as the run file needs them."""
    if reward.entry is None:
        return None
    entry = dict(reward.entry)
    if "path" in entry:
        file, _, name = entry["path"].rpartition(":")
        entry["path"] = f"{draft.path(file)}:{name}"
    if draft.is_path(str(entry.get("model", "org"))):
        entry["model"] = draft.path(entry["model"])
    return entry


def _evaluation(draft: Draft) -> None:
    """Held-out prompts are a file, which neither a script nor a hub dataset is."""
    old = "evaluation_strategy"
    strategy = draft.get(old if draft.has(old) else "eval_strategy")
    if strategy in ("no", False) and draft.setup.evaluation is None:
        draft.unneeded(
            ("eval_steps", "per_device_eval_batch_size", "dataset_test_split", "num_generations_eval"),
            "nothing is evaluated",
        )
        return
    every = draft.get("eval_steps") or (draft.get("logging_steps") or 10 if strategy == "steps" else 0)
    why = "held-out prompts as a file"
    if draft.setup.evaluation is not None:
        why += f"; {_at(draft.setup.evaluation.line)}: {draft.setup.evaluation.shown}"
    samples = ""
    if draft.has("num_generations_eval"):
        # TRL samples in its evaluations as in training.
        samples = f", num_generations: {draft.get('num_generations_eval')}"
        samples += f", temperature: {draft.get('temperature')}"
    draft.ask("evaluation", f"{{path: held-out.jsonl, every: {every}{samples}}}", why)


def _at(line: int | None) -> str:
    return "not a literal" if line is None else f"line {line}"


KEY = "model.lora"
ALL = "all-linear"


def write_adapters(draft: Draft) -> None:
    """Write `model.lora`, where adapters are asked for."""
    if "peft_config" in draft.setup.arguments:
        draft.ask(KEY, "{r: 16, alpha: 32}", f"peft_config: {draft.setup.arguments['peft_config'].shown}")
    elif draft.setup.has_lora_config:
        _write(draft, "lora_config")
    elif draft.get("use_peft") is True:
        _write(draft, "adapter")


def _write(draft: Draft, component: str) -> None:
    names = {FIELDS[name].key.rpartition(".")[2]: name for name in parameters_of(component)}
    lora = {ours: draft.get(name) for ours, name in names.items()}
    for ours in ("target_modules", "exclude_modules"):
        if lora.get(ours) and _targets(lora[ours]) is None:
            instead = f"{KEY}.{ours}: {ALL}" if ours == "target_modules" else f"no {KEY}.{ours}"
            draft.explain(names[ours], Verdict.DIFFERS, f"{instead}, as it takes no regular expression")
    written = {
        "r": lora["r"],
        "alpha": lora["alpha"],
        "target_modules": _targets(lora["target_modules"]) or ALL,
    }
    if excluded := _targets(lora.get("exclude_modules")):
        written["exclude_modules"] = excluded
    if lora["use_rslora"]:
        written["use_rslora"] = True
    of_peft = component == "lora_config" and not any(draft.has(LORA + name) for name in ("r", "lora_alpha"))
    draft.put(KEY, written, "peft's default" if of_peft else "")


def _targets(value: Any) -> Any:
    """A list of names; None where it is none that a run file takes."""
    if isinstance(value, list):
        return value[0] if value == [ALL] else value
    # TRL makes a list of one name that name; what is no plain name is a regular expression.
    return value if value == ALL else [value] if isinstance(value, str) and _is_name(value) else None


def _is_name(value: str) -> bool:
    return all(part.isidentifier() or part.isdigit() for part in value.split("."))
