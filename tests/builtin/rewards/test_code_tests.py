"""Tests of the code reward in the forms of public data sets: right code passes, and no test passes all code."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.logs import LoggedText

from grpox.errors import Problem
from grpox_rewards.code import Code, check_rows, find_asking
from grpox_rewards.configs import CodeConfig

LIMITS = CodeConfig(timeout_seconds=20.0)
REWARD = Code(LIMITS)
RIGHT = """
import sys
def f(x): return x + 1
class Solution:
    def f(self, x: List[int]) -> int: return x + 1
if __name__ == '__main__': print(int(sys.stdin.read()) + 1)
"""
WRONG = "def f(x): return 41\nclass Solution:\n    def f(self, x): return 41\nprint('nonsense')"
PAIRS = [{"input": "1\n", "output": "2\n"}, {"input": "5\n", "output": "6\n"}]
LISTS = {"inputs": ["1\n", "5\n"], "outputs": ["2\n", "6"]}
COLUMNS = {"input": ["1\n", "5\n"], "output": ["2\n", "6\n"]}
LIVE = {"input": "1", "output": "2", "testtype": "functional"}
TESTS = ["assert f(1) == 2", "assert f(5) == 6"]
PYTEST = (
    "from solution import f\n\ndef test_one():\n    assert f(1) == 2\ndef test_five():\n    assert f(5) == 6\n"
)
UNITTEST = "import unittest\nclass T(unittest.TestCase):\n    def test_one(self): self.assertEqual(f(1), 2)\n"
CHECK = "METADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    assert candidate(1) == 2\n"
SHAPES: dict[str, Any] = {
    "documented": PAIRS,
    "DeepCoder, primeintellect": json.dumps(
        [{"type": "stdin_stdout", "fn_name": None, **each} for each in PAIRS]
    ),
    "DeepCoder, taco": json.dumps({"fn_name": "f", "inputs": [[1], [5]], "outputs": [2, 6]}),
    "DeepCoder, lcbv5": json.dumps([{**LIVE, "metadata": {"func_name": "f"}}]),
    "LiveCodeBench, metadata in JSON": json.dumps([{**LIVE, "metadata": '{"func_name": "f"}'}]),
    "APPS, calls with results in lists": json.dumps(
        {"fn_name": "f", "inputs": [[1], [5]], "outputs": [[2], [6]]}
    ),
    "TACO, lines": json.dumps({"inputs": [["1"], ["5"]], "outputs": [["2"], ["6"]]}),
    "TACO, a mapping": LISTS,
    "Eurus": json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [2]}),
    "SYNTHETIC-1, a call": {"type": "function_call", "fn_name": "f", "input": [1], "output": 2},
    "open-r1, wrapped": {"language": "python", "test_cases": [{"fn_name": None, **each} for each in PAIRS]},
    "CodeContests": COLUMNS,
    "CodeContests, two of its columns": {
        "public_tests": COLUMNS,
        "private_tests": COLUMNS,
        "generated_tests": None,
    },
    "columns of structs": {
        "fn_name": ["f", "f"],
        "input": [[1], [5]],
        "output": [2, 6],
        "type": ["function_call"] * 2,
    },
    "Codeforces, pairs of strings": [["1\n", "2\n"], ["5\n", "6\n"]],
    "JSON in a list": [json.dumps(each) for each in PAIRS],
    "JSON in JSON": json.dumps(json.dumps(PAIRS)),
    "a Python literal": repr(PAIRS),
    "standard streams": [{"stdin": "1", "stdout": "2"}],
    "expected_output": [{"input": "1", "expected_output": "2"}],
    "MBPP": TESTS,
    "KodCode": PYTEST,
    "pytest without import": PYTEST.replace("from solution import f", ""),
    "BigCodeBench": UNITTEST,
    "unittest that calls main": f"{UNITTEST}unittest.main()",
    "HumanEval as a whole": {"entry_point": "f", "test": CHECK},
    "HumanEval with a call": f"{CHECK}\ncheck(f)",
    "a method": "assert Solution().f(1) == 2",
}
"""Form -> tests that `RIGHT` passes, as a function, a method or a program."""


def scores(tests: Any, *codes: str, reward: Code = REWARD, **columns: Any) -> list[float | None]:
    of_each = {name: [value] * len(codes) for name, value in columns.items()}
    return reward(completions=codes, tests=[tests] * len(codes), **of_each)


@pytest.mark.parametrize("name", SHAPES)
def test_a_known_form_is_run(name: str) -> None:
    assert scores(SHAPES[name], f"from typing import List\n{RIGHT}", WRONG, "pass") == [1.0, 0.0, 0.0]


def test_other_columns_may_name_the_function_imports_and_setup() -> None:
    assert scores(CHECK, RIGHT.replace("List", "list"), WRONG, entry_point="f") == [1.0, 0.0]
    right = scores([LIVE], RIGHT, WRONG, metadata='{"func_name": "f"}')
    assert right == [1.0, 0.0]  # List is known without an import, as the task's signature needs it
    # Imports and setup come before the tests.
    test = {"test_imports": ["import math"], "test_setup_code": "K = 2"}
    asserts = ["assert math.isclose(f(1), K)"]
    assert scores({"test_list": asserts, **test}, RIGHT.replace("List", "list"), WRONG) == [1.0, 0.0]
    codes, columns = [RIGHT.replace("List", "list"), WRONG], {name: [value] * 2 for name, value in test.items()}
    assert REWARD(completions=codes, tests=[asserts] * 2, **columns) == [1.0, 0.0]


def test_a_call_compares_as_json_and_may_be_of_a_name_of_pythons() -> None:
    def tests(result: Any, name: str = "sum") -> str:
        return json.dumps({"fn_name": name, "inputs": [[[1, 2]]], "outputs": [result]})

    assert scores(tests([1, 2]), "def sum(x): return tuple(x)", "def sum(x): return set(x)") == [1.0, 0.0]
    assert scores(tests({"1": True}), "def sum(x): return {1: True}", "pass") == [1.0, 0.0]
    assert scores(tests(3), "pass", "def sum(x): return 3") == [0.0, 1.0]  # never Python's own
    assert scores(tests(None), "def sum(x): return print()", "pass") == [1.0, 0.0]
    # It may name its arguments and return a float.
    code = "def g(x, half): return x / 3 if half is None else half"
    named = [{"input": "x = 1.0, half = null", "output": "0.33333"}]
    assert scores(named, code, code.replace("3", "2"), entry_point="Solution().g") == [1.0, 0.0]
    floats = json.dumps({"fn_name": "f", "inputs": [[0.1]], "outputs": [[0.3, 1]]})
    assert scores(floats, "def f(x): return x + 0.2, 1", "def f(x): return x + 0.21, 1") == [1.0, 0.0]


UNKNOWN = [
    *(7, [None], {"a": "b"}),
    ">>> f(1)\n2",
    "The function adds one.",
    [LIVE],
    {"inputs": ["1"], "outputs": ["2", "3"]},
    *([{"input": "1"}], [{"input": None, "output": "5"}], [{"input": "", "output": 5}]),
    '{"input": 1, "output": 2}',
    [["1", 2]],
    "import numpy as np\nassert np.isclose(f(1), 2)",
    "from candidate import f\nassert f(1) == 2",
]


@pytest.mark.parametrize("tests", UNKNOWN)
def test_an_unknown_form_is_refused_by_row(tests: Any) -> None:
    with pytest.raises(TypeError, match="tests of row 3 must be"):
        scores(tests, RIGHT, row_names="row 3")
    rows = [("row 2", {"tests": None}), ("row 3", {"tests": tests}), ("row 4", {"tests": "f(1)"})]
    (problem,) = check_rows(rows, LIMITS)
    assert isinstance(problem, Problem)
    assert (problem.key, "tests of row 3 must be" in problem.what) == ("column", True)


EMPTY = {
    "a bare comparison": "f(1) == 2",
    "bare comparisons": ["f(1) == 2", "f(5) == 6"],
    "a call": "f(1)",
    "a call of a method": "Solution().f(1)",
    "print": "print(f(1))",
    "an assignment": "expected = 2",
    "not run": "if __name__ == '__main__':\n    assert f(1) == 2",
    "caught": "try:\n    assert f(1) == 2\nexcept AssertionError:\n    print('FAILED')",
    "returned": "def t():\n    return f(1) == 2\nt()",
    "a difference": "assert f(1) != 3",
    "anything but None": "assert f(1) is not None",
    "only that it is there": "from solution import f\nassert callable(f)",
    "no output": [{"input": "1", "output": "\n"}],
    "a check of nobody's": CHECK,
    "names of the stand-in": "# globals name Nothing self __name__ __builtins__ update if\nf(1)",
}
"""Tests that `RIGHT`, `WRONG` or ``pass`` passes, and that ask nothing."""


@pytest.mark.parametrize("name", EMPTY)
def test_a_row_whose_tests_ask_nothing_has_no_score_and_is_named(name: str, logged: LoggedText) -> None:
    metrics: dict[str, float] = {}
    extra: dict[str, list[str]] = {}
    columns = {"tests": [EMPTY[name], None, TESTS] * 3, "row_names": ["row 7", "row 8", "row 9"] * 3}
    codes = [code for code in (f"List = list\n{RIGHT}", WRONG, "pass") for _ in range(3)]
    logs = {"log_metric": metrics.__setitem__, "log_extra": extra.__setitem__}
    found = Code(LIMITS)(completions=codes, **columns, **logs)
    assert found == [None, None, 1.0, None, None, 0.0, None, None, 0.0]
    assert metrics["code/empty_tests"] == pytest.approx(1 / 3)
    assert extra == {"code/empty_tests": ["row 7", "", ""] * 3}
    assert "row 7 has tests that ask nothing: any code would pass" in logged()


def test_tests_that_ask_nothing_give_no_part_of_a_score() -> None:
    tests, partial = (
        ["f(1)", "assert f(1) == 2", "print(f(1))", "assert f(5) == 6"],
        Code(CodeConfig(partial=True)),
    )
    assert scores(tests, "def f(x): return 2", "pass", "def f(x): return 9", reward=partial) == [0.5, 0.0, 0.0]
    assert scores(tests, "def f(x): return x + 1", "def f(x): return 2") == [1.0, 0.0]


def test_what_asks_something_is_left_alone() -> None:
    asks = [
        "assert f(1) == 2",
        "assert f(1)",
        "assert abs(f(1) - 2) < 1e-6",
        "assert len(f(1)) == 2",
        "for each in f(1): print(each)",
        "try:\n    f(-1)\n    assert False\nexcept ValueError: pass",
        "import solution\nassert solution.f(1) == 2",
        UNITTEST,
        "values = [3, 1]\nf(values)\nassert values == [1, 3]",
        "while True: pass",
        "import os\nos._exit(0)",
    ]
    of_each = [find_asking((test,), CodeConfig(timeout_seconds=1.0)) for test in asks]
    assert of_each == [(True,)] * len(asks)


def test_no_completion_decides_whether_tests_ask_something() -> None:
    code = (
        "import solution, unittest\nclass Nothing: pass\ncalled = f = Nothing\n"
        "globals()['called f'] = globals()['assertEqual'] = lambda *_: True\n"
    )
    assert scores("assert f(1) == 2", code.replace("import solution, unittest\n", "")) == [0.0]
    assert scores("f(1) == 2", f"{RIGHT.replace('List[int]', 'int')}\nf.__eq__ = None") == [None]
    assert scores(SHAPES["Eurus"], code, "def f(x): return True") == [0.0, 0.0]


def test_the_first_rows_are_asked_before_a_run() -> None:
    rows = [(f"row {place}", {"tests": test}) for place, test in enumerate([TESTS, "f(1)", None, CHECK, PAIRS])]
    (warning,) = check_rows(rows, LIMITS)
    assert isinstance(warning, str)
    assert warning.startswith("row 1 has tests that ask nothing")
    assert warning.endswith("(2 of the first 4 rows with tests)")
    assert [*check_rows([*rows[:1], *rows[4:]], LIMITS)] == []
