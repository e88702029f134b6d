"""The reward functions that a set-up names, and the entries of `rewards` that call them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from grpox.runfile.from_trl.fields import TRL_REWARDS
from grpox.runfile.from_trl.literals import Names, NotLiteral, is_main_guard, plain_statements
from grpox.runfile.from_trl.setup import Given, RewardGiven, unread

OVERLONG = "get_soft_overlong_punishment"
_STARTS = {"GRPOTrainer", "load_dataset", "from_pretrained", "train"}
"""Calls that a module must not make when it is imported for a reward function."""


def overlong(max_completion_len: Any, soft_punish_cache: Any) -> dict[str, Any]:
    """The entry that does what TRL's get_soft_overlong_punishment does."""
    return {"name": "soft_overlong", "max_length": max_completion_len, "buffer": soft_punish_cache}


def reward_model(path: str) -> dict[str, Any]:
    """The entry for a model's name among `reward_funcs`."""
    return {"name": "reward_model", "model": path}


def of_trl(name: str, line: int | None = None) -> RewardGiven:
    """A function of trl.rewards by its name; one that grpox has not is imported from TRL by a file."""
    if name in TRL_REWARDS:
        return RewardGiven(shown=name, line=line, **TRL_REWARDS[name])
    return by_import("trl.rewards", name, name, line)


def by_import(module: str, name: str, shown: str, line: int | None) -> RewardGiven:
    """A function that no run file can name where it stands, but in a file that imports it."""
    note = f"write a file rewards.py with `from {module} import {name}`, and name `rewards.py:{name}`"
    return RewardGiven(None, shown, line, note)


def module_file(folder: Path, module: str) -> Path | None:
    """The file of a module that lies in or below `folder`, None where it does not."""
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    file = folder.joinpath(*parts).with_suffix(".py")
    try:
        return file if file.is_file() else None
    except OSError:  # longer than a name can be
        return None


class RewardNames:
    """Reads `reward_funcs` of a script."""

    def __init__(self, names: Names, path: Path) -> None:
        self._names = names
        self._path = path
        self._imports = _imports(names.tree)
        """Name in the script -> (module, name there), the latter empty for a module itself."""
        self._functions = {
            node.name for node in names.tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self._trains = _trains_on_import(names.tree, self._functions)

    def read(self, node: ast.expr) -> list[RewardGiven] | Given:
        """Each function of a list, or of what is no list; a `Given` where it cannot be seen which they are."""
        behind = self._names.behind(node)
        if isinstance(behind, ast.List | ast.Tuple):
            if self._names.changed(node) or any(isinstance(part, ast.Starred) for part in behind.elts):
                return unread(ast.unparse(node), node.lineno)
            return [self._reward(part) for part in behind.elts]
        reward = self._reward(node)
        known = reward.entry is not None or isinstance(behind, ast.Name | ast.Attribute)
        return [reward] if known else unread(ast.unparse(node), node.lineno)

    def _reward(self, node: ast.expr) -> RewardGiven:
        shown, line = " ".join(ast.unparse(node).split()), node.lineno
        match self._names.behind(node):
            case ast.Constant(value=str() as path):
                return RewardGiven(reward_model(path), shown, line)
            case ast.Name(id=name) if name in self._functions:
                return self._own(name, shown, line)
            case ast.Name(id=name) if name in self._imports:
                return self._imported(*self._imports[name], shown, line)
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in self._imports:
                package, member = self._imports[module]
                return self._imported(f"{package}.{member}".rstrip("."), name, shown, line)
            case ast.Call(func=ast.Name(id=name)) as call if self._imports.get(name, ("", ""))[1] == OVERLONG:
                return self._overlong(call, shown, line)
        return RewardGiven(None, shown, line, "make it a function in a file rewards.py, and name that")

    def _own(self, name: str, shown: str, line: int) -> RewardGiven:
        if self._trains:
            note = (
                f"move it to rewards.py: {self._path.name}, executed for it, would train (line {self._trains})"
            )
            return RewardGiven(None, shown, line, note)
        note = "the script is executed for it, TRL imported: in a file of its own it needs neither"
        return RewardGiven({"path": f"{self._path}:{name}"}, shown, line, note)

    def _imported(self, module: str, name: str, shown: str, line: int) -> RewardGiven:
        if module in ("trl", "trl.rewards"):
            return of_trl(name, line)
        file = module_file(self._path.parent, module.lstrip("."))
        if name and file is not None:
            return RewardGiven({"path": f"{file}:{name}"}, shown, line)
        return by_import(module, name, shown, line)

    def _overlong(self, call: ast.Call, shown: str, line: int) -> RewardGiven:
        names = ("max_completion_len", "soft_punish_cache")
        pairs = [*zip(names, call.args, strict=False), *((k.arg or "**", k.value) for k in call.keywords)]
        try:
            return RewardGiven(overlong(**{name: self._names.value(node) for name, node in pairs}), shown, line)
        except (NotLiteral, RecursionError, TypeError):
            return RewardGiven(
                None, shown, line, "its arguments are no literals: `soft_overlong` does the same"
            )


def _imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
    return found


def _trains_on_import(tree: ast.Module, functions: set[str]) -> int | None:
    """The line at which importing the script would load data or train, if there is one."""
    for statement in plain_statements(tree):
        if statement not in tree.body or is_main_guard(statement):
            continue
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and _called(node) in _STARTS:
                return node.lineno
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name))) if name in functions:
                return statement.lineno
    return None


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
