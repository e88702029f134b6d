"""A set-up for GRPOTrainer -> the draft of a run file, and what became of everything it gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from grpox.errors import ConfigError, nearest
from grpox.runfile.from_trl.adapters import write_adapters
from grpox.runfile.from_trl.algorithm import write_algorithm
from grpox.runfile.from_trl.bookkeeping import write_bookkeeping
from grpox.runfile.from_trl.draft import Draft, Row
from grpox.runfile.from_trl.field import Verdict
from grpox.runfile.from_trl.generation import write_generation
from grpox.runfile.from_trl.inputs import write_inputs
from grpox.runfile.from_trl.names import FIELDS
from grpox.runfile.from_trl.script_fields import TRAINER_ARGUMENTS
from grpox.runfile.from_trl.setup import Given, Setup
from grpox.runfile.from_trl.training import write_copied, write_training

_INPUTS = {"model_name_or_path", "reward_funcs", "reward_model_name_or_path", "dataset_name", "datasets"}
"""Fields of `trl grpo` that are told as arguments of GRPOTrainer are."""


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
    setup = draft.setup
    if setup.model is not None:
        asked = [blank.why for blank in draft.blanks if blank.key == "model.path"]
        yield _row("model", setup.model, asked[0] if asked else "", "model.path")
    for reward in setup.rewards if isinstance(setup.rewards, list) else []:
        if reward.entry is None:
            yield Row("reward_funcs", reward.shown, reward.line, Verdict.UNSUPPORTED, reward.note)
        else:
            verdict = Verdict.DIFFERS if reward.note else Verdict.SAME
            told = ", ".join(f"{key}: {value}" for key, value in reward.entry.items())
            yield Row("reward_funcs", reward.shown, reward.line, verdict, reward.note or f"rewards: {told}")
    if isinstance(setup.rewards, Given):
        yield _row("reward_funcs", setup.rewards, "fill in rewards", "rewards")
    if setup.data is not None and not setup.data.problem:
        told = next((blank.why for blank in draft.blanks if blank.key == "data.path"), "data.path")
        yield Row("train_dataset", str(setup.data.path), setup.data.line, Verdict.SAME, told)
    elif setup.data is not None:
        shown = str(setup.data.path or "")
        yield Row(
            "train_dataset", shown, setup.data.line, Verdict.UNREAD, f"fill in data.path: {setup.data.problem}"
        )
    if setup.evaluation is not None:
        yield Row(
            "eval_dataset",
            setup.evaluation.shown,
            setup.evaluation.line,
            Verdict.DIFFERS,
            "fill in evaluation: a file of held-out prompts",
        )
    for name, given in setup.arguments.items():
        yield _argument(name, given)


def _row(name: str, given: Given, blank: str, key: str) -> Row:
    if not given.literal:
        return Row(name, given.shown, given.line, Verdict.UNREAD, f"fill in {key}")
    verdict = Verdict.DIFFERS if blank else Verdict.SAME
    return Row(name, given.shown, given.line, verdict, blank or key)


def _argument(name: str, given: Given) -> Row:
    if name == "args":
        told = "not made by GRPOConfig(...) here: import the YAML file that it comes from"
        return Row(name, given.shown, given.line, Verdict.UNREAD, told)
    if name == "peft_config":
        told = "not made by LoraConfig(...): fill in model.lora"
        return Row(name, given.shown, given.line, Verdict.UNREAD, told)
    field = TRAINER_ARGUMENTS.get(name)
    if field is None:
        return _unknown(name, given, tuple(TRAINER_ARGUMENTS))
    return Row(name, given.shown, given.line, field.verdict, field.note)


def _fields(draft: Draft) -> Iterator[Row]:
    for name, given in draft.setup.fields.items():
        if name in _INPUTS and given.literal:
            continue
        if not given.literal:
            yield _unread(draft, name, given)
        elif name not in FIELDS:
            yield _unknown(name, given, tuple(FIELDS))
        else:
            yield _known(draft, name, given)


def _unread(draft: Draft, name: str, given: Given) -> Row:
    """A field that is no literal; what it would be is asked for."""
    key = FIELDS[name].key if name in FIELDS else ""
    if not key:
        return Row(name, given.shown, given.line, Verdict.UNREAD, "to be seen to by hand")
    where = "" if given.line is None else f"line {given.line}: "
    draft.ask(key, "?", f"{where}{name}={given.shown}")
    return Row(name, given.shown, given.line, Verdict.UNREAD, f"fill in {key}")


def _unknown(name: str, given: Given, names: tuple[str, ...]) -> Row:
    near = nearest(name, names)
    told = f"did you mean {near}?" if near else "not of TRL 1.16"
    return Row(name, given.shown, given.line, Verdict.UNKNOWN, told)


def _known(draft: Draft, name: str, given: Given) -> Row:
    field = FIELDS[name]
    told = draft.told(name)
    if told is not None:
        verdict, text = told
    elif field.verdict is Verdict.UNSUPPORTED and field.does_nothing_at(given.value):
        verdict, text = Verdict.NOT_NEEDED, "does nothing at this value"
    elif field.verdict is Verdict.SAME:
        verdict, text = field.verdict, field.key
    else:
        key = f"{field.key}: " if field.key and field.verdict is Verdict.DIFFERS else ""
        verdict, text = field.verdict, f"{key}{field.note}"
    return Row(name, given.shown, given.line, verdict, text)
