"""Bad data files: what shows at a look, and what shows when every prompt is read."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

from fuzz_case import Case, changed, numbered, raw, run_file, together

ROW = {"prompt": "1+1=", "answer": "2"}
LINE = json.dumps(ROW) + "\n"
MESSAGES = [{"role": "user", "content": "1+1="}]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def data_cases() -> list[Case]:
    """All of them; each has a name of its own."""
    return [*_files(), *_parquet_files(), *_prompts()]


def _files() -> list[Case]:
    files: dict[str, tuple[str, str | bytes, tuple[str, ...]]] = {
        "JSON lines: nothing": ("a.jsonl", "", ("has no record",)),
        "JSON lines: cut off": ("a.jsonl", LINE * 3 + LINE[:9], ("line 4",)),
        "JSON lines: a list in the middle": ("a.jsonl", LINE + "[1]\n" + LINE, ("line 2",)),
        "JSON lines: latin-1": ("a.jsonl", '{"prompt": "é"}\n'.encode("latin-1"), ("UTF-8",)),
        "JSON lines: a NUL in a text": ("a.jsonl", '{"prompt": "a\0"}\n', ("line 1",)),
        "JSON lines: an integer of 5000 digits": ("a.jsonl", '{"prompt": ' + "9" * 5000 + "}\n", ("digits",)),
        "JSON lines: other columns": ("a.jsonl", '{"question": "1"}\n', ("data.prompt_column", "question")),
        "JSON lines: too few": ("a.jsonl", LINE, ("2 prompts", "has 1")),
        "JSON lines: a column with colours": ("a.jsonl", '{"\\u001b[31m": 1}\n', ("\\x1b[31m",)),
        "JSON: an empty array": ("a.json", "[]", ("has no record",)),
        "JSON: an array of numbers": ("a.json", "[1, 2]", ("record 0",)),
        "JSON: an array cut off": ("a.json", f"[{LINE.strip()},\n", ("JSON",)),
        "JSON: nested too deep": ("a.json", "[" * 100_000, ("cannot be read",)),
        "CSV: nothing": ("a.csv", "", ("has no record",)),
        "CSV: only the header": ("a.csv", "prompt,answer\n", ("has no record",)),
        "CSV: a value too many": ("a.csv", "prompt,answer\na,b,c\n", ("line 2", "3 values for 2")),
        "CSV: a value too few": ("a.csv", "prompt,answer\na,b\nc\n", ("line 3", "1 values for 2")),
        "CSV: a quote left open": ("a.csv", 'prompt,answer\n"a,b\n', ("line",)),
        "CSV: a field of 200000 characters": ("a.csv", "prompt\n" + "x" * 200_000 + "\n", ("line 2",)),
        "a file of another kind": ("a.txt", "1+1=\n", (".jsonl", ".csv")),
        "parquet: only the magic": ("a.parquet", b"PAR1PAR1", ("parquet",)),
        "parquet: encrypted": ("a.parquet", b"PARE" + b"\xff" * 64 + b"\x40\0\0\0PARE", ("a.parq",)),
    }
    cases = []
    for name, (file, content, mentions) in files.items():
        key = () if mentions[0].startswith(("data.", "\\x", "2 prompts")) else ("data.path",)
        cases.append(_case(name, file, content, (*key, *mentions), ("validate", "run.yaml")))
    held_out = together(run_file(changed({"evaluation": {"path": "a.json"}})), raw("[]", "a.json"))
    cases.append(Case("held out", held_out, ("evaluation.path", "has no record"), opened=True))
    return numbered("data", cases)


def _case(
    name: str,
    file: str,
    content: str | bytes | Callable[[], bytes],
    mentions: tuple[str, ...],
    arguments: tuple[str, ...] = ("train", "run.yaml"),
    **changes: Any,
) -> Case:
    """A run whose data is this file."""
    make = together(run_file(changed({"data.path": file, **changes})), raw(content, file))
    return Case(name, make, mentions, arguments, opened=True)


def parquet(columns: dict[str, list[Any]]) -> bytes:
    """Return a parquet file of these columns."""
    import pyarrow
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


def _parquet_files() -> list[Case]:
    def good() -> bytes:
        return parquet({"prompt": ["1+1="] * 64, "answer": ["2"] * 64})

    def with_broken_pages() -> bytes:
        middle = bytearray(good())
        middle[4:40] = b"\xff" * 36
        return bytes(middle)

    def rows_of(prompt: object) -> Callable[[], bytes]:
        return lambda: parquet({"prompt": [prompt] * 8, "answer": ["2"] * 8})

    files: dict[str, tuple[Callable[[], bytes], tuple[str, ...]]] = {
        "without a row": (lambda: parquet({"prompt": [], "answer": []}), ("has no record",)),
        "without its end": (lambda: good()[:-20], ("data.path", "parquet")),
        "with broken pages": (with_broken_pages, ("data.path",)),
        "with nulls": (rows_of(None), ("row 0",)),
    }  # fmt: skip
    cases = [_case(name, "a.parquet", content, mentions) for name, (content, mentions) in files.items()]
    return numbered("parquet", cases)


def _prompts() -> list[Case]:
    """Files that read well, and rows that hold no prompt or one that the model cannot take."""
    longest = "sampling.max_completion_length"
    rows: dict[str, tuple[list[Any], dict[str, Any], tuple[str, ...]]] = {
        "null": ([ROW, {**ROW, "prompt": None}] * 4, {}, ("line 2",)),
        "an empty text": ([*[ROW] * 5, {**ROW, "prompt": ""}], {}, ("row 5",)),
        "left out": ([*[ROW] * 5, {"answer": "2"}], {}, ("line 6",)),
        "a number": ([{**ROW, "prompt": 7}] * 8, {}, ("row 0",)),
        "a list of texts": ([{**ROW, "prompt": ["1+1="]}] * 8, {}, ("row 0",)),
        "messages without a template": ([{**ROW, "prompt": MESSAGES}] * 8, {}, ("chat template",)),
        "messages among texts": ([*[ROW] * 3, {**ROW, "prompt": MESSAGES}], {}, ("line 4",)),
        "longer than the model": ([*[ROW] * 5, {**ROW, "prompt": "1+" * 100}], {}, ("row 5", "200 tokens")),
        "longer than allowed": ([ROW] * 8, {"data.max_prompt_length": 3}, ("row 0", "data.max_prompt_length")),
        "beside a completion as long as the model": ([ROW] * 8, {longest: 64}, (longest, "64")),
        "with a reward's column misspelt": ([{"prompt": "1+1=", "anwser": "2"}] * 8, {}, ("answer", "anwser")),
    }
    with_template = {
        "a message without a role": ([{"content": "1+1="}], "{{ messages[0]['role'] | upper }}"),
        "a template with a syntax error": (MESSAGES, "{% for m in messages %}"),
        "a template that raises": (MESSAGES, "{{ raise_exception('only users may speak') }}"),
        "a template that loops for ever": (MESSAGES, "{% for n in range(10 ** 9) %}{{ n }}{% endfor %}"),
        "a template that reaches for Python": (MESSAGES, "{{ messages.__class__.__mro__ }}{{ 1 // 0 }}"),
        "a template that writes nothing": (MESSAGES, "{# nothing #}"),
    }
    cases = [
        _case(name, "a.jsonl", json_lines(lines), mentions, **changes)
        for name, (lines, changes, mentions) in rows.items()
    ]
    for name, (prompt, template) in with_template.items():
        own: dict[str, Any] = {"model.chat_template_kwargs": {"chat_template": template}}
        lines = json_lines([{**ROW, "prompt": prompt}] * 8)
        cases.append(_case(name, "a.jsonl", lines, ("row 0", "data.prompt_column"), **own))
    return numbered("prompt", cases)


def json_lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
