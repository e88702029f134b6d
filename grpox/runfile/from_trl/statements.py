"""Finds the statements of a script that change what it trains: no run file holds them."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator

from grpox.runfile.from_trl.fields import STATEMENTS as TABLE
from grpox.runfile.from_trl.literals import Function
from grpox.runfile.from_trl.setup import Given, code

_DEEP = ("model", "dataset", "trainer")
"""Kinds whose attributes, and results of methods, can be changed themselves."""
_BLOCKS = Function | ast.ClassDef | ast.For | ast.While | ast.If | ast.With


class Statements:
    """The names of a script that hold what is trained, and what the script does to them.

    Args:
        calls: call that is carried over -> kind of its result, such as ``"model"``.
        kinds: class of the trainer, and names of libraries -> kind.
        held: argument of the trainer -> kind of what it holds.
        carried: functions and classes that the run file names.
    """

    def __init__(
        self,
        tree: ast.Module,
        calls: dict[ast.AST, str],
        kinds: dict[str, str],
        held: dict[ast.expr, str],
        carried: Collection[str],
    ) -> None:
        self.calls, self.kinds, nodes = calls, kinds, list(ast.walk(tree))
        self.functions = {node.name: node for node in nodes if isinstance(node, Function)}
        own = (n for n in nodes if isinstance(n, ast.ClassDef) and "class" in map(self.kind, n.bases))
        # Of a subclass of the trainer all but its docstring.
        self.overrides = [
            each for node in own for each in node.body if not isinstance(each, ast.Pass | ast.Expr)
        ]
        bodies = [*self.overrides, *(each for each in nodes if getattr(each, "name", "") in carried)]
        hidden = {each for body in bodies for each in ast.walk(body)}
        self.statements = [each for each in nodes if isinstance(each, ast.stmt) and each not in hidden]
        # The other arguments of the trainer have rows of their own.
        keywords = [k for call, kind in calls.items() if kind == "trainer" for k in call.keywords]
        self.rows = {each for k in keywords if k.arg != "model" for each in ast.walk(k)}
        for node, kind in held.items():
            self.hold(node.value if isinstance(node, ast.Subscript) else node, kind)
        before = -1
        while before < len(kinds):
            before = len(kinds)
            for node in (each for statement in self.statements for each in _own_nodes(statement)):
                self._follow(node)

    def lost(self, text: str) -> Iterator[tuple[Given, str]]:
        """Yield the statements of the script `text` that are not carried over, with the reason or cure."""
        changes = {
            each: next(filter(None, map(self._changed, _own_nodes(each))), "") for each in self.statements
        }
        changes |= dict.fromkeys(self.overrides, "class")
        for statement in sorted(filter(changes.get, changes), key=lambda each: each.lineno):
            lines = (ast.get_source_segment(text, statement) or "").splitlines()
            shown = " ".join(" ".join(lines[:1] if isinstance(statement, _BLOCKS) else lines).split())
            cures = (cure for pattern, cure in TABLE["cures"].items() if re.search(pattern, shown))
            yield Given(shown, statement.lineno, False), next(cures, TABLE["others"][changes[statement]])

    def kind(self, node: ast.AST | None) -> str:
        """Return the kind of what an expression holds, with a dot for a plain value of it; else nothing."""
        match node:
            case ast.Call() if node in self.calls:
                return self.calls[node]
            case ast.Name() | ast.Attribute() if kind := self.kinds.get(code(node)):
                return kind
            case ast.Attribute(value=inner, attr=attr):
                owner = "class" if self.kinds.get(attr) == "class" else self.kind(inner)
                if owner in _DEEP and attr in TABLE["parts"]:
                    return str(TABLE["parts"][attr])
                is_plain = owner in ("tokenizer", "config", "args") and "tokenizer" not in attr
                return f"{owner}." if owner and (is_plain or re.fullmatch(TABLE["plain"], attr)) else owner
            case ast.Call(func=ast.Attribute(value=inner, attr=name)) if (owner := self.kind(inner)) in _DEEP:
                return "" if re.fullmatch(TABLE["values"], name) else owner
            case ast.Call(func=func) if function := self.functions.get(name_of(func)):
                return self._first(each for each in ast.walk(function) if isinstance(each, ast.Return))
            case ast.Call(func=func, args=args, keywords=keywords):
                if re.fullmatch(TABLE["functions"], name_of(func)) and name_of(func) not in TABLE["containers"]:
                    return ""
                kind = self._first([*args, *keywords])
                return kind if kind in _DEEP else ""
            case ast.Compare() | ast.BinOp() | ast.JoinedStr() | ast.Lambda():
                return ""
            case ast.expr() | ast.keyword() | ast.Return():
                return self._first(ast.iter_child_nodes(node))
        return ""

    def _first(self, nodes: Iterable[ast.AST]) -> str:
        return next(filter(None, map(self.kind, nodes)), "")

    def _follow(self, node: ast.AST) -> None:
        """Record what the names hold that an assignment, a loop, or a call of the script's functions binds."""
        fields = dict(ast.iter_fields(node))
        value = fields.get("value") or fields.get("iter") or fields.get("context_expr")
        targets = [*fields.get("targets", ()), fields.get("target"), fields.get("optional_vars")]
        bound = [(target, value) for target in targets if target]
        if isinstance(node, ast.Call) and (function := self.functions.get(name_of(node.func))):
            named = {each.arg: each for each in ast.walk(function.args) if isinstance(each, ast.arg)}
            named.pop("self", None)
            bound += [*zip(named.values(), node.args, strict=False)]
            bound += [(named[each.arg], each.value) for each in node.keywords if each.arg in named]
        for target, value in bound:
            kind = self.kind(value)
            if not kind and isinstance(value, ast.Subscript):  # ``train = data["train"]``, with `train` held
                self.hold(value.value, self.kind(target))
            for each in ast.walk(target):
                if isinstance(getattr(each, "ctx", ast.Store()), ast.Store):
                    self.hold(each, kind)

    def hold(self, node: ast.AST, kind: str) -> None:
        """Record what a name, or dotted name, holds."""
        name = getattr(node, "arg", "") or code(node)
        if kind and kind[-1] != "." and isinstance(node, ast.Name | ast.Attribute | ast.arg):
            is_tokenizer = kind == "model" and re.search("(?i)tok|processor", name)
            self.kinds.setdefault(name, "tokenizer" if is_tokenizer else kind)

    def _changed(self, node: ast.AST) -> str:
        """Return the kind of what a node changes, or passes on to code that may change it."""
        match node:
            case _ if node in self.rows:
                return ""
            case ast.Attribute(value=owner, ctx=ast.Store() | ast.Del()) if self.kind(owner) == "args":
                return ""  # among the fields
            case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                return self.kind(node.value).rstrip(".")
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name))]) if name != "self":
                return kind if (kind := self.kind(node.value)) in (*_DEEP, "tokenizer", "class") else ""
            case ast.Call(func=func, args=args, keywords=keywords):
                name, values = name_of(func), [*args, *(each.value for each in keywords)]
            case _:
                return ""
        kinds = [kind for kind in map(self.kind, values) if kind and kind[-1] != "."]
        owner = self.kind(func.value).rstrip(".") if isinstance(func, ast.Attribute) else ""
        is_on = any(code(each) not in TABLE["off"] for each in values)
        if kind := self.calls.get(node, ""):
            options = [each.arg or "" for each in keywords if code(each.value) not in TABLE["off"]]
            is_odd = any(re.fullmatch(TABLE["options"].get(kind, "-"), option) for option in options)
            return kind if is_odd or (name == "from_pretrained" and kinds) else ""
        if owner not in ("", "library"):
            harmless = re.fullmatch(TABLE["methods"], name) and not (name == "train" and is_on)
            return "" if harmless else owner
        if (name in ("setattr", "replace") and kinds[:1] == ["args"]) or re.fullmatch(TABLE["functions"], name):
            return ""
        if function := self.functions.get(name):
            inner = [each for each in ast.walk(function) if each is not node]
            trains = "trainer" in map(self.calls.get, inner)
            return kinds[0] if kinds and not trains and any(map(self._changed, inner)) else ""
        patches = re.search("(?i)patch|attr|object", name)
        return next((kind for kind in kinds if patches or kind != "library"), "")


def _own_nodes(statement: ast.AST) -> Iterator[ast.AST]:
    """Walk a statement without the statements inside it."""
    yield statement
    for each in ast.iter_child_nodes(statement):
        if not isinstance(each, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _own_nodes(each)


def name_of(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else code(func)
