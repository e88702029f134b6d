"""Reads a Python script that trains with TRL's GRPOTrainer. It is parsed, never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from grpox.errors import ConfigError, Problem
from grpox.runfile.from_trl.dataset_call import read_dataset
from grpox.runfile.from_trl.fields import LORA, POSITIONS
from grpox.runfile.from_trl.literals import Names
from grpox.runfile.from_trl.reward_names import RewardNames
from grpox.runfile.from_trl.setup import Given, Setup, unread

CONFIG, TRAINER, LORA_CONFIG = "GRPOConfig", "GRPOTrainer", "LoraConfig"


def read_script(text: str, path: Path, source: str) -> Setup:
    """What the script gives to GRPOConfig and GRPOTrainer.

    Args:
        path: of the script; its reward functions are named by it.
        source: what problems name.

    Raises:
        ConfigError: it is no Python, trains nothing by GRPO, or more than one thing.
    """
    try:
        tree = ast.parse(text)
        names = Names(tree)
    except SyntaxError as error:
        where = f"{source}:{error.lineno}" if error.lineno else source
        raise ConfigError(Problem(f"not valid Python: {error.msg}", where=where)) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(Problem(f"not valid Python: {error or 'nested too deeply'}", where=source)) from error
    config, trainer = _calls(tree, names, source)
    setup = Setup(source)
    if config is not None:
        setup.fields = _config_fields(config, names)
        setup.fields |= dict(_set_afterwards(tree, names, config))
    if trainer is not None:
        given = _trainer_arguments(trainer, names)
        _read_trainer(setup, given, names, RewardNames(names, path), config is None)
    return setup


def _calls(tree: ast.Module, names: Names, source: str) -> tuple[ast.Call | None, ast.Call | None]:
    """The one call of GRPOConfig and the one of GRPOTrainer, where there are."""
    aliases = _aliases(tree)
    trainer = _one(list(_calls_of(TRAINER, tree, aliases)), TRAINER, source)
    configs = list(_calls_of(CONFIG, tree, aliases))
    if trainer is not None and len(configs) > 1:
        used = names.behind(_trainer_arguments(trainer, names).get("args", trainer))
        configs = [used] if isinstance(used, ast.Call) and used in configs else configs
    config = _one(configs, CONFIG, source)
    if config is None and trainer is None:
        what = "trains nothing with TRL's GRPO: no call of GRPOConfig or GRPOTrainer"
        raise ConfigError(
            Problem(what, where=source, allowed="a script with one, or a YAML file for `trl grpo`")
        )
    return config, trainer


def _aliases(tree: ast.Module) -> dict[str, str]:
    """``from trl import GRPOConfig as Config`` -> {"Config": "GRPOConfig"}."""
    return {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }


def _calls_of(name: str, tree: ast.Module, aliases: dict[str, str]) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=called)) if aliases.get(called, called) == name:
                yield node
            case ast.Call(func=ast.Attribute(attr=called)) if called == name:
                yield node


def _one(calls: list[ast.Call], name: str, source: str) -> ast.Call | None:
    if len(calls) > 1:
        lines = ", ".join(str(call.lineno) for call in calls)
        what = f"calls {name} {len(calls)} times, on lines {lines}: leave one of them"
        raise ConfigError(Problem(what, where=source))
    return calls[0] if calls else None


def _config_fields(call: ast.Call, names: Names) -> dict[str, Given]:
    """The arguments of GRPOConfig; its first one without a name is output_dir."""
    fields: dict[str, Given] = {}
    for position, argument in enumerate(call.args):
        if position == 0 and not isinstance(argument, ast.Starred):
            fields["output_dir"] = names.given(argument)
        else:
            fields[f"argument {position + 1}"] = unread(ast.unparse(argument), argument.lineno)
    for keyword in call.keywords:
        if keyword.arg is not None:
            fields[keyword.arg] = names.given(keyword.value)
        else:
            fields |= _unpacked(keyword.value, names)
    return fields


def _unpacked(node: ast.expr, names: Names) -> dict[str, Given]:
    """The pairs of ``**node``."""
    given, line = names.given(node), names.behind(node).lineno
    if given.literal and isinstance(given.value, dict):
        return {name: Given(value, line) for name, value in given.value.items()}
    return {f"**{ast.unparse(node)}": unread(ast.unparse(node), node.lineno)}


def _set_afterwards(tree: ast.Module, names: Names, config: ast.Call) -> Iterator[tuple[str, Given]]:
    """``args.beta = ...`` after ``args = GRPOConfig(...)``: which of the two counts is known when it runs."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name() as name, attr=attr, ctx=ast.Store()):
                if names.behind(name) is config:
                    yield attr, unread(f"set again: {ast.unparse(node)}", node.lineno)


def _trainer_arguments(call: ast.Call, names: Names) -> dict[str, ast.expr]:
    arguments = dict(zip(POSITIONS, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg is not None:
            arguments[keyword.arg] = keyword.value
        elif isinstance(pairs := names.behind(keyword.value), ast.Dict):
            for key, value in zip(pairs.keys, pairs.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    arguments[key.value] = value
    return arguments


def _read_trainer(
    setup: Setup, given: dict[str, ast.expr], names: Names, rewards: RewardNames, without_config: bool
) -> None:
    for name, node in given.items():
        match name:
            case "model":
                setup.model, setup.model_options = _model(node, names)
            case "reward_funcs":
                setup.rewards = rewards.read(node)
            case "train_dataset":
                setup.data = read_dataset(node, names)
            case "eval_dataset":
                setup.evaluation = None if _is_none(node) else unread(ast.unparse(node), node.lineno)
            case "peft_config" if (lora := _lora(node, names)) is not None:
                setup.has_lora_config = True
                setup.fields |= {f"{LORA}{argument}": value for argument, value in lora.items()}
            case "args":
                if without_config and not _is_none(node):
                    setup.arguments[name] = unread(ast.unparse(node), node.lineno)
            case _ if not _is_none(node):
                setup.arguments[name] = unread(ast.unparse(node), node.lineno)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _lora(node: ast.expr, names: Names) -> dict[str, Given] | None:
    """The arguments of ``LoraConfig(...)``; None where `node` stands for something else."""
    match names.behind(node):
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[], keywords=keywords) if (
            _aliases(names.tree).get(name, name) == LORA_CONFIG
        ):
            return {keyword.arg or "**": names.given(keyword.value) for keyword in keywords}
    return None


def _model(node: ast.expr, names: Names) -> tuple[Given, dict[str, Given]]:
    """The model's name, and what ``AutoModelForCausalLM.from_pretrained(name, ...)`` is given besides."""
    match names.behind(node):
        case ast.Call(func=ast.Attribute(attr="from_pretrained"), args=[first, *_], keywords=keywords):
            options = {keyword.arg: names.given(keyword.value) for keyword in keywords if keyword.arg}
            return names.given(first), options
    return names.given(node), {}
