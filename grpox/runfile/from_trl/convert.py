"""Converts a setup for GRPOTrainer to the draft of a run file, with the outcome of each setting."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from grpox.config import RewardRef, RunConfig, Section
from grpox.config.sampling import PREFIX
from grpox.errors import ConfigError, nearest
from grpox.runfile.from_trl.draft import STATEMENT, Draft, Row, whole
from grpox.runfile.from_trl.fields import (
    FIELDS,
    GENERATION_KWARGS,
    LORA,
    TRAINER_ARGUMENTS,
    Verdict,
    key_of,
    parameters_of,
)
from grpox.runfile.from_trl.sections import write_algorithm, write_inputs
from grpox.runfile.from_trl.setup import Setup, TrlValue

_INPUTS = {"model_name_or_path", "reward_funcs", "reward_model_name_or_path", "dataset_name", "datasets"}
"""Fields of `trl grpo` that are reported as arguments of GRPOTrainer."""
_UNREAD_ARGUMENTS = {
    "args": "import the YAML file that it comes from: this script does not call GRPOConfig(...)",
    "peft_config": "fill in model.lora: this script does not call LoraConfig(...)",
}
"""Argument of GRPOTrainer that is not a readable call -> remark with the remedy."""
_CONTINUOUS = ("use_transformers_continuous_batching", "use_transformers_paged")
_LONGEST_WAIT = 1500.0
"""Largest `generator.start_timeout` in seconds."""


def convert(setup: Setup, folder: Path) -> Draft:
    """Convert `setup` to a run file.

    Args:
        folder: folder of the run file.

    Raises:
        ConfigError: a field has a value that TRL would also refuse.
    """
    draft = Draft(setup, folder)
    _copy(draft)
    _training(draft)
    _generation(draft)
    write_inputs(draft)
    write_algorithm(draft)
    _outputs(draft)
    if draft.problems:
        raise ConfigError(draft.problems)
    statements = [Row(STATEMENT, *each) for each in draft.setup.statements]
    draft.rows += [*_arguments(draft), *_fields(draft), *statements]
    return draft


def our_default(key: str) -> Any:
    """Return the default of a key of the core, None if it has none."""
    section, name, *_ = *key.split("."), ""
    field = RunConfig.model_fields[section]
    kind = field.annotation
    if name and isinstance(kind, type) and issubclass(kind, Section):
        field = kind.model_fields[name]
    return None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})


def _copy(draft: Draft) -> None:
    """Write the fields that equal a key: given fields, and TRL's defaults that differ from grpox's."""
    for name, field in FIELDS.items():
        if not field.copied or draft.unread(name) or (field.needs and not draft.get(field.needs)):
            continue
        value = draft.get(name)
        if value is not None and (draft.has(name) or value != our_default(field.key)):
            draft.put(field.key, value, draft.default_of(name))


def _training(draft: Draft) -> None:
    """Convert keys of optimizer, schedule and run length that TRL writes differently."""
    train, given = draft.values.setdefault("train", {}), draft.setup.fields
    steps, warmup, optim, top_k = map(draft.get, ("max_steps", "warmup_steps", "optim", "top_k"))
    if isinstance(steps, int) and steps > 0:
        train.pop("num_train_epochs", None)
        draft.unneeded("num_train_epochs", "max_steps is given")
    if draft.has("warmup_steps") and isinstance(warmup, int | float):
        # In transformers 5, a number below 1 is a fraction of all steps.
        draft.put("train.warmup_ratio" if 0 < warmup < 1 else "train.warmup_steps", whole(warmup))
        if warmup >= 1 and train.pop("warmup_ratio", None) is not None:
            draft.unneeded("warmup_ratio", "warmup_steps is given")
    if optim in ("adamw_torch", "adamw_torch_fused"):
        draft.copy("optim")
    elif draft.has("optim"):
        draft.ask("train.optimizer", "{path: my_optimizer.py:Mine}", f"TRL uses {optim}; the default is AdamW")
        draft.explain("optim", Verdict.UNSUPPORTED, "use AdamW, or a component in train.optimizer")
    if "max_grad_norm" in given and draft.get("max_grad_norm") is None:
        draft.put("train.max_grad_norm", 0.0)
    if "max_completion_length" in given and draft.get("max_completion_length") is None:
        draft.ask("sampling.max_completion_length", "512", "TRL has no limit here; grpox needs one")
    if isinstance(top_k, int) and top_k < 0:
        draft.put("sampling.top_k", 0)


def _generation(draft: Draft) -> None:
    """Write `generator`, and the arguments of its library into `sampling`."""
    for name, value in draft.mapping("generation_kwargs", "a mapping of names and values").items():
        if ours := GENERATION_KWARGS.get(name):
            listed = ours.startswith("stop") and not isinstance(value, list)
            draft.put(f"sampling.{ours}", [value] if listed else value)
        elif (name, value) != ("do_sample", True):
            draft.put(f"sampling.generation_kwargs.{name}", value)
    if not draft.get("use_vllm"):
        parameters = draft.given_of("hf")
        if any(draft.get(name) for name in _CONTINUOUS):
            parameters["continuous_batching"] = True
        if parameters or draft.has("use_vllm"):
            draft.put_component("generator", "hf", parameters)
        return
    if draft.chosen("vllm_mode", ("colocate", "server")) == "colocate":
        parameters = draft.given_of("vllm-colocate")
        if draft.get("vllm_model_impl") != "vllm":
            parameters["engine"] = {"model_impl": draft.get("vllm_model_impl")}
        draft.put_component("generator", "vllm-colocate", parameters)
        draft.unneeded(parameters_of("vllm-server"), "vllm_mode is colocate")
        draft.explain("vllm_mode", Verdict.SAME, "generator: vllm-colocate")
    else:
        _server(draft)
    draft.unneeded((*parameters_of("hf"), *_CONTINUOUS), "use_vllm is true")
    for name in ("vllm_structured_outputs_regex", "vllm_guided_decoding_regex"):
        if draft.has(name):
            draft.put("sampling.generation_kwargs.structured_outputs", {"regex": draft.get(name)})


def _server(draft: Draft) -> None:
    # A server listens on 0.0.0.0; grpox connects to the server on this machine.
    host = str(draft.get("vllm_server_host")).replace("0.0.0.0", "127.0.0.1")
    url = draft.get("vllm_server_base_url") or f"http://{host}:{draft.get('vllm_server_port')}"
    parameters: dict[str, Any] = {"urls": [url]}
    wait = draft.get("vllm_server_timeout")
    if draft.has("vllm_server_timeout") and isinstance(wait, int | float):
        parameters["start_timeout"] = min(float(wait), _LONGEST_WAIT)
    draft.put_component("generator", "vllm-server", parameters, "start it with `grpox serve`")
    of_serve = (*parameters_of("vllm-colocate"), "vllm_model_impl")
    draft.explain(of_serve, Verdict.DIFFERS, "an option of `grpox serve`, which starts the server")
    draft.unneeded("vllm_enable_sleep_mode", "vllm_mode is server")


def _outputs(draft: Draft) -> None:
    """Write the keys of checkpoints, logs, trackers and the hub."""
    _checkpoints(draft)
    if draft.get("load_best_model_at_end"):
        _best(draft)
    _tracking(draft)
    if draft.get("push_to_hub"):
        repo = draft.get("hub_model_id")
        if isinstance(repo, str) and "/" in repo:
            draft.copy("hub_model_id", "hub_private_repo", "hub_revision")
        else:
            draft.ask("hub", f"{{repo: user/{repo or 'name'}}}", "the repository's full name")
    if draft.has("log_completions"):
        every = draft.get("logging_steps") or 10
        steps = whole(every) if isinstance(every, int | float) and every >= 1 else 10
        draft.put("logging.completions_every", steps if draft.get("log_completions") else 0)
    draft.copy("ddp_timeout")


def _checkpoints(draft: Draft) -> None:
    strategy, steps = draft.get("save_strategy"), draft.get("save_steps")
    if strategy in ("no", False):
        draft.put("checkpoint.every", 0)
        draft.unneeded("save_steps", "save_strategy is no")
    elif strategy in ("epoch", "best"):
        draft.explain("save_strategy", Verdict.UNSUPPORTED, "checkpoint.every counts optimizer steps")
    elif draft.has("save_steps") and isinstance(steps, int | float):
        if steps >= 1:
            draft.put("checkpoint.every", whole(steps))
        else:
            why = "checkpoint.every is a number of steps, not a fraction"
            draft.explain("save_steps", Verdict.UNSUPPORTED, why)
    draft.copy("save_total_limit")


def _best(draft: Draft) -> None:
    """Leave the best metric to the user, together with the evaluation that logs it."""
    if draft.has("greater_is_better"):
        draft.put("checkpoint.best_is", "highest" if draft.get("greater_is_better") else "lowest")
    metric = str(draft.get("metric_for_best_model") or "loss").removeprefix("eval_")
    labels = [RewardRef.model_validate(entry).label for entry in draft.values.get("rewards") or ()]
    known = ("reward", "reward_std", *(f"rewards/{label}/mean" for label in labels))
    if metric in known or metric.startswith("completions/"):
        ours, why = f"{PREFIX}{metric}", "a metric of the evaluation, which also needs to be filled in"
        draft.explain("metric_for_best_model", Verdict.SAME, f"checkpoint.best: {ours}")
    else:
        ours, why = f"{PREFIX}reward", f"TRL has {metric}; docs/metrics.md lists the names"
    if "checkpoint" in draft.values:
        draft.ask("checkpoint.best", ours, why)
    else:
        draft.ask("checkpoint", f"{{best: {ours}}}", why)


def _tracking(draft: Draft) -> None:
    given = draft.get("report_to")
    named = [str(name) for name in (given if isinstance(given, list) else [given]) if name is not None]
    parameters = draft.given_of("mlflow")
    if draft.has("report_to") and named in ([], ["none"]):
        draft.put("tracking", {})
        draft.unneeded(("run_name", "project"), "report_to is none")
        return
    if others := [name for name in named if name not in ("mlflow", "all", "none")]:
        message = f"{', '.join(others)}: needs an observer plugin in tracking; MLflow is used instead"
        draft.explain("report_to", Verdict.UNSUPPORTED, message)
    elif named == ["mlflow"]:
        draft.explain("report_to", Verdict.SAME, "tracking.mlflow")
    if parameters or draft.has("report_to"):
        draft.put("tracking", {"mlflow": parameters})


def _arguments(draft: Draft) -> Iterator[Row]:
    """Report the arguments of GRPOTrainer that have no section."""
    for name, given in draft.setup.arguments.items():
        if name in _UNREAD_ARGUMENTS:
            yield Row(name, given, Verdict.UNREAD, _UNREAD_ARGUMENTS[name])
        elif field := TRAINER_ARGUMENTS.get(name):
            yield Row(name, given, *field.judge(given.value))
        else:
            yield _unknown(name, given, TRAINER_ARGUMENTS)


def _fields(draft: Draft) -> Iterator[Row]:
    for name, given in draft.setup.fields.items():
        if name in _INPUTS and given.literal:
            continue
        if not given.literal and (key := key_of(name)):
            where = "" if given.line is None else f"line {given.line}: "
            draft.ask(key, "?", f"{where}{name.removeprefix(LORA)}={given.shown}")
            yield Row(name, given, Verdict.UNREAD, f"fill in {key}")
        elif not given.literal:
            yield Row(name, given, Verdict.UNREAD, "needs to be converted by hand")
        elif name not in FIELDS:
            yield _unknown(name, given, FIELDS)
        else:
            yield Row(name, given, *(draft.explained.get(name) or FIELDS[name].judge(given.value)))


def _unknown(name: str, given: TrlValue, names: Collection[str]) -> Row:
    if name.startswith(LORA):
        return Row(name, given, Verdict.UNSUPPORTED, "plain LoRA has no such setting")
    near = nearest(name, names)
    return Row(name, given, Verdict.UNKNOWN, f"did you mean {near}?" if near else "not of TRL 1.16")
