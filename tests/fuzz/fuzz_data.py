"""Bad data files: what shows at a look, and what shows when every prompt is read."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

from fuzz_case import Case, changed, numbered, raw, run_file, together

ROW = {"prompt": "1+1=", "answer": "2"}
LINE = json.dumps(ROW) + "\n"
TRAIN = ("train", "run.yaml")
MESSAGES = [{"role": "user", "content": "1+1="}]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def data_cases() -> list[Case]:
    """All of them; each has a name of its own."""
    return [*_files(), *_parquet_files(), *_prompts()]


def _files() -> list[Case]:
    deep = '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}\n"
    files: dict[str, tuple[str, str | bytes, tuple[str, ...]]] = {
        "JSON lines: nothing": ("a.jsonl", "", ("has no record",)),
        "JSON lines: cut off": ("a.jsonl", LINE * 3 + LINE[:9], ("line 4",)),
        "JSON lines: a list in the middle": ("a.jsonl", LINE + "[1]\n" + LINE, ("line 2",)),
        "JSON lines: null": ("a.jsonl", "null\n", ("line 1",)),
        "JSON lines: latin-1": ("a.jsonl", '{"prompt": "é"}\n'.encode("latin-1"), ("UTF-8",)),
        "JSON lines: NULs": ("a.jsonl", b"\0" * 999, ("line 1",)),
        "JSON lines: a NUL in a text": ("a.jsonl", '{"prompt": "a\0"}\n', ("line 1",)),
        "JSON lines: nested 100000 deep": ("a.jsonl", deep, ("cannot be read",)),
        "JSON lines: an integer of 5000 digits": ("a.jsonl", '{"prompt": ' + "9" * 5000 + "}\n", ("digits",)),
        "JSON lines: other columns": ("a.jsonl", '{"question": "1"}\n', ("data.prompt_column", "question")),
        "JSON lines: an empty record": ("a.jsonl", "{}\n" + LINE, ("data.prompt_column", "line 1")),
        "JSON lines: too few": ("a.jsonl", LINE, ("2 prompts", "has 1")),
        "JSON lines: a column with colours": ("a.jsonl", '{"\\u001b[31m": 1}\n', ("\\x1b[31m",)),
        "JSON lines: 3000 columns": (
            "a.jsonl",
            json.dumps({f"column{n}": 1 for n in range(3000)}) + "\n",
            ("data.prompt_column", "column0"),
        ),
        "JSON: nothing": ("a.json", "", ("has no record",)),
        "JSON: an empty array": ("a.json", "[]", ("has no record",)),
        "JSON: an array of numbers": ("a.json", "[1, 2]", ("record 0",)),
        "JSON: an array cut off": ("a.json", f"[{LINE.strip()},\n", ("JSON",)),
        "JSON: two arrays": ("a.json", f"[{LINE}]\n[{LINE}]", ("JSON",)),
        "JSON: nested too deep": ("a.json", "[" * 100_000, ("cannot be read",)),
        "JSON: a mapping of columns": ("a.json", '{\n"prompt": ["1+1="]\n}', ("line 1",)),
        "CSV: nothing": ("a.csv", "", ("has no record",)),
        "CSV: only the header": ("a.csv", "prompt,answer\n", ("has no record",)),
        "CSV: a value too many": ("a.csv", "prompt,answer\na,b,c\n", ("line 2", "3 values for 2")),
        "CSV: a value too few": ("a.csv", "prompt,answer\na,b\nc\n", ("line 3", "1 values for 2")),
        "CSV: latin-1": ("a.csv", "prompt\né\n".encode("latin-1"), ("UTF-8",)),
        "CSV: a quote left open": ("a.csv", 'prompt,answer\n"a,b\n', ("line",)),
        "CSV: a field of 200000 characters": ("a.csv", "prompt\n" + "x" * 200_000 + "\n", ("line 2",)),
        "CSV: no header": ("a.csv", "1+1=,2\n2+2=,4\n", ("data.prompt_column",)),
        "a file of another kind": ("a.txt", "1+1=\n", (".jsonl", ".csv")),
        "a compressed file": ("a.jsonl.gz", b"\x1f\x8b", (".jsonl",)),
        "parquet: nothing": ("a.parquet", b"", ("parquet",)),
        "parquet: only the magic": ("a.parquet", b"PAR1PAR1", ("parquet",)),
        "parquet: garbage between the magics": (
            "a.parquet",
            b"PAR1" + b"\xff" * 64 + (64).to_bytes(4, "little") + b"PAR1",
            ("a.parquet",),
        ),
        "parquet: encrypted": (
            "a.parquet",
            b"PARE" + b"\xff" * 64 + (64).to_bytes(4, "little") + b"PARE",
            ("a.parq",),
        ),
    }
    cases = []
    for name, (file, content, mentions) in files.items():
        make = together(run_file(changed({"data.path": file})), raw(content, file))
        key = () if mentions[0].startswith(("data.", "\\x", "2 prompts")) else ("data.path",)
        cases.append(Case(name, make, (*key, *mentions), opened=True))
        if name.endswith(("nothing", "cut off", "text")):
            held_out = changed({"evaluation": {"path": file}})
            cases.append(
                Case(
                    f"{name}, held out",
                    together(run_file(held_out), raw(content, file)),
                    ("evaluation.path", *mentions),
                    opened=True,
                )
            )
    return numbered("data", cases)


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
        "without its first half": (lambda: good()[len(good()) // 2 :], ("data.path",)),
        "with other columns": (
            lambda: parquet({"question": ["1"] * 8}), ("data.prompt_column", "question"),
        ),
        "with broken pages": (with_broken_pages, ("data.path",)),
        "with nulls": (rows_of(None), ("row 0",)),
        "with bytes": (rows_of(b"1+1="), ("row 0",)),
        "with mappings": (rows_of({"a": 1}), ("row 0",)),
    }  # fmt: skip
    cases = [
        Case(
            name,
            together(run_file(changed({"data.path": "a.parquet"})), raw(content, "a.parquet")),
            mentions,
            TRAIN,
            opened=True,
        )
        for name, (content, mentions) in files.items()
    ]
    return numbered("parquet", cases)


def _prompts() -> list[Case]:
    """Files that read well, and rows that hold no prompt or one that the model cannot take."""
    rows: dict[str, tuple[list[Any], dict[str, Any], tuple[str, ...]]] = {
        "null": ([ROW, {**ROW, "prompt": None}] * 4, {}, ("line 2",)),
        "null from the first on": ([{**ROW, "prompt": None}] * 8, {}, ("line 1",)),
        "an empty text": ([*[ROW] * 5, {**ROW, "prompt": ""}], {}, ("row 5",)),
        "left out": ([*[ROW] * 5, {"answer": "2"}], {}, ("line 6",)),
        "a number": ([{**ROW, "prompt": 7}] * 8, {}, ("row 0",)),
        "a mapping": ([{**ROW, "prompt": {"role": "user"}}] * 8, {}, ("row 0",)),
        "an empty list": ([{**ROW, "prompt": []}] * 8, {}, ("row 0",)),
        "a list of texts": ([{**ROW, "prompt": ["1+1="]}] * 8, {}, ("row 0",)),
        "a number in another row": ([*[ROW] * 3, {**ROW, "prompt": 3.5}], {}, ("line 4",)),
        "messages without a template": ([{**ROW, "prompt": MESSAGES}] * 8, {}, ("chat template",)),
        "messages among texts": ([*[ROW] * 3, {**ROW, "prompt": MESSAGES}], {}, ("line 4",)),
        "longer than the model": ([*[ROW] * 5, {**ROW, "prompt": "1+" * 100}], {}, ("row 5", "200 tokens")),
        "longer than allowed": ([ROW] * 8, {"data.max_prompt_length": 3}, ("row 0", "data.max_prompt_length")),
        "beside a completion as long as the model": (
            [ROW] * 8,
            {"sampling.max_completion_length": 64},
            ("sampling.max_completion_length", "64"),
        ),
        "without the reward's column": ([{"prompt": "1+1="}] * 8, {}, ("answer",)),
        "with a reward's column misspelt": ([{"prompt": "1+1=", "anwser": "2"}] * 8, {}, ("answer", "anwser")),
    }
    with_template = {
        "a message without a role": ([{"content": "1+1="}], "{{ messages[0]['role'] | upper }}"),
        "a message without content": (
            [{"role": "user"}],
            TEMPLATE.replace("m['content']", "m['content'] + '='"),
        ),
        "a message whose content is null": (
            [{"role": "user", "content": None}],
            "{{ messages[0]['content'] + '=' }}",
        ),
        "a template with a syntax error": (MESSAGES, "{% for m in messages %}"),
        "a template that raises": (MESSAGES, "{{ raise_exception('only users may speak') }}"),
        "a template that divides by zero": (MESSAGES, "{{ 1 // 0 }}"),
        "a template that loops for ever": (MESSAGES, "{% for n in range(10 ** 9) %}{{ n }}{% endfor %}"),
        "a template that reaches for Python": (MESSAGES, "{{ messages.__class__.__mro__ }}{{ 1 // 0 }}"),
        "a template that writes nothing": (MESSAGES, "{# nothing #}"),
        "a template that calls for ever": (MESSAGES, "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        "an unknown role": (
            [{"role": "wizard", "content": "1"}],
            "{% if messages[0].role != 'user' %}{{ raise_exception('no such role') }}{% endif %}",
        ),
    }
    cases = [
        Case(
            name,
            together(run_file(changed({"data.path": "a.jsonl", **changes})), _json_lines(lines)),
            mentions,
            TRAIN,
            opened=True,
        )
        for name, (lines, changes, mentions) in rows.items()
    ]
    for name, (prompt, template) in with_template.items():
        run = changed({"data.path": "a.jsonl", "model.chat_template_kwargs": {"chat_template": template}})
        make = together(run_file(run), _json_lines([{**ROW, "prompt": prompt}] * 8))
        cases.append(Case(name, make, ("row 0", "data.prompt_column"), TRAIN, opened=True))
    return numbered("prompt", cases)


def _json_lines(rows: list[Any]) -> Any:
    return raw("".join(json.dumps(row) + "\n" for row in rows), "a.jsonl")
