"""Values of Python expressions that are literals, or names that stand for one, without running anything."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from grpox.runfile.from_trl.setup import Given, unread

_DTYPES = ("bfloat16", "float16", "float32")
"""Attributes of `torch` that stand for their own name."""
_LARGEST = 2**63

Function = ast.FunctionDef | ast.AsyncFunctionDef


class NotLiteral(Exception):
    """The expression has a value only when the script runs."""


class Names:
    """What the names of a module are bound to, where that is once and for all."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self._functions: dict[ast.AST, list[Function]] = {}
        """Each node -> the functions around it, the innermost last."""
        self._bound: dict[ast.AST, dict[str, list[ast.expr | None]]] = {}
        """A module or function -> name -> values it is bound to, None for what is not a plain assignment."""
        self._changed: set[str] = set()
        """Names whose value is changed in place: ``name[...] = ``, ``name.update(...)``."""
        self._targets: set[ast.Name] = set()
        """Names where they are assigned, plainly: their values are in `_bound` already."""
        self._walk(tree, [])

    def value(self, node: ast.expr) -> Any:
        """The value of a literal, or of names that stand for literals.

        Raises:
            NotLiteral: it is something else.
        """
        return self._value(node, ())

    def given(self, node: ast.expr) -> Given:
        """The same, or what stands there."""
        try:
            return Given(self.value(node), node.lineno)
        except (NotLiteral, RecursionError):
            return unread(ast.unparse(node), node.lineno)

    def behind(self, node: ast.expr) -> ast.expr:
        """The expression that `node` stands for: itself, or what its name was assigned once."""
        seen: set[str] = set()
        while isinstance(node, ast.Name) and node.id not in seen:
            seen.add(node.id)
            value = self._assigned(node)
            if value is None:
                return node
            node = value
        return node

    def changed(self, node: ast.expr) -> bool:
        """Whether this is a name whose value is changed in place, such as a list that is appended to."""
        return isinstance(node, ast.Name) and node.id in self._changed

    def around(self, node: ast.AST) -> list[Function]:
        """The functions around a node, the innermost last."""
        return self._functions.get(node, [])

    def _value(self, node: ast.expr, names: tuple[str, ...]) -> Any:
        match node:
            case ast.Constant(value=bool() | str() | float() | None as value):
                return value
            case ast.Constant(value=int() as value) if abs(value) < _LARGEST:
                return value
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
                number = self._value(operand, names)
                if isinstance(number, bool) or not isinstance(number, int | float):
                    raise NotLiteral
                return -number if isinstance(sign, ast.USub) else number
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self._value(part, names) for part in parts]
            case ast.Dict(keys=keys, values=values):
                return self._mapping(keys, values, names)
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords) if all(k.arg for k in keywords):
                return {str(keyword.arg): self._value(keyword.value, names) for keyword in keywords}
            case ast.Attribute(value=ast.Name(id="torch"), attr=attr) if attr in _DTYPES:
                return attr
            case ast.Name(id=name) if name not in names and (assigned := self._assigned(node)) is not None:
                if isinstance(assigned, ast.List | ast.Dict | ast.Call) and self.changed(node):
                    raise NotLiteral
                return self._value(assigned, (*names, name))
        raise NotLiteral

    def _mapping(
        self, keys: list[ast.expr | None], values: list[ast.expr], names: tuple[str, ...]
    ) -> dict[str, Any]:
        result = {}
        for key, value in zip(keys, values, strict=True):
            name = None if key is None else self._value(key, names)
            if not isinstance(name, str):
                raise NotLiteral
            result[name] = self._value(value, names)
        return result

    def _assigned(self, name: ast.Name) -> ast.expr | None:
        """What a name was assigned, once, in a function around it or in the module."""
        for scope in (*reversed(self.around(name)), self.tree):
            values = self._bound.get(scope, {}).get(name.id)
            if values is not None:
                return values[0] if len(values) == 1 else None
        return None

    def _walk(self, scope: ast.Module | Function, above: list[Function]) -> None:
        """Note the functions around each node of `scope`, and what it binds."""
        bound: dict[str, list[ast.expr | None]] = defaultdict(list)
        self._bound[scope] = bound
        if not isinstance(scope, ast.Module):
            above = [*above, scope]
            for argument in ast.walk(scope.args):
                if isinstance(argument, ast.arg):
                    bound[argument.arg].append(None)
        plain = {id(statement) for statement in plain_statements(scope)}
        inner = []
        waiting: list[ast.AST] = list(scope.body)
        while waiting:
            node = waiting.pop()
            self._functions[node] = above
            self._bind(node, bound, id(node) in plain)
            if isinstance(node, Function):
                inner.append(node)
            else:
                waiting += ast.iter_child_nodes(node)
        for function in inner:
            self._walk(function, above)

    def _bind(self, node: ast.AST, bound: dict[str, list[ast.expr | None]], plain: bool) -> None:
        match node:
            case (
                ast.Assign(targets=[ast.Name() as target], value=value)
                | ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as value)
            ) if plain:
                bound[target.id].append(value)
                self._targets.add(target)
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) if node not in self._targets:
                bound[name].append(None)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound[name].append(None)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                for alias in names:
                    bound[alias.asname or alias.name.partition(".")[0]].append(None)
            case ast.Global(names=named) | ast.Nonlocal(names=named):
                for name in named:
                    bound[name].append(None)
                    self._bound[self.tree].setdefault(name, []).append(None)
            case ast.ExceptHandler(name=str() as name):
                bound[name].append(None)
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                self._changed.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
                self._changed.add(name)


def plain_statements(scope: ast.Module | Function) -> Iterator[ast.stmt]:
    """The statements of `scope` that run once, one after the other; those below a guard of `__main__` too."""
    for statement in scope.body:
        yield statement
        if is_main_guard(statement) and isinstance(statement, ast.If):
            yield from statement.body


def is_main_guard(statement: ast.stmt) -> bool:
    """Whether this is ``if __name__ == "__main__":``."""
    match statement:
        case ast.If(
            test=ast.Compare(
                left=ast.Name(id="__name__"), ops=[ast.Eq()], comparators=[ast.Constant(value="__main__")]
            )
        ):
            return True
    return False
