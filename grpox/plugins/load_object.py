"""Loads an object from a Python file, ``path.py:name``, for components outside any package."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from grpox.errors import ConfigError, describe, nearest
from grpox.runtime.signals import raise_if_signal


def load_object(reference: str, base: Path | None = None) -> Any:
    """Load the object `name` of the file `path` in ``path.py:name``; a file is executed once per process.

    While the file executes, its folder is on the import path, so that it can import its neighbours.

    Args:
        base: folder of relative paths; default: the working directory.

    Raises:
        ConfigError: the reference has another form, the file does not exist or raises, or it lacks the name.
    """
    file, colon, name = reference.rpartition(":")
    if not colon or not file or not name:
        raise ConfigError("does not name an object in a file", given=reference, allowed="path.py:name")
    path = ((base or Path.cwd()) / Path(file).expanduser()).resolve()
    if path.suffix != ".py":
        raise ConfigError(f"{path} is not a .py file", given=reference, allowed="path.py:name")
    if not path.is_file():
        near = nearest(path.name, [other.name for other in path.parent.glob("*.py")])
        raise ConfigError(f"there is no file {path}", given=reference, nearest=near)
    module = _module(path)
    if not hasattr(module, name):
        names = [known for known in vars(module) if not known.startswith("_")]
        raise ConfigError(f"{path} has no '{name}'", given=reference, nearest=nearest(name, names))
    return getattr(module, name)


def _module(path: Path) -> ModuleType:
    # The digest distinguishes files with one name; pickle and dataclasses look in sys.modules.
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    module_name = f"grpox_file_{path.stem}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None  # of a file whose name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        raise_if_signal(error)
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        if not lines and isinstance(error, SyntaxError) and error.filename == str(path):
            lines = [error.lineno]
        raise ConfigError(describe(error), where=f"{path}:{lines[-1]}" if lines else str(path)) from error
    finally:
        with contextlib.suppress(ValueError):  # the file itself removed its folder from the path
            sys.path.remove(str(path.parent))
    return module
