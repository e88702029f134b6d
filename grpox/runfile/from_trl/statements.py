"""Finds the statements of a script that change what it trains: no run file holds them."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping

from grpox.runfile.from_trl.fields import STATEMENTS as TABLE
from grpox.runfile.from_trl.literals import Function
from grpox.runfile.from_trl.setup import TrlValue, code

_DEEP = ("model", "dataset", "trainer")
"""Kinds whose attributes, and results of methods, can be changed themselves."""
_BLOCKS = Function | ast.ClassDef | ast.For | ast.While | ast.If | ast.With


class Statements:
    """The names of a script that hold what is trained, and what the script does to them.

    Args:
        calls: call that is carried over -> kind of its result, such as ``"model"``.
        kinds: name -> kind of what it holds, for libraries and classes; the other names are added.
        arguments: argument of the trainer -> kind of what it holds.
        carried: functions and classes that the run file names.
    """

    def __init__(
        self,
        tree: ast.Module,
        calls: Mapping[ast.AST, str],
        kinds: dict[str, str],
        arguments: Mapping[ast.expr, str],
        carried: Collection[str],
    ) -> None:
        self.calls, self.kinds, nodes = calls, kinds, list(ast.walk(tree))
        self.functions = {node.name: node for node in nodes if isinstance(node, Function)}
        self.changing: set[tuple[str, str]] = set()
        """Function of the script, and a kind that it changes."""
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        own = [each for each in classes if {"class", "args."} & set(map(self.kind, each.bases))]
        self.overrides = [n for each in own for n in each.body if not isinstance(n, ast.Pass | ast.Expr)]
        self.overrides += [each for each in own if {*map(self.kind, each.bases)} - {"class", "args."}]
        # The other arguments of the trainer than model and tokenizer have rows of their own.
        trainers = [node for node in nodes if isinstance(node, ast.Call) and calls.get(node) == "trainer"]
        bodies: list[ast.AST] = [k for call in trainers for k in call.keywords if k.arg not in TABLE["loaded"]]
        bodies += self.overrides + [n for n in (*classes, *self.functions.values()) if n.name in carried]
        hidden = {each for body in bodies for each in ast.walk(body)}
        self.nodes = [node for node in nodes if node not in hidden]
        for argument, kind in arguments.items():
            self._hold(argument.value if isinstance(argument, ast.Subscript) else argument, kind)
        before = -1
        while before < len(kinds):
            before = len(kinds)
            for node in self.nodes:
                self._follow(node)

    def lost(self, text: str) -> Iterator[tuple[TrlValue, str]]:
        """Yield the statements of the script `text` that are not carried over, with the reason or cure."""
        nodes, lost, before = set(self.nodes), dict[ast.stmt, str](), -1
        while before < len(self.changing):
            before = len(self.changing)
            for each in (node for node in self.nodes if isinstance(node, ast.stmt)):
                # ``for row in data.select(...)`` changes nothing.
                ignored = ("", "dataset" if isinstance(each, ast.For) else "")
                kinds = [self._changed(node) for node in _own_nodes(each) if node in nodes]
                if kind := next((kind for kind in kinds if kind not in ignored), ""):
                    lost[each] = kind
            for name, function in self.functions.items():
                inner = (node for node in ast.walk(function) if isinstance(node, ast.stmt) and node in lost)
                self.changing |= {(name, lost[node]) for node in inner}
        lost |= dict.fromkeys(self.overrides, "class")
        for statement in sorted(lost, key=lambda each: each.lineno):
            lines = (ast.get_source_segment(text, statement) or "").splitlines()
            shown = " ".join(" ".join(lines[:1] if isinstance(statement, _BLOCKS) else lines).split())
            cures = (cure for pattern, cure in TABLE["cures"].items() if re.search(pattern, shown))
            yield TrlValue(shown, statement.lineno, False), next(cures, TABLE["others"][lost[statement]])

    def kind(self, node: ast.AST | None) -> str:
        """Return the kind of what an expression holds, with a dot for a plain value of it; else nothing."""
        match node:
            case ast.Call() if node in self.calls:
                return self.calls[node]
            case ast.Name(id=name):
                return self.kinds.get(name, "")
            case ast.Constant(value=str(text)) if text.partition(".")[0] in TABLE["libraries"] and "." in text:
                return "library"  # as in ``patch("trl.trainer.utils.pad")``
            case ast.Attribute() if known := self.kinds.get(code(node)):
                return known
            case ast.Attribute(value=inner, attr=attr):
                owner = "class" if self.kinds.get(attr) == "class" else self.kind(inner)
                if owner in _DEEP and attr in TABLE["parts"]:
                    return str(TABLE["parts"][attr])
                is_plain = owner in ("tokenizer", "config", "args") and "tokenizer" not in attr
                return f"{owner}." if owner and (is_plain or re.fullmatch(TABLE["plain"], attr)) else owner
            case ast.Call(func=ast.Attribute(value=inner, attr=name)) if (owner := self.kind(inner)) in _DEEP:
                return "" if re.fullmatch(TABLE["values"], name) else owner
            case ast.Call(func=func) if name_of(func) in self.functions:
                return self.kinds.get(f"{name_of(func)}()", "")
            case ast.Call(func=func, args=args, keywords=keywords):
                if re.fullmatch(TABLE["functions"], code(func)) and name_of(func) not in TABLE["containers"]:
                    return ""
                return next((kind for kind in map(self.kind, [*args, *keywords]) if kind in _DEEP), "")
            case ast.Compare() | ast.BinOp() | ast.JoinedStr() | ast.Lambda():
                return ""
            case ast.expr() | ast.keyword():
                return next(filter(None, map(self.kind, ast.iter_child_nodes(node))), "")
        return ""

    def _follow(self, node: ast.AST) -> None:
        """Record what the names hold that an assignment, a loop, or a function of the script binds."""
        fields = dict(ast.iter_fields(node))
        value = fields.get("value") or fields.get("iter") or fields.get("context_expr")
        targets = [*fields.get("targets", ()), fields.get("target"), fields.get("optional_vars")]
        bound: list[tuple[ast.AST, ast.AST]] = [(target, value) for target in targets if target and value]
        if isinstance(node, ast.Call) and (function := self.functions.get(name_of(node.func))):
            named = {each.arg: each for each in ast.walk(function.args) if isinstance(each, ast.arg)}
            named.pop("self", None)
            bound += [*zip(named.values(), node.args, strict=False)]
            bound += [(named[each.arg], each.value) for each in node.keywords if each.arg in named]
        if isinstance(node, Function):
            kinds = (self.kind(each.value) for each in ast.walk(node) if isinstance(each, ast.Return))
            self.kinds |= {f"{node.name}()": kind for kind in kinds if kind}
        for target, value in bound:
            kind = self.kind(value)
            if not kind and isinstance(value, ast.Subscript):  # ``train = data["train"]``, which is trained on
                self._hold(value.value, self.kind(target))
            for each in ast.walk(target):
                if isinstance(getattr(each, "ctx", ast.Store()), ast.Store):
                    self._hold(each, kind)

    def _hold(self, node: ast.AST, kind: str) -> None:
        """Record what a name, or dotted name, holds."""
        name = getattr(node, "arg", "") or code(node)
        if kind and kind[-1] != "." and isinstance(node, ast.Name | ast.Attribute | ast.arg):
            is_tokenizer = kind == "model" and re.search("(?i)tok|processor", name)
            self.kinds.setdefault(name, "tokenizer" if is_tokenizer else kind)

    def _changed(self, node: ast.AST) -> str:
        """Return the kind of what a node changes, or passes on to code that may change it."""
        match node:
            case ast.Attribute(value=owner, ctx=ast.Store() | ast.Del()) if self.kind(owner) == "args":
                return ""  # among the fields
            case ast.Attribute(value=owner, ctx=ast.Store() | ast.Del()):
                return self.kind(owner).rstrip(".")
            case ast.Subscript(value=owner, ctx=ast.Store() | ast.Del()):
                return self.kind(owner).rstrip(".")
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name))], value=value) if name != "self":
                return kind if (kind := self.kind(value)) in (*_DEEP, "tokenizer", "class") else ""
            case ast.Call(func=func, args=args, keywords=keywords):
                return self._changed_by_call(node, name_of(func), [*args, *(each.value for each in keywords)])
        return ""

    def _changed_by_call(self, call: ast.Call, name: str, values: list[ast.expr]) -> str:
        kinds = [kind for kind in map(self.kind, values) if kind and kind[-1] != "."]
        if kind := self.calls.get(call, ""):
            options = [each.arg or "" for each in call.keywords if code(each.value) not in TABLE["off"]]
            is_odd = any(re.fullmatch(TABLE["options"].get(kind, "-"), option) for option in options)
            passed = kinds if kind == "model" else any(map(self.kind, values[1:]))  # the first is a path
            return kind if is_odd or (name == "from_pretrained" and passed) else ""
        owner = self.kind(call.func.value).rstrip(".") if isinstance(call.func, ast.Attribute) else ""
        if owner not in ("", "library"):
            resumes = name == "train" and any(code(each) not in TABLE["off"] for each in values)
            return owner if resumes or not re.fullmatch(TABLE["methods"], name) else ""
        is_field = name in ("setattr", "replace") and kinds[:1] == ["args"]
        is_forward = self.kinds.get(code(call.func)) in ("model", "tokenizer")
        if is_field or is_forward or re.fullmatch(TABLE["functions"], code(call.func)):
            return ""
        if function := self.functions.get(name):
            trains = "trainer" in map(self.calls.get, ast.walk(function))
            return next((kind for kind in kinds if (name, kind) in self.changing and not trains), "")
        patches = re.search("(?i)patch|attr|object", name)
        return next((kind for kind in kinds if patches or kind != "library"), "")


def _own_nodes(statement: ast.AST) -> Iterator[ast.AST]:
    """Walk a statement without the statements inside it."""
    waiting = [statement]
    while waiting:
        yield (node := waiting.pop())
        inner = (ast.stmt, ast.ExceptHandler, ast.match_case)
        waiting += [each for each in ast.iter_child_nodes(node) if not isinstance(each, inner)]


def name_of(func: ast.expr) -> str:
    """Return the last name of a dotted expression."""
    return func.attr if isinstance(func, ast.Attribute) else code(func)
