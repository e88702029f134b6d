"""Files of the index of a run's completions: columns that only grow, and a journal of what they hold.

They lie in the user's cache folder, not in the run's: the record of a run stays as it is, and a run whose
folder cannot be written can be searched. The journal has a line for each indexed file of completions, written
after its columns. What follows the last line, after a crash or on a full disk, is cut off when it is opened.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

FORMAT = 1
"""Number of the files' format: an index of another one is built again."""
COLUMNS: Mapping[str, tuple[str, int]] = {
    "file": ("i4", 4),
    "row": ("i4", 4),
    "step": ("i4", 4),
    "prompt": ("i4", 4),
    "reward": ("f8", 8),
    "end": ("i8", 8),
    "prompt_digest": ("u8", 8),
    "prompt_end": ("i8", 8),
}
"""Column -> its numpy type and bytes. The first six have a value for each completion: place of its file in the
journal, row in the file, step, place of its prompt, reward, end of its text in ``text``. The others have a
value for each prompt: its hash, and end of its text in ``prompts``."""
TEXT, PROMPTS, JOURNAL = "text", "prompts", "journal"
"""Files of the texts in lower case, without anything between them; file of the journal."""
_FILES = (*COLUMNS, TEXT, PROMPTS, JOURNAL)


@dataclass(frozen=True)
class Entry:
    """A line of the journal: an indexed file of completions, and the sizes of the index after it."""

    stem: str
    mtime_ns: int
    size: int
    rows: int
    """Completions in the index."""
    prompts: int
    """Prompts in the index."""
    text: int
    """Bytes of `TEXT`."""
    prompt_text: int
    """Bytes of `PROMPTS`."""
    seconds: float
    """Seconds that the whole index has taken."""


def cache_folder() -> Path:
    """Return the folder of all indexes: in XDG_CACHE_HOME, or ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "grpox" / "completions"


class IndexFiles:
    """The open files of one index.

    Another process may have the same run's index open; the files are then temporary ones, without a name, which
    end with this process. So are they if the cache folder cannot be written.

    Args:
        folder: the run's folder.

    Raises:
        OSError: no file can be written, not even a temporary one.
    """

    def __init__(self, folder: Path) -> None:
        self.entries: list[Entry] = []
        """Content of the journal."""
        self.is_persistent = True
        """False for temporary files."""
        self._files: dict[str, IO[bytes]] = {}
        try:
            self._open(folder)
        except OSError:
            self.close()
            self.is_persistent = False
            self._files = {name: tempfile.TemporaryFile(buffering=0) for name in _FILES}  # noqa: SIM115

    @property
    def sizes(self) -> Entry:
        """Sizes of the index."""
        return self.entries[-1] if self.entries else Entry("", 0, 0, 0, 0, 0, 0, 0.0)

    def append(self, contents: Mapping[str, Any]) -> None:
        """Add columns and texts of a part of a file of completions; they count once `commit` is called.

        Raises:
            OSError: there is no space.
        """
        for name, content in contents.items():
            rest = memoryview(content).cast("B")
            while rest:
                rest = rest[self._files[name].write(rest) :]

    def commit(self, entry: Entry) -> None:
        """Add the line of a file of completions to the journal; raises OSError if there is no space."""
        self.append({JOURNAL: _line(entry)})
        self.entries.append(entry)

    def undo(self) -> None:
        """Remove what was added since the last `commit`."""
        self._cut()

    def clear(self) -> None:
        """Empty the index."""
        self.entries.clear()
        self._cut()

    def column(self, name: str, count: int) -> np.ndarray[Any, Any]:
        """Return the first `count` values of a column; the system reads them from disk as they are used."""
        import numpy as np

        kind, _ = COLUMNS[name]
        if count == 0:
            return np.empty(0, kind)
        return np.memmap(self._files[name], kind, "r", shape=(count,))

    def text(self, name: str, start: int, stop: int) -> bytes:
        """Read bytes of `TEXT` or `PROMPTS`."""
        return os.pread(self._files[name].fileno(), stop - start, start)

    def close(self) -> None:
        """Close the files, and let other processes use them."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def _open(self, folder: Path) -> None:
        """Open the files in the cache folder; raises OSError if they are in use or cannot be written."""
        root = cache_folder()
        root.mkdir(parents=True, exist_ok=True)
        home = root / sha256(os.fsencode(folder.absolute())).hexdigest()[:16]
        home.mkdir(mode=0o700, exist_ok=True)
        for name in _FILES:
            # In append mode every write goes to the end, also after the file was cut.
            self._files[name] = (home / name).open("a+b", buffering=0)
        fcntl.flock(self._files[JOURNAL], fcntl.LOCK_EX | fcntl.LOCK_NB)
        about = home / "about.json"
        text = json.dumps({"format": FORMAT, "folder": str(folder.absolute())})
        if about.exists() and about.read_text(encoding="utf-8") == text:
            self._read_journal()
        else:
            self._cut()
            about.write_text(text, encoding="utf-8")
        _remove_orphans(root)

    def _read_journal(self) -> None:
        file = self._files[JOURNAL]
        file.seek(0)
        for line in file.readlines():
            try:
                self.entries.append(Entry(**json.loads(line)))
            except (ValueError, TypeError):
                break  # half a line
        have = {name: os.fstat(self._files[name].fileno()).st_size for name in _FILES}
        while self.entries and any(have[name] < size for name, size in self._expected().items()):
            self.entries.pop()
        self._cut()

    def _expected(self) -> dict[str, int]:
        """Return the bytes of each file but the journal."""
        sizes = self.sizes
        rows = {name: sizes.prompts if name.startswith("prompt_") else sizes.rows for name in COLUMNS}
        expected = {name: rows[name] * COLUMNS[name][1] for name in COLUMNS}
        return {**expected, TEXT: sizes.text, PROMPTS: sizes.prompt_text}

    def _cut(self) -> None:
        """Cut off what does not belong to a line of the journal."""
        journal = sum(len(_line(entry)) for entry in self.entries)
        for name, size in {**self._expected(), JOURNAL: journal}.items():
            self._files[name].truncate(size)
            self._files[name].seek(size)


def _line(entry: Entry) -> bytes:
    return json.dumps(asdict(entry)).encode() + b"\n"


def _remove_orphans(root: Path) -> None:
    """Remove the indexes of folders that no longer exist."""
    for about in root.glob("*/about.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            folder = Path(json.loads(about.read_text(encoding="utf-8"))["folder"])
            if folder.parent.exists() and not folder.exists():
                shutil.rmtree(about.parent)
