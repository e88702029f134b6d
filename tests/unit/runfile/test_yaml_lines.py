"""YAML that cannot be read is told with its place, and written YAML reads back unchanged, for any text."""

from __future__ import annotations

import pytest
import yaml

from grpox.errors import ConfigError, Problem
from grpox.runfile.yaml_lines import Dumper, inline, read_yaml


def refused(text: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "run.yaml")
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "where", "character"),
    [
        ("a: 1\nb: {c\0: 2}\n", "run.yaml:2:6", "U+0000"),
        ("\x07a: 1\n", "run.yaml:1:1", "U+0007"),
        # Characters are counted, not bytes: the first one takes four.
        ("\U0001f600: 'text\ufffe'\n", "run.yaml:1:9", "U+FFFE"),
        ("a: \ud800\n", "run.yaml:1:4", "U+D800"),
    ],
)
def test_a_character_that_no_text_file_holds_is_told_with_its_position(
    text: str, where: str, character: str
) -> None:
    [problem] = refused(text)
    assert problem.where == where
    assert problem.what == f"not valid YAML: the character {character} is not allowed in a text file"


def test_other_escapes_and_unicode_are_text() -> None:
    assert read_yaml('a: "\\x07\\n\\U0001F600"\nb: 数学\n', "run.yaml").data == {"a": "\x07\n😀", "b": "数学"}


def test_an_integer_that_python_would_not_read_is_refused_by_its_length() -> None:
    assert refused("a: " + "9" * 5000)[0].what == "a number of 5000 digits; at most 4000 are allowed"
    assert read_yaml("a: " + "9" * 4000, "run.yaml").data == {"a": 10**4000 - 1}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        # YAML 1.1 takes yes for true; taken for false it would turn the setting off silently.
        ("a: !!bool yes", "'yes' is not of the type !!bool"),
        ("a: !!null x", "'x' is not of the type !!null"),
        ("a: !!int 3.0", "'3.0' is not of the type !!int"),
        ("a: !!float much", "'much' is not of the type !!float"),
    ],
)
def test_an_explicit_tag_must_fit_its_text(text: str, what: str) -> None:
    assert refused(text)[0].what == what


def test_an_explicit_tag_that_fits_decides_the_type() -> None:
    data = read_yaml("[!!str 3, !!float 3, !!bool True, !!int 0x1F, !!null ~]", "run.yaml").data
    assert data == ["3", 3.0, True, 31, None]
    assert type(data[1]) is float


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("a: *nowhere\n", "run.yaml:1:4", "not valid YAML: found undefined alias 'nowhere'"),
        (
            "a: 1\n---\nb: 2\n",
            "run.yaml:2:1",
            "not valid YAML: expected a single document in the stream but found another document",
        ),
        ("a: {<<: 3}\n", "run.yaml:1", "<< needs a mapping or a list of mappings"),
        ("a: &x {b: *x}\n", "run.yaml:1", "an alias to something that contains it"),
        ("a: 1\nb: 2\na: 3\n", "run.yaml:3", "key given twice, first on line 1"),
        ("a: {b: 1, b: 2}\n", "run.yaml:1", "key given twice, first on line 1"),
    ],
)
def test_anchors_merges_and_documents_that_do_not_fit(text: str, where: str, what: str) -> None:
    [problem] = refused(text)
    assert (problem.where, problem.what) == (where, what)


def test_an_alias_repeats_and_of_merged_mappings_the_first_wins() -> None:
    text = "x: &x {a: 1, b: 1}\ny: &y {b: 2, c: 2}\nz: {<<: [*x, *y], c: 3}\nagain: *x\n"
    document = read_yaml(text, "run.yaml")
    assert document.data["z"] == {"a": 1, "b": 1, "c": 3}
    assert document.data["again"] == {"a": 1, "b": 1}
    assert document.lines["z.c"] == 3


# -- Written YAML -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        *("1e-6", "0o17", ".5e3", "12", "0x1f", "1_000", "true", "null", "~", "", "+1."),  # texts, not values
        *("no", "-", "a: b", "2026-01-31", "#x", "\u00e9\n", 1e-6, None),
    ],
)
def test_a_written_value_is_read_back_as_it_was(value: object) -> None:
    for written in (yaml.dump({"key": value}, Dumper=Dumper), f"key: {inline(value)}"):
        assert read_yaml(written, "f").data == {"key": value}
