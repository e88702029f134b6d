"""Reads a Python script that trains with TRL's GRPOTrainer. It is parsed, never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpox.errors import ConfigError
from grpox.runfile.from_trl.fields import LORA, POSITIONS, STATEMENTS, VARIANTS, Verdict
from grpox.runfile.from_trl.literals import Function, ModuleNames, NotLiteral, is_main_guard
from grpox.runfile.from_trl.setup import (
    JUDGED_BY_MATH,
    REWARDS_OF_CALLS,
    Reference,
    Setup,
    TrlData,
    TrlValue,
    code,
    entry_of_call,
    of_module,
    unread,
)
from grpox.runfile.from_trl.statements import Statements, name_of

CONFIG, TRAINER, LORA_CONFIG = "GRPOConfig", "GRPOTrainer", "LoraConfig"
_READ = {"path", "name", "split", "data_files", "streaming"}
"""Arguments of load_dataset that a run file also has."""
_HARMLESS = {"shuffle", "token", "cache_dir", "num_proc"}
_STARTS = {"load_dataset", "from_pretrained", "train"}
"""Calls that must not run when a script is imported for a reward function."""


def read_script(text: str, path: Path, source: str) -> Setup:
    """Read the arguments of GRPOConfig and GRPOTrainer in a script.

    Args:
        path: path of the script, for references to its reward functions.
        source: name of the script in problems.

    Raises:
        ConfigError: the script is not Python, or does not call GRPOTrainer or GRPOConfig exactly once.
    """
    try:
        tree = ast.parse(text)
        return _Script(tree, path, source).read(text)
    except SyntaxError as error:
        where = f"{source}:{error.lineno}" if error.lineno else source
        raise ConfigError(f"not valid Python: {error.msg}", where=where) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"not valid Python: {error or 'nested too deeply'}", where=source) from error


class _Script(ModuleNames):
    """The reader of one script."""

    def __init__(self, tree: ast.Module, path: Path, source: str) -> None:
        super().__init__(tree)
        self.tree = tree
        self.path = path
        self.source = source
        self.functions = {node.name for node in tree.body if isinstance(node, Function)}
        self.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self.trainers, self.configs = map(self.descendants, (TRAINER, CONFIG))

    def read(self, text: str) -> Setup:
        """Read the call of GRPOConfig and the call of GRPOTrainer, one of which may be missing."""
        trainer = self.one(self.calls_of(self.trainers), TRAINER)
        given = {} if trainer is None else self.arguments(trainer, POSITIONS)
        configs = self.calls_of(self.configs)
        if len(configs) > 1 and "args" in given:
            used = self.behind(given["args"])
            configs = [call for call in configs if call is used] or configs
        config = self.one(configs, CONFIG)
        if config is None and trainer is None:
            what = "has no call of GRPOConfig or GRPOTrainer, so it does not train with TRL's GRPO"
            allowed = "a script with such a call, or a YAML file for `trl grpo`"
            raise ConfigError(what, where=self.source, allowed=allowed)
        setup = Setup(self.source)
        if images := self.images():
            setup.arguments["images"] = images
        calls: dict[ast.AST, str] = {} if trainer is None else {trainer: "trainer"}
        calls |= {} if config is None else {config: "args"}
        self.read_variant(setup, [call for call in (trainer, config) if call is not None])
        statements = self.statements(calls, given)
        if config is not None:
            arguments = self.arguments(config, ("output_dir",))
            setup.fields |= {name: self.given(value) for name, value in arguments.items()}
            given.pop("args", None)
        # Only a run shows which value applies.
        before = "set in the script: " if config is None else "set again: "
        setup.fields |= {
            field: unread(node, before)
            for owner, field, node in self.settings()
            if statements.kind(owner) == "args"
        }
        for name, node in given.items():
            self.read_argument(setup, name, node)
        tokenizer = self.behind(given.get("processing_class") or given.get("tokenizer") or ast.Constant(None))
        if self.called(tokenizer) == "from_pretrained" and setup.model is not None and setup.model.literal:
            paths = {self.given(path).shown for path in getattr(tokenizer, "args", ())[:1]}
            if paths - {setup.model.shown}:  # the tokenizer of another folder
                others = STATEMENTS["others"]["tokenizer"]
                setup.statements.append((unread(tokenizer), Verdict.UNSUPPORTED, others))
        setup.statements += [(given, Verdict.UNSUPPORTED, reason) for given, reason in statements.lost(text)]
        return setup

    def descendants(self, root: str) -> set[str]:
        """Collect the names of a class of TRL: its own, those of its variants, subclasses and aliases."""
        variant = re.compile(rf"(\w*GRPO\w*|RLOO){root.removeprefix('GRPO')}")
        used = {(node.attr, node.attr) for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)}
        used |= {(name, original or name) for name, (_, original) in self.imports.items()}
        names = {root}.union(*(pair for pair in used if variant.fullmatch(pair[1])))
        for node in ast.walk(self.tree):
            match node:
                case ast.ClassDef(name=name, bases=parts):
                    names |= {name} if names.intersection(map(name_of, parts)) else set()
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    parts = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
                    plain = (name_of(each) for each in parts if isinstance(each, ast.Name | ast.Attribute))
                    names |= {name} if names.intersection(plain) else set()
        return names

    def statements(self, calls: dict[ast.AST, str], given: dict[str, ast.expr]) -> Statements:
        """Find what the script does to model, tokenizer, config, dataset and trainer."""
        calls |= dict.fromkeys(self.calls_of({"load_dataset"}), "dataset")
        for call in self.calls_of({"from_pretrained"}):
            loaders = STATEMENTS["loaders"].items()
            calls[call] = next(kind for pattern, kind in loaders if re.search(pattern, code(call.func)))
        of = {name: module.partition(".")[0] for name, (module, _) in self.imports.items()}
        kinds = {name: "library" for name in of if of[name] in STATEMENTS["libraries"]}
        kinds |= dict.fromkeys(self.trainers, "class") | dict.fromkeys(self.configs, "args.")
        arguments = {given[name]: kind for name, kind in STATEMENTS["arguments"].items() if name in given}
        arguments = {node: kind for node, kind in arguments.items() if not self.given(node).literal}
        listed = [self.behind(given[name]) for name in STATEMENTS["carried"] if name in given]
        carried = {each.id for node in listed for each in ast.walk(node) if isinstance(each, ast.Name)}
        return Statements(self.tree, calls, kinds, arguments, carried)

    def read_variant(self, setup: Setup, calls: list[ast.Call]) -> None:
        """Report a trainer other than GRPOTrainer; RLOO's is carried over."""
        used = {self.called(call): call for call in calls}
        own = [each for each in self.classes.values() if each.name in used]
        used |= {name_of(base): used[each.name] for each in own for base in each.bases}
        for name, variant in VARIANTS.items():
            if call := used.get(f"{name}Trainer") or used.get(f"{name}Config"):
                given = TrlValue(code(call.func), call.lineno, literal=False)
                setup.statements.append((given, Verdict(variant["verdict"]), variant["note"]))
                setup.fields = {each: TrlValue(value) for each, value in variant.get("fields", {}).items()}

    def called(self, node: ast.AST) -> str:
        """Return the imported name of the function that `node` calls; empty if it calls none by name."""
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return self.imports.get(name, ("", name))[1]
            case ast.Call(func=ast.Attribute(attr=name)):
                return name
        return ""

    def called_of_trl(self, call: ast.Call) -> str:
        """Return the name of the function that `call` calls if it is one of trl.rewards; else empty."""
        match call.func:
            case ast.Name(id=name):
                module, function = self.imports.get(name, ("", ""))
            case ast.Attribute(value=package, attr=function):
                module = ".".join(self.imports.get(code(package), (code(package),))).rstrip(".")
            case _:
                return ""
        return function if module == "trl" or f"{module}.".startswith("trl.rewards.") else ""

    def calls_of(self, names: set[str]) -> list[ast.Call]:
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        return [node for node in nodes if self.called(node) in names]

    def one(self, calls: list[ast.Call], name: str) -> ast.Call | None:
        if len(calls) > 1:
            lines = ", ".join(str(call.lineno) for call in calls)
            what = f"calls {name} {len(calls)} times, on lines {lines}: keep one call"
            raise ConfigError(what, where=self.source)
        return calls[0] if calls else None

    def settings(self) -> Iterator[tuple[ast.expr, str, ast.expr]]:
        """Find fields that a statement sets on an object: the object, the field, and what sets it.

        By ``args.beta = ...``, ``setattr(args, "beta", ...)`` or ``dataclasses.replace(args, beta=...)``.
        """
        for node in ast.walk(self.tree):
            match node:
                case ast.Attribute(value=ast.Name() | ast.Attribute() as owner, attr=field, ctx=ast.Store()):
                    yield owner, field, node
                case ast.Call(args=[owner, name, _]) if self.called(node) == "setattr":
                    yield owner, str(name.value) if isinstance(name, ast.Constant) else code(name), node
                case ast.Call(args=[owner], keywords=keywords) if self.called(node) == "replace":
                    for keyword in keywords:
                        yield owner, keyword.arg or f"**{code(keyword.value)}", keyword.value

    def images(self) -> TrlValue | None:
        """Find the first use of a column of images: ``row["image"]``, or a key or argument of this name."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Subscript(slice=ast.Constant(value="image" | "images")):
                    return unread(node)
                case ast.Dict(keys=keys) as row:
                    if any(isinstance(k, ast.Constant) and k.value in ("image", "images") for k in keys):
                        return unread(row)
                case ast.Call(args=[ast.Constant(value="image" | "images"), *_], func=ast.Attribute(attr=attr)):
                    if attr != "remove_columns":
                        return unread(node)
        return None

    def read_argument(self, setup: Setup, name: str, node: ast.expr) -> None:
        """Read the argument `name` of GRPOTrainer."""
        match name, self.behind(node):
            case "model", behind:
                setup.model = self.given(node)
                if isinstance(behind, ast.Call) and behind.args and self.called(behind) == "from_pretrained":
                    setup.model = self.given(behind.args[0])
                    setup.model_options = {k.arg: self.given(k.value) for k in behind.keywords if k.arg}
            case "reward_funcs", behind:
                if isinstance(behind, ast.List | ast.Tuple):
                    setup.rewards = self.listed(node, self.reward)
                else:
                    reward = self.reward(node)
                    is_known = reward.entry is not None or isinstance(behind, ast.Name | ast.Attribute)
                    setup.rewards = [reward] if is_known else unread(node)
            case (("tools" | "environment_factory"), ast.Constant(value=None)):
                pass
            case "tools", _:
                setup.tools = self.listed(node, lambda part: self.reference(part, "tools.py"))
            case "environment_factory", _:
                self.read_environments(setup, node)
            case "train_dataset", _:
                setup.data = self.dataset(node)
            case _ if isinstance(node, ast.Constant) and node.value is None:
                pass
            case "peft_config", ast.Call(args=[]) as call if self.called(call) == LORA_CONFIG:
                setup.has_lora_config = True
                for keyword in call.keywords:
                    setup.fields[LORA + (keyword.arg or "**")] = self.given(keyword.value)
            case _:
                setup.arguments[name] = unread(node)

    def listed(self, node: ast.expr, read: Callable[[ast.expr], Reference]) -> list[Reference] | TrlValue:
        """Read a list of functions; `TrlValue` if the script does not show them."""
        behind = self.behind(node)
        if not isinstance(behind, ast.List | ast.Tuple) or self.is_changed(node):
            return unread(node)
        if any(isinstance(part, ast.Starred) for part in behind.elts):
            return unread(node)
        return [read(part) for part in behind.elts]

    def read_environments(self, setup: Setup, node: ast.expr) -> None:
        """Read a class of environments, or a dict of them."""
        behind, classes = self.behind(node), {"": node}
        if isinstance(behind, ast.Dict):
            names = [key.value if isinstance(key, ast.Constant) else None for key in behind.keys]
            classes = {str(name): value for name, value in zip(names, behind.values, strict=True)}
            if self.is_changed(node) or not all(isinstance(name, str) for name in names):
                setup.environments = unread(node)
        if setup.environments is None:
            setup.environments = {
                name: self.reference(value, "environment.py") for name, value in classes.items()
            }
        for value in map(self.behind, classes.values()):
            own = self.classes.get(value.id) if isinstance(value, ast.Name) else None
            body = [] if own is None or own.bases else own.body
            # A class of another module, or with a base, may have it where the script does not show it.
            setup.has_get_reward |= not body or any(getattr(part, "name", "") == "get_reward" for part in body)

    def reference(self, node: ast.expr, home: str) -> Reference:
        """Refer to a function or class of the script or of a module.

        Args:
            home: file in which the user should write what a run file cannot name.
        """
        shown, line, imports = code(node), node.lineno, self.imports
        entry, note = None, f"write it in a file {home}, and name it there"
        match self.behind(node):
            case ast.Name(id=name) if name in self.functions | self.classes.keys():
                if trains := self.trains_on_import():
                    note = f"move it to {home}: importing {self.path.name} would train (line {trains})"
                else:
                    entry = {"path": f"{self.path}:{name}"}
                    note = "better in its own file: otherwise the script is executed and TRL imported for it"
            case ast.Name(id=name) if name in imports:
                return of_module(*imports[name], shown, line, self.path.parent, home)
            case ast.Attribute(value=ast.Name(id=package), attr=name) if package in imports:
                module = ".".join(imports[package]).rstrip(".")
                return of_module(module, name, shown, line, self.path.parent, home)
        return Reference(entry, shown, line, note)

    def reward(self, node: ast.expr) -> Reference:
        shown, line = code(node), node.lineno
        entry, note = None, "write it as a function in a file rewards.py, and name that function"
        match self.behind(node):
            case ast.Constant(value=str() as model):
                entry, note = {"name": "reward_model", "model": model}, ""
            case ast.Name(id=name) if name in self.functions | self.imports.keys():
                return self.reference(node, "rewards.py")
            case ast.Attribute(value=ast.Name(id=package)) if package in self.imports:
                return self.reference(node, "rewards.py")
            case ast.Call() as call if (name := self.called_of_trl(call)) in REWARDS_OF_CALLS:
                arguments = self.arguments(call, tuple(REWARDS_OF_CALLS[name][1]))
                try:
                    entry = entry_of_call(name, {key: self.value(value) for key, value in arguments.items()})
                    note = JUDGED_BY_MATH if "correct_by" in entry else ""
                except (NotLiteral, KeyError, TypeError):
                    cure = f"{name} is a reward of grpox too: see docs/rewards.md"
                    note = f"its arguments are not literals; {cure}"
        return Reference(entry, shown, line, note)

    def trains_on_import(self) -> int | None:
        """Return the line at which importing the script would load data or train, None if there is none."""
        for statement in self.tree.body:
            if is_main_guard(statement) or isinstance(statement, Function | ast.ClassDef):
                continue
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and self.called(node) in _STARTS | self.trainers:
                    return node.lineno
            match statement:
                case ast.Expr(value=ast.Call(func=ast.Name(id=name))) if name in self.functions:
                    return statement.lineno
        return None

    def dataset(self, node: ast.expr) -> TrlData:
        """Read the dataset of an expression, as far as it is literal."""
        split: str | None = None
        changes: list[str] = []
        behind = self.behind(node)
        line = behind.lineno
        while True:
            match behind:
                case ast.Subscript(value=inner, slice=ast.Constant(value=str() as named)):
                    split = split or named
                case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method != "load_dataset":
                    if method not in _HARMLESS:
                        changes.append(f"`.{method}` on line {behind.lineno}")
                case _:
                    break
            behind = self.behind(inner)
        data = self.loaded(behind)
        data.line = line
        data.split = split or data.split
        if changes and not data.problem:
            by = " and ".join(reversed(changes))
            cure = "save its rows to a .jsonl or .parquet file and name the file"
            data.problem = f"the script changes it by {by}: {cure}"
        return data

    def loaded(self, node: ast.expr) -> TrlData:
        """Read the dataset of ``load_dataset(...)``."""
        short = code(node) if len(code(node)) <= 60 else f"{code(node)[:57]}..."
        if not isinstance(node, ast.Call) or self.called(node) != "load_dataset":
            return TrlData(problem=f"name the file or hub dataset: `{short}` is not a literal load_dataset")
        arguments = self.arguments(node, ("path", "name", "data_dir", "data_files", "split"))
        try:
            given = {name: self.value(value) for name, value in arguments.items() if name not in _HARMLESS}
            names = [given.get(name) for name in ("path", "name", "split")]
            if not all(isinstance(name, str | None) for name in names):
                raise NotLiteral
        except NotLiteral:
            what = f"name the file or hub dataset: `{short}` has arguments that are not literals"
            return TrlData(problem=what)
        path = given.get("path")
        data = TrlData(path, given.get("name"), given.get("split"), given.get("streaming") is True)
        others = sorted(name for name in given.keys() - _READ if given[name] is not None)
        if path in ("json", "csv", "parquet"):  # loaders of the files in `data_files`
            data.path = _one_file(given.get("data_files"))
            data.problem = "" if data.path else "join the files of `data_files`: a run file names one file"
        elif others := [*others, *(["data_files"] if given.get("data_files") is not None else [])]:
            listed = ", ".join(others)
            data.problem = f"name a file: load_dataset has {listed}, which a run file does not support"
        return data


def _one_file(files: Any) -> str | None:
    """Return the file of `data_files` if there is exactly one."""
    if isinstance(files, dict) and len(files) == 1:
        [files] = files.values()
    if isinstance(files, list) and len(files) == 1:
        [files] = files
    return files if isinstance(files, str) and not set(files) & set("*?[") else None
