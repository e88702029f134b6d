"""What a call of `load_dataset` in a script says of the data."""

from __future__ import annotations

import ast
from typing import Any

from grpox.runfile.from_trl.literals import Names, NotLiteral
from grpox.runfile.from_trl.setup import DataGiven

LOADERS = ("json", "csv", "parquet")
"""Names under which `load_dataset` reads files of `data_files`."""
_READ = {"path", "name", "split", "data_files", "streaming"}
"""Arguments of load_dataset that a run file can express."""
_HARMLESS = {"shuffle", "token", "cache_dir", "num_proc"}


def read_dataset(node: ast.expr, names: Names) -> DataGiven:
    """The dataset that `node` is, as far as literals show."""
    split: str | None = None
    changes: list[str] = []
    behind = names.behind(node)
    line = behind.lineno
    while True:
        match behind:
            case ast.Subscript(value=inner, slice=ast.Constant(value=str() as named)):
                split = split or named
                behind = names.behind(inner)
            case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method != "load_dataset":
                if method not in _HARMLESS:
                    changes.append(f"`.{method}` on line {behind.lineno}")
                behind = names.behind(inner)
            case _:
                break
    data = _loaded(behind, names)
    data.line = line
    data.split = split or data.split
    if changes and not data.problem:
        told = " and ".join(reversed(changes))
        data.problem = (
            f"the script changes it by {told}: save its rows to a .jsonl or .parquet file, and name that"
        )
    return data


def _loaded(node: ast.expr, names: Names) -> DataGiven:
    """What ``load_dataset(...)`` names."""
    match node:
        case ast.Call(func=ast.Name(id="load_dataset") | ast.Attribute(attr="load_dataset")):
            pass
        case _:
            return DataGiven(
                problem=f"`{_short(node)}` is no literal load_dataset: name the file or hub dataset"
            )
    try:
        given = _arguments(node, names)
    except (NotLiteral, RecursionError):
        return DataGiven(
            problem=f"`{_short(node)}` has arguments that are no literals: name the file or hub dataset"
        )
    data = DataGiven(given.get("path"), given.get("name"), given.get("split"), given.get("streaming") is True)
    if data.path in LOADERS:
        data.path, data.problem = _file(given.get("data_files"))
    elif others := sorted(given.keys() - _READ - _HARMLESS) + (["data_files"] if "data_files" in given else []):
        data.problem = f"load_dataset is given {', '.join(others)}, which a run file does not have: name a file"
    return data


def _arguments(call: ast.Call, names: Names) -> dict[str, Any]:
    """Of a call of load_dataset; the first ones may stand without their names."""
    pairs = list(zip(("path", "name", "data_dir", "data_files", "split"), call.args, strict=False))
    pairs += [(keyword.arg or "**", keyword.value) for keyword in call.keywords]
    given = {name: names.value(node) for name, node in pairs if name not in _HARMLESS}
    texts = ("path", "name", "split")
    if "**" in given or any(not isinstance(given.get(name), str | None) for name in texts):
        raise NotLiteral
    return {name: value for name, value in given.items() if value is not None}


def _file(files: Any) -> tuple[str | None, str]:
    """The one file of `data_files`, or why there is none."""
    if isinstance(files, dict) and len(files) == 1:
        [files] = files.values()
    if isinstance(files, list) and len(files) == 1:
        [files] = files
    if isinstance(files, str) and not set(files) & set("*?["):
        return files, ""
    return None, "a run file names one file: join those of `data_files`"


def _short(node: ast.expr, longest: int = 60) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
