"""Nasty run files, written by hand: what YAML allows and a run does not; odd bytes, keys, names and paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from fuzz_case import RUN, Case, Make, changed, numbered, raw, run_file, together

from grpox.config import RunConfig

GOOD = yaml.safe_dump(RUN, sort_keys=False)
RED = "\x1b[31mred\x1b[0m"


def run_file_cases() -> list[Case]:
    """All of them; each has a name of its own."""
    return [*_yaml(), *_texts(), *_paths()]


def _more(text: str) -> str:
    return f"{GOOD}{text}\n"


def _bomb(levels: int, width: int) -> str:
    """Aliases of aliases: width ** levels values in a few lines."""
    lines = ["a0: &a0 [lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels + 1)]
    return "\n".join(lines)


def _yaml() -> list[Case]:
    merges = "\n".join(
        ["m0: &m0 {k: 1}", *(f"m{n}: &m{n} {{a: *m{n - 1}, b: *m{n - 1}}}" for n in range(1, 40))]
    )
    good = GOOD.encode()
    texts: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
        "latin-1": (good + "# français\n".encode("latin-1"), ("UTF-8",)),
        "a NUL": (good + b"x: a\0b\n", ("U+0000",)),
        "an escape sequence": (good + b"x: \x1b[31mred\n", ("U+001B",)),
        "a byte order mark in the middle": (good + b"\xef\xbb\xbfx: 1\n", ("run.yaml:",)),
        "TOML": (b"[model]\npath = 'x'\n[data]\n", ("run.yaml",)),
        "an alias bomb": (_more(_bomb(9, 10)), ("aliases", "run.yaml")),
        "an alias bomb of mappings": (_more(merges), ("aliases", "run.yaml")),
        "an alias to itself": (_more("x: &x [*x]"), ("x[0]", "contains it")),
        "a python object": (_more("x: !!python/object/apply:os.system ['touch pwned']"), ("!!python", "x")),
        "a tag with a handle nobody declared": (_more("x: !e!y 1"), ("!e!",)),
        "a key that is a list": (_more("? [a, b]\n: 1"), ("key must be text",)),
        "a key that is empty": (_more("'': 1"), ("unknown key",)),
        "tabs for spaces": ("model:\n\tpath: x\n", ("run.yaml:2", "\\t")),
        "an escape that is none": (_more('x: "\\q"'), ("run.yaml:", "escape")),
        "an escaped NUL": (GOOD.replace("output_dir: out", 'output_dir: "a\\0b"'), ("U+0000", "output_dir")),
        "an escaped surrogate": (_more('hub: {repo: "\\ud800"}'), ("U+D800", "hub.repo")),
        "nothing": ("", ("is empty",)),
        "a list": ("- model\n- data\n", ("a mapping of keys",)),
        "an empty mapping": ("{}\n", ("model", "data", "rewards", "required")),
        "lists nested 10000 deep": (_more("x: " + "[" * 10000 + "]" * 10000), ("nested too deeply",)),
        "blocks nested 300 deep": ("".join(f"{' ' * n}a:\n" for n in range(300)), ("nested too deeply",)),
        "50 MB of one text": (_more("x: " + "y" * 50_000_000), ("is longer than",)),
        "5000 unknown keys": (_more("\n".join(f"k{n}: 1" for n in range(5000))), ("k0", "more")),
    }
    rate = "max_steps: 1\n  learning_rate: "
    numbers = {
        "not a number": (f"{rate}.nan", "not a number"),
        "infinity": (f"{rate}.inf", "train.learning_rate"),
        "1e400": (f"{rate}1e400", "too large a number"),
        "an integer of 5000 digits": (rate + "9" * 5000, "5000 digits"),
        "an integer beyond a float": (f"{rate}1" + "0" * 400, "train.learning_rate"),
        "steps in base 60": ("max_steps: 1:30", "train.max_steps"),
        "steps that are true": ("max_steps: true", "train.max_steps"),
    }
    for name, (line, mention) in numbers.items():
        texts[name] = GOOD.replace("max_steps: 1", line), (mention,)
    cases = [Case(name, raw(text), mentions) for name, (text, mentions) in texts.items()]
    return numbered("YAML", cases)


Rows = dict[str, tuple[Any, ...]]
"""Name -> a key of the run file, its wrong value, and what the error names beside the key."""


def _cases(prefix: str, rows: Rows, *others: Make) -> list[Case]:
    cases = []
    for name, (key, value, *mentions) in rows.items():
        named = (key,) if key.partition(".")[0] in RunConfig.model_fields else ()
        cases.append(Case(name, together(*others, run_file(changed({key: value}))), (*named, *mentions)))
    return numbered(prefix, cases)


def _texts() -> list[Case]:
    """Unicode that shows nothing, turns the line around, or colours the terminal."""
    rows: Rows = {
        "a key with colours": (RED, 1, "\\x1b[31mred"),
        "a key with a zero-width space": ("lo\u200bss", "dapo", "lo\\u200bss", "loss"),
        "a key with a line break": ("a\nerror: all is well", 1, "a\\nerror"),
        "a loss with colours": ("loss", RED, "\\x1b[31mred"),
        "a loss with line breaks": ("loss", "dapo\nerror: nothing", "dapo\\nerror"),
        "a prompt column in other case": ("data.prompt_column", "Prompt", "prompt"),
        "an empty stop text": ("sampling", {"stop": [""]}, "stop"),
        "a loss with a colon too many": ("loss", "a:b:c", "a:b:c"),
        "a requirement that is none": ("plugins", {"required": ["grpox >= two"]}, "plugins.required"),
        "no reward": ("rewards", []),
        "a reward that is a list": ("rewards", [["exact"]], "rewards[0]"),
    }
    return _cases("text", rows)


def _odd_files(folder: Path) -> None:
    (folder / "folder.jsonl").mkdir()
    os.mkfifo(folder / "fifo.jsonl")
    (folder / "gone.jsonl").symlink_to("nowhere.jsonl")


def _paths() -> list[Case]:
    judge = {"name": "reward_model", "model": "/no/such/model"}
    rows: Rows = {
        "a model without config.json": ("model.path", ".", "config.json"),
        "a model of 5000 characters": ("model.path", "m" * 5000, "too long"),
        "a model of a user that is not there": ("model.path", "~nobody-here/m"),
        "data that is a folder of that suffix": ("data.path", "folder.jsonl", "is a folder"),
        "data that is a pattern": ("data.path", "../shared/*.jsonl", "*.jsonl"),
        "data that is a dangling link": ("data.path", "gone.jsonl", "nowhere.jsonl"),
        "data that is a FIFO": ("data.path", "fifo.jsonl", "not a regular file"),
        "data that is a URL": ("data.path", "https://example.org/a.jsonl"),
        "data with an unknown split": ("data.split", "trian", "trian"),
        "data with a split that is no split": ("data.split", "train[:"),
        "an output_dir that is a file": ("output_dir", "run.yaml", "is a file"),
        "an output_dir below a file": ("output_dir", "run.yaml/out", "is a file"),
        "an output_dir of spaces": ("output_dir", "  ", "is empty"),
        "a reward model that is not there": ("rewards", [judge], "rewards[0].model", "/no/such/model"),
        "data with a split of nothing": ("data", {"path": "../shared/train.jsonl", "split": "train[:0]"}),
    }
    return _cases("path", rows, _odd_files)
