"""Tests of a row, in the forms of public data sets, as statements, calls, and pairs of input and output."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

FUNCTION = ("fn_name", "func_name", "function_name", "entry_point")
"""Keys with the name of the function to call; also within ``metadata`` (LiveCodeBench)."""
FACTS = ("metadata", "test_imports", "test_setup_code")
TESTS = (
    *("test_cases", "tests", "test_list", "test", "input_output"),
    *("public_tests", "private_tests", "generated_tests", "public_test_cases"),
)
"""Keys of tests in a mapping with other facts."""
INPUTS, OUTPUTS = ("inputs", "stdin"), ("outputs", "stdout", "expected_output")
ALIASES = dict.fromkeys(INPUTS, "input") | dict.fromkeys(OUTPUTS, "output")
WANTED = "Python statements, calls with arguments and results, or mappings with input and output, each a string"


class Pair(NamedTuple):
    """A program's input and output."""

    input: str
    output: str


class Call(NamedTuple):
    """A call of a function, or of a method of the class `Solution`; arguments and accepted results are JSON."""

    function: str
    arguments: str
    accepted: str


Test = str | Call | Pair


def read_tests(row: Mapping[str, Any], column: str, name: str) -> tuple[Test, ...]:
    """Read the tests of a row, the pairs last; another of its columns may name the function to call.

    Raises:
        TypeError: the tests of the row `name` have no known form.
    """
    try:
        value = row.get(column)
        tests = [] if value is None else [*_set_up(row, _tests(value, _function_of(row)))]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        reason = f" ({error})" if type(error) is ValueError else ""
        raise TypeError(f"tests of {name} must be {WANTED}{reason}, not {value!r}"[:400]) from error
    return tuple(sorted(tests, key=lambda test: isinstance(test, Pair)))


def _tests(value: Any, function: str) -> Iterator[Test]:
    is_plural = isinstance(value, Mapping) and "inputs" in value
    if isinstance(value, Mapping):
        value = {ALIASES.get(name, name): each for name, each in value.items()}
    match value:
        case str():
            if (inner := _literal(value)) is not value:
                yield from _tests(inner, function)
            elif value.strip():
                kinds, body = (ast.Import, ast.ImportFrom), ast.parse(value).body
                names = ((each, n.name) for each in body if isinstance(each, kinds) for n in each.names)
                modules = {str(getattr(each, "module", name)).split(".")[0] for each, name in names}
                if lacking := modules - {*sys.stdlib_module_names, "solution"}:
                    raise ValueError(f"of Python's own modules and solution, not {min(lacking)}")
                is_check = "def check(" in value and "\ncheck(" not in value  # HumanEval's, which nothing calls
                yield f"{value}\ncheck({function})\n" if function and is_check else value
        case [*items]:
            for item in map(_literal, items):
                match item:
                    case [str(given), str(wanted)] if "assert" not in given + wanted:
                        yield Pair(given, wanted)
                    case _:
                        yield from _tests(item, function)
        case {"input": [*given], "output": [*wanted]} if is_plural or not _function_of(value):
            # Some sets put each result of a function into a list.
            is_wrapped = is_plural and all(isinstance(each, list) and len(each) == 1 for each in wanted)
            of_each = [v if isinstance(v, list | tuple) else [v] * len(given) for v in value.values()]
            for values in zip(*of_each, strict=True):
                yield _pair_or_call(dict(zip(value, values, strict=True)), function, is_wrapped)
        case {"input": _, "output": _}:
            yield _pair_or_call(value, function)
        case Mapping() if inner := [value[name] for name in TESTS if value.get(name)]:
            yield from _set_up(value, _tests(inner, _function_of(value) or function))
        case _:
            raise TypeError


def _set_up(facts: Mapping[str, Any], tests: Iterator[Test]) -> Iterator[Test]:
    """Put MBPP's imports and setup before each test that is statements."""
    lines = *(facts.get("test_imports") or ()), facts.get("test_setup_code") or ""
    return ("\n".join([*lines, test]) if isinstance(test, str) and any(lines) else test for test in tests)


def _pair_or_call(facts: Mapping[str, Any], function: str, is_wrapped: bool = False) -> Test:
    given, wanted, kind = facts["input"], facts["output"], str(facts.get("testtype", facts.get("type")))
    name = "" if "std" in kind else _function_of(facts) or function
    if not name:
        given, wanted = ("\n".join(each) if isinstance(each, list) else each for each in (given, wanted))
        if "func" in kind or not isinstance(given, str) or not isinstance(wanted, str):
            raise TypeError
        return Pair(given, wanted)
    if isinstance(given, str):
        lines = [line for line in given.split("\n") if line]  # an argument each, as in LiveCodeBench
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            match ast.parse(call := f"f({','.join(lines)})", mode="eval").body if "=" in given else None:
                case ast.Call(args=[], keywords=[*named]) if named:  # LeetCode's nums = [3], target = 6
                    lines = [str(ast.get_source_segment(call, each.value)) for each in named]
        given, wanted = [_literal(line, object) for line in lines], _literal(wanted, object)
    arguments = json.dumps(given if isinstance(given, list) else [given])
    return Call(name.rpartition(".")[2], arguments, json.dumps([wanted, *(wanted if is_wrapped else ())]))


def _function_of(facts: Mapping[str, Any]) -> str:
    if name := next((facts[key] for key in FUNCTION if isinstance(facts.get(key), str)), ""):
        return str(name)
    metadata = _literal(facts.get("metadata"))
    return _function_of(metadata) if isinstance(metadata, Mapping) else ""


def _literal(text: Any, kind: Any = (list, dict, tuple, str)) -> Any:
    """Return the value of `kind` that a text has as JSON or as a Python literal, or else the text itself."""
    for read in (json.loads, ast.literal_eval) if isinstance(text, str) else ():
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return value if isinstance(value := read(text), kind) else text
    return text
