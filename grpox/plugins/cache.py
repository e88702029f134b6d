"""What plugins said when they were last asked, so that listing them imports none of them.

One JSON file for each user. An answer holds as long as the plugin's fingerprint does, a failure only as long as
nothing is installed or removed either. A cache that cannot be read or written is no cache: plugins are then
asked each time, and nothing else changes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

from grpox.plugins.fingerprint import Surroundings, facts
from grpox.plugins.hookspecs import KINDS, ComponentSpec
from grpox.plugins.loader import Answer, check_component
from grpox.plugins.requirements import canonical_name, none_met

FOLDER_VARIABLE = "GRPOX_CACHE_DIR"
"""Environment variable with the folder of the cache, in place of the user's own cache folder."""

FORMAT = 1
MOST_ENTRIES = 1000
"""Of several environments, the plugins last asked are kept."""

_NAMES = ("needs", "provides", "requires")


class PluginCache:
    """The remembered answers, as they are when this is made.

    Args:
        fresh: remember nothing: every plugin is asked, and its answer replaces what is in the file.
    """

    def __init__(self, fresh: bool = False) -> None:
        self._surroundings = Surroundings()
        self._entries: Mapping[str, Any] = {} if fresh else _read()
        self._fingerprints: dict[str, str | None] = {}
        self._new: dict[str, Any] = {}

    def get(self, entry_point: metadata.EntryPoint) -> Answer | None:
        """What the plugin said, if that still holds."""
        entry = self._entries.get(_key(entry_point))
        fingerprint = self._fingerprint(entry_point)
        if not isinstance(entry, dict) or fingerprint is None or entry.get("fingerprint") != fingerprint:
            return None
        answer = _answer(entry)
        if answer is None or not answer.failure:
            return answer
        return answer if entry.get("surroundings") == self._surroundings.fingerprint else None

    def put(self, entry_point: metadata.EntryPoint, answer: Answer) -> None:
        """Remember what a plugin said after `get` was asked for it; `save` writes it."""
        fingerprint = self._fingerprint(entry_point)
        if fingerprint is not None and (told := _told(answer)) is not None:
            seen = {"fingerprint": fingerprint, "surroundings": self._surroundings.fingerprint}
            self._new[_key(entry_point)] = seen | told

    def lack(self, alternatives: str, install: str) -> str:
        """`none_met` of the same arguments, remembered until anything is installed or removed."""
        key = " ".join(("requires", alternatives, install, sys.prefix))
        entry, now = self._entries.get(key), self._surroundings.fingerprint
        if isinstance(entry, dict) and entry.get("surroundings") == now and isinstance(entry.get("lack"), str):
            return str(entry["lack"])
        # It reads requirements with a library whose import takes a tenth of listing all plugins.
        lack = none_met(alternatives, install)
        self._new[key] = {"surroundings": now, "lack": lack}
        return lack

    def save(self) -> None:
        """Write what is new beside what other processes have written meanwhile, all at once."""
        if not self._new:
            return
        kept = {key: entry for key, entry in _read().items() if key not in self._new}
        newest = dict(list((kept | self._new).items())[-MOST_ENTRIES:])
        self._new = {}
        # A home may be full, read-only or absent.
        with suppress(OSError, ValueError, RuntimeError):
            _write(json.dumps({"format": FORMAT, "plugins": newest}))

    def _fingerprint(self, entry_point: metadata.EntryPoint) -> str | None:
        """As it was when first asked for, which is before the plugin is imported: its files may change then."""
        key = _key(entry_point)
        if key not in self._fingerprints:
            self._fingerprints[key] = self._surroundings.of(entry_point)
        return self._fingerprints[key]


def cache_file() -> Path:
    """Where answers are kept: in `GRPOX_CACHE_DIR` or the user's cache folder."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given, "plugins.json")
    # Imported late: whoever names a folder needs no search for one.
    import platformdirs

    return Path(platformdirs.user_cache_dir("grpox"), "plugins.json")


def _key(entry_point: metadata.EntryPoint) -> str:
    """One plugin in one environment, whatever its version."""
    found = facts(entry_point.dist) if entry_point.dist else None
    name, folder = (canonical_name(found.name), found.folder) if found else ("", "")
    return " ".join((name, entry_point.value, folder, sys.prefix, str(sys.implementation.cache_tag)))


def _read() -> dict[str, Any]:
    try:
        found = json.loads(cache_file().read_bytes())
    except (OSError, ValueError, RuntimeError, RecursionError):
        return {}
    valid = isinstance(found, dict) and found.get("format") == FORMAT
    plugins = found.get("plugins") if valid else None
    return plugins if isinstance(plugins, dict) else {}


def _write(text: str) -> None:
    # Imported late: most commands have nothing to write.
    import tempfile

    file = cache_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    # Several ranks, and several machines that share a home, may write at once.
    descriptor, unfinished = tempfile.mkstemp(dir=file.parent, prefix=f"{file.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as opened:
            opened.write(text)
        os.replace(unfinished, file)
    except BaseException:
        os.unlink(unfinished)
        raise


def _told(answer: Answer) -> dict[str, Any] | None:
    """An answer as JSON would give it back; None for one that holds what is no text."""
    components = [(kind, {**vars(spec), **_listed(spec)}) for kind, spec in answer.components]
    texts = {"observes": answer.observes, "failure": answer.failure, "notes": answer.notes}
    told = {"components": components, **texts}
    try:
        read: dict[str, Any] = json.loads(json.dumps(told))
    except (TypeError, ValueError, RecursionError):
        return None
    return read if _answer(read) is not None else None


def _listed(spec: ComponentSpec) -> dict[str, list[str]]:
    return {label: list(getattr(spec, label)) for label in _NAMES}


def _answer(entry: Mapping[str, Any]) -> Answer | None:
    """An entry as it was put; None where the file was changed by another hand."""
    try:
        components = tuple((kind, _spec(kind, told)) for kind, told in entry["components"])
        observes, failure, notes = tuple(entry["observes"]), entry["failure"], tuple(entry["notes"])
        valid = all(isinstance(text, str) for text in (*observes, failure, *notes))
        return Answer(components, observes, failure, notes) if valid else None
    except Exception:  # noqa: BLE001 - whatever stands there, it is not an answer
        return None


def _spec(kind: str, told: Mapping[str, Any]) -> ComponentSpec:
    spec = ComponentSpec(**{**told, **{label: tuple(told[label]) for label in _NAMES}})
    check_component(spec, KINDS[kind])
    for field in fields(spec):
        wanted = tuple if field.name in _NAMES else int if field.name == "api" else str
        if not isinstance(getattr(spec, field.name), wanted):
            raise TypeError(f"{field.name} is no {wanted.__name__}")
    return spec
