"""Text from outside on a terminal and in logs: what a terminal would obey is shown escaped."""

import io
from pathlib import Path

import pytest
from rich.table import Table
from support.handlers import handlers_kept

from grpox.cli.errors import run_command
from grpox.errors import RunFailed, visible
from grpox.errors.console import Console
from grpox.runtime.logs import get_logger, show_logs

HOSTILE = {
    "colour": "\x1b[31mred",
    "title": "\x1b]0;owned\x07",
    "link": "\x1b]8;;http://h\x1b\\x",
    "C1": "\x9b2J\x85",
    "bidi": "\u202eabc\u202c\u2066\u200f\u061c",
    "return": "good\rbad",
    "erase": "\b\b\x7f",
    "null": "\x00",
    "line": "\u2028x",
    "half": "\ud800",
}


def is_plain(text: str) -> bool:
    return all(each.isprintable() or each in "\n\t" for each in text)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_from_outside_moves_a_terminal(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = HOSTILE[name]

    def command(_: list[str]) -> None:
        show_logs(file=tmp_path / "log")
        get_logger(__name__).warning("the service answered %s", text)
        try:
            raise ValueError(text)
        except ValueError as error:
            get_logger(__name__).exception("it raised")
            error.add_note(text)
            raise RunFailed(f"reward 'judge' {text}") from error

    with handlers_kept():
        assert run_command(command, ["--traceback"]) == 1
    shown = capsys.readouterr()
    for written in (shown.out, shown.err, (tmp_path / "log").read_text(encoding="utf-8")):
        assert is_plain(written), written
    assert shown.err.count(visible(text)) >= 4


def test_the_console_shows_text_escaped_and_keeps_its_own_styles() -> None:
    file = io.StringIO()
    table = Table("name")
    for text in HOSTILE.values():
        table.add_row(text, style="red")
    Console(file=file, force_terminal=True, width=200).print(table)
    rest = file.getvalue()
    assert "\x1b[31m" in rest
    for style in ("\x1b[31m", "\x1b[1m", "\x1b[0m"):
        rest = rest.replace(style, "")
    assert is_plain(rest), rest
    # Lines, tabs and other languages stay.
    for text in ("a\n\tb\r\n", "日本語 é \U0001f600", "\\x1b"):
        assert visible(text) == text
