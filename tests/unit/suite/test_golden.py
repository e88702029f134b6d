"""Golden texts: equal ones pass, others fail with what differs and the cure, and none is without its test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support import golden as kept
from support.golden import Golden


@pytest.fixture
def golden_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Golden:
    """Golden texts of some test, in a folder of their own: one is kept."""
    monkeypatch.delenv(kept.VARIABLE, raising=False)
    (tmp_path / "test_some.txt").write_text("one\ntwo\n")
    return Golden(tmp_path / "test_some")


@pytest.mark.parametrize("text", ["one\ntwo", "one\ntwo\n", "one  \ntwo \n  \n"])
def test_the_same_text_passes_also_where_it_is_filled_with_spaces(golden_text: Golden, text: str) -> None:
    golden_text(text)


def test_what_differs_by_machine_is_replaced(golden_text: Golden) -> None:
    golden_text("one\n/tmp/7", replace={"/tmp/7": "two"})


def test_another_text_fails_with_what_differs_the_file_and_the_cure(golden_text: Golden) -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        golden_text("one\nthree")
    told = str(caught.value)
    assert str(golden_text.start.with_name("test_some.txt")) in told
    assert kept.COMMAND in told
    assert {" one", "-two", "+three"} <= set(told.splitlines())


def test_an_absent_file_fails_with_the_text_and_the_cure(golden_text: Golden) -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        golden_text("one\ntwo", "other name")
    told = str(caught.value)
    assert "test_some.other_name.txt" in told
    assert kept.COMMAND in told
    assert told.endswith("one\ntwo\n")


def test_renewing_writes_the_file(golden_text: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setenv(kept.VARIABLE, "1")
        golden_text("three /tmp/7", replace={"/tmp/7": "FOLDER"})
    assert golden_text.start.with_name("test_some.txt").read_text() == "three FOLDER\n"


def test_two_texts_of_one_test_need_names(golden_text: Golden) -> None:
    golden_text("one\ntwo")
    with pytest.raises(AssertionError, match="twice"):
        golden_text("one\ntwo")


def test_files_lie_as_tests_do_with_parameters_in_their_names() -> None:
    start = kept.start_of(kept.TESTS / "unit" / "cli" / "test_x.py", "test_y", "a/b [c]-80")
    assert start == kept.FOLDER / "unit" / "cli" / "test_x" / "test_y-a_b_c_-80"


def test_there_is_the_command_that_is_advised() -> None:
    makefile = (kept.TESTS.parent / "Makefile").read_text()
    assert f"\n{kept.COMMAND.removeprefix('make ')}: " in makefile
    assert f"{kept.VARIABLE}=1 " in makefile


def test_every_golden_file_belongs_to_a_test() -> None:
    """The name of a file begins with that of a test, which takes the fixture."""
    files = [path for path in kept.FOLDER.rglob("*") if path.is_file()]
    left = [
        str(path)
        for path in files
        if path.name.removesuffix(".txt").split(".")[0].split("-")[0]
        not in takers_of_golden(kept.TESTS / path.parent.relative_to(kept.FOLDER).with_suffix(".py"))
    ]
    assert left == [], "no test reads these any more: remove them"


def takers_of_golden(file: Path) -> set[str]:
    """Return the names of a file's tests that take the fixture."""
    if not file.exists():
        return set()
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and "golden" in {argument.arg for argument in node.args.args}
    }
