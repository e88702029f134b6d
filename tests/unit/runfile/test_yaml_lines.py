"""YAML that cannot be read is told with its place, and written YAML reads back unchanged, for any text."""

from __future__ import annotations

import pytest
import yaml
from support.problems import refused

from grpox.runfile.yaml_lines import Dumper, inline, read_yaml


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("a: 1\nb: {c\0: 2}\n", ":2:6", "not valid YAML: the character U+0000 is not allowed"),
        ("\x07a: 1\n", ":1:1", "not valid YAML: the character U+0007 is not allowed"),
        # Characters are counted, not bytes: the first one takes four.
        ("\U0001f600: 'text\ufffe'\n", ":1:9", "not valid YAML: the character U+FFFE is not allowed"),
        ("a: \ud800\n", ":1:4", "not valid YAML: the character U+D800 is not allowed"),
        pytest.param("a: " + "9" * 5000, ":1", "a number of 5000 digits; at most 4000 are", id="digits"),
        # YAML 1.1 takes yes for true; taken for false it would turn the setting off silently.
        ("a: !!bool yes", ":1", "'yes' is not of the type !!bool"),
        ("a: !!null x", ":1", "'x' is not of the type !!null"),
        ("a: !!int 3.0", ":1", "'3.0' is not of the type !!int"),
        ("a: !!float much", ":1", "'much' is not of the type !!float"),
        ("a: *nowhere\n", ":1:4", "not valid YAML: found undefined alias 'nowhere'"),
        ("a: 1\n---\nb: 2\n", ":2:1", "not valid YAML: expected a single document in the stream"),
        ("a: {<<: 3}\n", ":1", "<< needs a mapping or a list of mappings"),
        ("a: &x {b: *x}\n", ":1", "an alias to something that contains it"),
        ("a: 1\nb: 2\na: 3\n", ":3", "key given twice, first on line 1"),
        ("a: {b: 1, b: 2}\n", ":1", "key given twice, first on line 1"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(text: str, where: str, what: str) -> None:
    [problem] = refused(read_yaml, text, "run.yaml")
    assert problem.where == f"run.yaml{where}"
    assert problem.what.startswith(what)


def test_texts_tags_and_aliases_are_read() -> None:
    text = 'a: "\\x07\\n\\U0001F600"\nb: 数学\nc: ' + "9" * 4000
    assert read_yaml(text, "run.yaml").data == {"a": "\x07\n😀", "b": "数学", "c": 10**4000 - 1}
    # An explicit tag that fits decides the type.
    data = read_yaml("[!!str 3, !!float 3, !!bool True, !!int 0x1F, !!null ~]", "run.yaml").data
    assert data == ["3", 3.0, True, 31, None]
    assert type(data[1]) is float
    # An alias repeats, and of merged mappings the first wins.
    text = "x: &x {a: 1, b: 1}\ny: &y {b: 2, c: 2}\nz: {<<: [*x, *y], c: 3}\nagain: *x\n"
    document = read_yaml(text, "run.yaml")
    assert document.data["z"] == {"a": 1, "b": 1, "c": 3}
    assert document.data["again"] == {"a": 1, "b": 1}
    assert document.lines["z.c"] == 3


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
