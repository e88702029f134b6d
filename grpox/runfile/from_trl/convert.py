"""A set-up for GRPOTrainer -> the draft of a run file, and what became of everything it gives."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from grpox.errors import ConfigError, nearest
from grpox.runfile.from_trl.algorithm import write_algorithm
from grpox.runfile.from_trl.bookkeeping import write_bookkeeping
from grpox.runfile.from_trl.draft import Draft, Row
from grpox.runfile.from_trl.fields import FIELDS, LORA, TRAINER_ARGUMENTS, Verdict, key_of
from grpox.runfile.from_trl.generation import write_generation
from grpox.runfile.from_trl.inputs import write_adapters, write_inputs
from grpox.runfile.from_trl.setup import Given, Setup
from grpox.runfile.from_trl.training import write_copied, write_training

_INPUTS = {"model_name_or_path", "reward_funcs", "reward_model_name_or_path", "dataset_name", "datasets"}
"""Fields of `trl grpo` that are reported as arguments of GRPOTrainer are."""
_MADE_ELSEWHERE = {
    "args": "not made by GRPOConfig(...) here: import the YAML file that it comes from",
    "peft_config": "not made by LoraConfig(...): fill in model.lora",
}
"""Argument of GRPOTrainer -> what to do where the script does not make it by a call that was read."""


def convert(setup: Setup, folder: Path) -> Draft:
    """The run file that does what `setup` does.

    Args:
        folder: in which it will stand.

    Raises:
        ConfigError: a field has a value that TRL would refuse too.
    """
    draft = Draft(setup, folder)
    write_copied(draft)
    write_training(draft)
    write_generation(draft)
    write_inputs(draft)
    write_adapters(draft)
    write_algorithm(draft)
    write_bookkeeping(draft)
    if draft.problems:
        raise ConfigError(draft.problems)
    draft.rows += [*_arguments(draft), *_fields(draft)]
    return draft


def _arguments(draft: Draft) -> Iterator[Row]:
    """What GRPOTrainer is given, model and rewards first."""
    setup, asked = draft.setup, {blank.key: blank.why for blank in reversed(draft.blanks)}
    if isinstance(setup.model, Given):
        blank = asked.get("model.path", "")
        verdict = Verdict.DIFFERS if blank else Verdict.SAME
        if not setup.model.literal:
            verdict, blank = Verdict.UNREAD, "fill in model.path"
        yield _row("model", setup.model, verdict, blank or "model.path")
    if isinstance(setup.rewards, Given):
        yield _row("reward_funcs", setup.rewards, Verdict.UNREAD, "fill in rewards")
    for reward in setup.rewards if isinstance(setup.rewards, list) else []:
        verdict = Verdict.DIFFERS if reward.note else Verdict.SAME
        named = ", ".join(f"{key}: {value}" for key, value in (reward.entry or {}).items())
        if reward.entry is None:
            verdict = Verdict.UNSUPPORTED
        yield Row("reward_funcs", reward.shown, reward.line, verdict, reward.note or f"rewards: {named}")
    if setup.data is not None:
        verdict, message = Verdict.SAME, asked.get("data.path", "data.path")
        if setup.data.problem:
            verdict, message = Verdict.UNREAD, f"fill in data.path: {setup.data.problem}"
        yield Row("train_dataset", str(setup.data.path or ""), setup.data.line, verdict, message)
    if setup.evaluation is not None:
        held_out = "fill in evaluation: a file of held-out prompts"
        yield _row("eval_dataset", setup.evaluation, Verdict.DIFFERS, held_out)
    for name, given in setup.arguments.items():
        yield _argument(name, given)


def _row(name: str, given: Given, verdict: Verdict, message: str) -> Row:
    return Row(name, given.shown, given.line, verdict, message)


def _argument(name: str, given: Given) -> Row:
    if name in _MADE_ELSEWHERE:
        return _row(name, given, Verdict.UNREAD, _MADE_ELSEWHERE[name])
    field = TRAINER_ARGUMENTS.get(name)
    if field is None:
        return _unknown(name, given, TRAINER_ARGUMENTS)
    return _row(name, given, field.verdict, field.note)


def _fields(draft: Draft) -> Iterator[Row]:
    for name, given in draft.setup.fields.items():
        if name in _INPUTS and given.literal:
            continue
        if not given.literal:
            yield _unread(draft, name, given)
        elif name not in FIELDS:
            yield _unknown(name, given, FIELDS)
        else:
            verdict, message = draft.explained.get(name) or FIELDS[name].judge(given.value)
            yield _row(name, given, verdict, message)


def _unread(draft: Draft, name: str, given: Given) -> Row:
    """A field that is no literal; what it would be is asked for."""
    key = key_of(name)
    if not key:
        return _row(name, given, Verdict.UNREAD, "to be seen to by hand")
    where = "" if given.line is None else f"line {given.line}: "
    draft.ask(key, "?", f"{where}{name.removeprefix(LORA)}={given.shown}")
    return _row(name, given, Verdict.UNREAD, f"fill in {key}")


def _unknown(name: str, given: Given, names: Collection[str]) -> Row:
    if name.startswith(LORA):
        return _row(name, given, Verdict.UNSUPPORTED, "plain LoRA has no such setting")
    near = nearest(name, names)
    message = f"did you mean {near}?" if near else "not of TRL 1.16"
    return _row(name, given, Verdict.UNKNOWN, message)
