"""The core knows no built-in plugin by name, plugins import only what others may, and neither prints."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from test_public_surface import PUBLIC_CONFIG, PUBLIC_ERRORS

import grpox
import grpox.environments
import grpox.testing
from grpox import contracts, toolkit
from grpox.plugins.discovery import discover
from grpox.plugins.hookspecs import KINDS

ROOT = Path(__file__).parents[2]
CORE = ROOT / "grpox"
BUILTIN = ROOT / "plugins" / "builtin"
PACKAGES = sorted(path.parent.name for path in BUILTIN.glob("*/__init__.py"))
HOOKS = {"plugins/hookspecs.py": set(KINDS.values()) & set(PACKAGES)}
"""Discovery hooks have the names of packages: file of the core -> those that it may have."""

PLAIN_WORDS = {
    "batch", "code", "cosine", "environment", "exact", "format", "group", "length", "math", "none", "regex",
    "repetition",
}  # fmt: skip
"""Names of components that are words of every program."""
NAMED = {
    "config/run.py": "defaults of the run file",
    "cli/plugin_check.py": "heavy libraries, one of which is mlflow",
    "errors/algorithm_names.py": "names of algorithms, which are no misspellings of one another",
    "observing/record.py": "libraries whose versions are recorded",
    "policy/deepspeed_import.py": "a library that DeepSpeed looks for",
    "plugins/scaffold": "templates of plugins",
    "runfile/recipes": "run files",
    "runfile/from_trl": "tables from TRL's words to run files",
    "testing": "examples in checks that authors run",
}
"""Places where the core may name a component, and as what: data of users, no case of the code."""


PUBLIC = {
    "grpox": set(grpox.__all__) | {"__version__"},
    "grpox.config": set(PUBLIC_CONFIG),
    "grpox.contracts": {name for name in vars(contracts) if not name.startswith("_")},
    "grpox.environments": set(grpox.environments.__all__),
    "grpox.errors": set(PUBLIC_ERRORS),
    "grpox.errors.validation": {"problems_of"},
    "grpox.runtime.child": {"Child", "ChildFailed", "ChildLate", "Restarted", "connect_to_parent"},
    "grpox.runtime.logs": {"get_logger", "WarnOnce"},
    "grpox.testing": set(grpox.testing.__all__),
    "grpox.toolkit": set(toolkit.__all__),
}
"""Module -> the names of it that a plugin may import: docs/plugin-api.md, public_surface.txt."""


def sources(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield path.relative_to(folder).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> Iterator[str]:
    """Modules and names that a module imports, wherever in it, dotted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def texts(tree: ast.Module) -> Iterator[str]:
    """String constants of a module's code, without docstrings."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


CORE_SOURCES = dict(sources(CORE))


def test_the_core_names_no_built_in_package() -> None:
    for file, tree in CORE_SOURCES.items():
        mentioned = [*imported(tree), *texts(tree)]
        mentioned += [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        named = {package for package in PACKAGES for text in mentioned if package in text}
        assert named <= HOOKS.get(file, set()), file


def test_the_core_has_no_case_for_a_built_in_component() -> None:
    names = {offer.spec.name for offer in discover().offers if offer.distribution == "grpox"} - PLAIN_WORDS
    assert "vllm-colocate" in names
    files = [file for file in CORE_SOURCES if not file.startswith(tuple(NAMED))]
    assert {file for file in files if names & set(texts(CORE_SOURCES[file]))} == set()


def private(tree: ast.Module) -> set[str]:
    """List what a module imports of grpox that is not public."""
    found = {name for name in imported(tree) if name.startswith("grpox.")}
    return {name for name in found if name.rpartition(".")[2] not in PUBLIC.get(name.rpartition(".")[0], set())}


BUILTIN_SOURCES = dict(sources(BUILTIN))


def test_built_in_plugins_import_only_the_public_surface() -> None:
    assert {file: found for file, tree in BUILTIN_SOURCES.items() if (found := private(tree))} == {}


PRINTS = {
    "observing/display.py": "the live line and the tables of a run, which are no records",
    "runtime/logs.py": "the handler that shows records on a terminal",
    "runtime/watchdog.py": "writes a heading into the file of stacks, not on the screen",
    "data/prompts.py": "a progress bar",
    "grpox_mlflow/commands.py": "commands, whose results they print",
    "grpox_vllm_serving/command.py": "a command, whose result it prints",
}


def test_outside_the_command_line_nothing_is_printed_but_by_those_that_say_why() -> None:
    """Messages are log records, which `grpox.runtime.logs` shows."""
    found = set()
    for file, tree in (CORE_SOURCES | BUILTIN_SOURCES).items():
        functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        names = {function.id for function in functions if isinstance(function, ast.Name)}
        names |= {function.attr for function in functions if isinstance(function, ast.Attribute)} & {"Console"}
        if names & {"print", "Console"} and not file.startswith("cli/"):
            found.add(file)
    assert found == PRINTS.keys()
