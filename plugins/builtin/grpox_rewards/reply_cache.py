"""A judge's replies on disk, stored by the content of their requests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from grpox.errors import ConfigError
from grpox.toolkit import text_of, write_atomically


class ReplyCache:
    """A file for each reply, named by the SHA-256 of address and request: ``ab/abcd....json``.

    Files are written atomically, so ranks and runs can share the folder. It contains texts of prompts and
    completions, but no keys.

    Raises:
        ConfigError: the folder cannot be created.
    """

    def __init__(self, folder: str, url: str) -> None:
        self._folder = Path(folder).expanduser().absolute()
        self._url = url.encode()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"the judge's cache cannot be made: {text_of(error)}"
            raise ConfigError(what, given=folder, allowed="cache: a folder that may be written") from error

    def find(self, request: bytes) -> Any | None:
        """Return the answer to `request`; None if there is none, or its file is damaged."""
        try:
            return json.loads(self._file(request).read_text(encoding="utf-8"))["answer"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def keep(self, request: bytes, answer: Any) -> None:
        """Write the answer to `request`."""
        file = self._file(request)
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, json.dumps({"request": json.loads(request), "answer": answer}))

    def _file(self, request: bytes) -> Path:
        digest = hashlib.sha256(self._url + b"\n" + request).hexdigest()
        return self._folder / digest[:2] / f"{digest}.json"
