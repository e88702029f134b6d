"""Tasks of reasoning-gym and their settings, read from its sources.

Importing reasoning-gym takes seconds (sympy, matplotlib, a thousand fonts). A run file is checked far more
often than it is trained, so the check reads what it needs: a name in each file, the fields of one dataclass.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

NAME = re.compile(r'^DATASET_NAME = "(\w+)"', re.MULTILINE)


@cache
def task_files() -> dict[str, Path]:
    """Task name -> the file that defines it; empty where reasoning-gym is not installed."""
    spec = find_spec("reasoning_gym")  # of a top-level package this imports nothing
    folders = (spec.submodule_search_locations if spec else None) or []
    files = (path for folder in folders for path in sorted(Path(folder).rglob("*.py")))
    return {match[1]: path for path in files if (match := NAME.search(path.read_text(encoding="utf-8")))}


@cache
def settings_of(task: str) -> tuple[str, ...]:
    """The settings of a task: the fields of the dataclass with which it is registered."""
    tree = ast.parse(task_files()[task].read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    config = classes[_registered_config(tree)]
    targets = [statement.target for statement in config.body if isinstance(statement, ast.AnnAssign)]
    return tuple(target.id for target in targets if isinstance(target, ast.Name))


def _registered_config(tree: ast.Module) -> str:
    """The third argument of ``register_dataset(name, dataset, config, curriculum)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "register_dataset":
            return ast.unparse(node.args[2])
    raise LookupError("no call of register_dataset")
