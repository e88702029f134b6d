"""Values of literals, and of names bound to literals, in Python code that is not run."""

from __future__ import annotations

import ast
from collections import defaultdict
from itertools import chain
from typing import Any

from grpox.runfile.from_trl.setup import TrlValue, code, unread

_DTYPES = ("bfloat16", "float16", "float32")
"""Attributes of `torch` that stand for their own name."""
_LARGEST = 2**63
_MAIN = ast.dump(ast.parse("__name__ == '__main__'", mode="eval").body)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Bindings = defaultdict[str, list[ast.expr | None]]
"""Name -> values assigned to it in a module or function, None for anything but a plain assignment."""


class NotLiteral(Exception):
    """Raised for an expression that has a value only when the script runs."""


class ModuleNames:
    """Values of a module's names that are assigned once."""

    def __init__(self, tree: ast.Module) -> None:
        self.imports = _imports(tree)
        """Name in the script -> (module, name in that module); the second is empty for a module itself."""
        self._module: Bindings = defaultdict(list)
        self._scopes: dict[ast.AST, list[Bindings]] = {}
        """Node -> bindings of the functions around it and of the module, innermost first."""
        self._changed: set[str] = set()
        """Names whose value is changed in place: ``name[...] = ``, ``name.update(...)``."""
        self._walk(tree, [self._module])

    def value(self, node: ast.expr) -> Any:
        """Return the value of a literal, or of a name bound to a literal.

        Raises:
            NotLiteral: `node` is something else.
        """
        try:
            return self._value(node)
        except RecursionError as error:
            raise NotLiteral from error

    def given(self, node: ast.expr) -> TrlValue:
        """Return the value, or the expression if it is not a literal."""
        try:
            return TrlValue(self.value(node), node.lineno)
        except NotLiteral:
            return unread(node)

    def arguments(self, call: ast.Call, positions: tuple[str, ...]) -> dict[str, ast.expr]:
        """Return the arguments of a call by name, with those of a dict that it shows behind ``**``."""
        named: dict[str, ast.expr] = {}
        for place, node in enumerate(call.args):
            is_named = place < len(positions) and not isinstance(node, ast.Starred)
            named[positions[place] if is_named else f"argument {place + 1}"] = node
        for keyword in call.keywords:
            match keyword.arg or self.is_changed(keyword.value) or self.behind(keyword.value):
                case str(name):
                    named[name] = keyword.value
                case ast.Dict(keys=keys, values=values):
                    for key, value in zip(keys, values, strict=True):
                        named[str(key.value) if isinstance(key, ast.Constant) else f"**{code(value)}"] = value
                case ast.Call(func=ast.Name(id="dict"), args=[]) as pairs:
                    named |= self.arguments(pairs, ())
                case _:
                    named[f"**{code(keyword.value)}"] = keyword.value
        return named

    def behind(self, node: ast.expr) -> ast.expr:
        """Return `node` itself, or the expression that was assigned to its name once."""
        seen: set[str] = set()
        while isinstance(node, ast.Name) and node.id not in seen:
            seen.add(node.id)
            node = self._assigned(node) or node
        return node

    def is_changed(self, node: ast.expr) -> bool:
        """Return True if `node` is a name whose value is changed in place, such as by appending to a list."""
        return isinstance(node, ast.Name) and node.id in self._changed

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=bool() | str() | float() | None as value):
                return value
            case ast.Constant(value=int() as value) if abs(value) < _LARGEST:
                return value
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
                number = self._value(operand)
                if not isinstance(number, bool) and isinstance(number, int | float):
                    return -number if isinstance(sign, ast.USub) else number
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self._value(part) for part in parts]
            case ast.Dict(keys=keys, values=values):
                names = [key and self._value(key) for key in keys]
                if all(isinstance(name, str) for name in names):
                    return dict(zip(names, map(self._value, values), strict=True))
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords) if all(k.arg for k in keywords):
                return {keyword.arg: self._value(keyword.value) for keyword in keywords}
            case ast.Attribute(value=ast.Name(id="torch"), attr=attr) if attr in _DTYPES:
                return attr
            case ast.Name() if (assigned := self._assigned(node)) is not None:
                if not (isinstance(assigned, ast.List | ast.Dict | ast.Call) and self.is_changed(node)):
                    return self._value(assigned)
        raise NotLiteral

    def _assigned(self, name: ast.Name) -> ast.expr | None:
        """Return the expression assigned to a name once, in a function around it or in the module."""
        for bound in self._scopes.get(name, [self._module]):
            if name.id in bound:
                return bound[name.id][0] if len(bound[name.id]) == 1 else None
        return None

    def _walk(self, scope: ast.Module | Function, scopes: list[Bindings]) -> None:
        """Record the bindings around each node of `scope`, and the bindings that `scope` adds."""
        if not isinstance(scope, ast.Module):
            for argument in ast.walk(scope.args):
                if isinstance(argument, ast.arg):
                    scopes[0][argument.arg].append(None)
        values = {}
        # Each of these statements runs once, also below `if __name__ == "__main__":`.
        guards = (each for each in scope.body if isinstance(each, ast.If) and is_main_guard(each))
        for statement in (*scope.body, *chain.from_iterable(guard.body for guard in guards)):
            match statement:
                case (
                    ast.Assign(targets=[ast.Name() as target], value=value)
                    | ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as value)
                ):
                    values[target] = value
        waiting: list[ast.AST] = list(scope.body)
        while waiting:
            node = waiting.pop()
            self._scopes[node] = scopes
            self._bind(node, scopes, values)
            if isinstance(node, Function):
                self._walk(node, [defaultdict(list), *scopes])
            else:
                waiting += ast.iter_child_nodes(node)

    def _bind(self, node: ast.AST, scopes: list[Bindings], values: dict[ast.Name, ast.expr]) -> None:
        bound = scopes[0]
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                bound[name].append(values.get(node))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound[name].append(None)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                for alias in names:
                    bound[alias.asname or alias.name.partition(".")[0]].append(None)
            case ast.Global(names=named) | ast.Nonlocal(names=named):
                for name in named:
                    bound[name].append(None)
                    self._module[name].append(None)
            case ast.ExceptHandler(name=str() as name):
                bound[name].append(None)
            case (
                ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del())
                | ast.Call(func=ast.Attribute(value=ast.Name(id=name)))
            ):
                self._changed.add(name)


def _imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    imports: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            imports |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            imports |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
    return imports


def is_main_guard(statement: ast.stmt) -> bool:
    """Return True if `statement` is ``if __name__ == "__main__":``."""
    return isinstance(statement, ast.If) and ast.dump(statement.test) == _MAIN
