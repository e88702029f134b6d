"""Search in the completions of a run: each text is looked for in the run's files, and nothing is stored.

A scan reads the files in the background and remembers where it found its text, with the numbers by which hits
are chosen and ordered. It follows the run: files that are new or have changed are read at the next search.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpox.errors import ConfigError, text_of
from grpox.errors.formatting import pluralize
from grpox.observing.page.rows import FILE, FOLDER, batch_of, id_of, prompt_id, read_rows
from grpox.observing.record_files import COMPLETIONS, finite, read_parquet
from grpox.runtime.logs import get_logger

if TYPE_CHECKING:
    import pyarrow
    from numpy.typing import NDArray

    Hits = NDArray[np.void]
    Places = NDArray[np.int64]
    Numbers = NDArray[Any]

logger = get_logger(__name__)
ORDERS = ("step", "-step", "reward", "-reward")
"""Orders of the answer: of the run, the newest first, the highest reward first, the lowest first."""
MOST_ROWS = 500
"""Largest number of rows in an answer."""
MOST_SCANS = 3
"""Number of texts whose hits are remembered; hits of a million completions take 28 megabytes."""
WAIT_SECONDS = 0.6
"""Seconds that an answer waits for the rest of the files."""
BATCH_ROWS = 4096
"""Rows that are compared at a time."""
RELEASE_FILES = 512
"""Number of files after which memory that reading has left behind goes back to the system."""
_HIT = np.dtype([("row", "i4"), ("step", "i8"), ("reward", "f8"), ("prompt", "u8")])
"""Row of a completion in its file, its step and reward, and the hash of its prompt."""
_READ = ("step", "reward", "prompt")


class CompletionSearch:
    """Searches the completions in a run's folder, while the run writes them.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self.problem = ""
        """Files that the last search could not read; empty: none."""
        self._scans: dict[str, _Scan] = {}  # by text, the last used one at the end
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(MOST_SCANS, "search")

    def close(self) -> None:
        """Stop the reading."""
        with self._lock:
            for scan in self._scans.values():
                scan.stop.set()
        self._pool.shutdown()

    def search(
        self,
        text: str = "",
        reward_min: float | None = None,
        reward_max: float | None = None,
        step_min: int | None = None,
        step_max: int | None = None,
        prompt: str | None = None,
        order: str = "step",
        group_by_prompt: bool = False,
        offset: int = 0,
        limit: int = 50,
    ) -> dict[str, Any]:
        """Return completions, or prompts.

        Args:
            text: text within the completion or the prompt; upper and lower case are alike.
            reward_min: lowest reward; completions without a reward are left out.
            reward_max: highest reward.
            step_min: first step.
            step_max: last step.
            prompt: id of a prompt: its completions over the steps.
            order: one of `ORDERS`; with `group_by_prompt` of the first step, or of the mean reward at the last.
            group_by_prompt: return prompts with their number of completions and their rewards.
            offset: number of rows to pass over.
            limit: number of rows, `MOST_ROWS` at most.

        Returns:
            rows and their total so far, and ``is_indexed``, False while files are still being read; with
            `prompt` also ``history``, steps and rewards of all completions that match, in the run's order.

        Raises:
            ConfigError: there is no such order.
            OSError: the folder of completions cannot be read.
        """
        if order not in ORDERS:
            raise ConfigError("no such order", "order", given=order, allowed=", ".join(ORDERS))
        window = slice(max(0, offset), max(0, offset) + min(max(0, limit), MOST_ROWS))
        scan, reading = self._follow(text, is_newest_first=order == "-step")
        wait([reading], WAIT_SECONDS)
        is_complete = reading.done() and not scan.stop.is_set()
        if is_complete:
            reading.result()
        self.problem = scan.problem
        by_file = scan.hits()

        def column(name: str) -> Numbers:
            return np.concatenate([np.empty(0, _HIT)[name], *(hits[name] for hits in by_file.values())])

        ends = np.cumsum([len(hits) for hits in by_file.values()])
        among = np.ones(int(ends[-1]) if by_file else 0, bool)
        for name, low, high in (("step", step_min, step_max), ("reward", reward_min, reward_max)):
            if low is not None:
                among &= column(name) >= low
            if high is not None:
                among &= column(name) <= high
        if prompt is not None:
            among &= column("prompt") == _hash_of(prompt)
        places, history = np.flatnonzero(among), None
        prompts: list[dict[str, Any]] = []
        if prompt is not None:
            history = [column("step")[places].tolist(), [*map(finite, column("reward")[places].tolist())]]
        if group_by_prompt:
            steps, rewards, hashes = (column(name)[places] for name in _READ)
            starts, prompts = _by_prompt(steps, rewards, hashes, order)
            places = places[starts]
        else:
            keys = column(order.removeprefix("-"))[places]
            places = places[np.argsort(_keys(keys, order), kind="stable")]
        ids, stems = [], list(by_file)
        for place in places[window].tolist():
            file = int(np.searchsorted(ends, place, "right"))
            ids.append(id_of(stems[file], by_file[stems[file]]["row"][place - ends[file]]))  # from the end
        rows = {row["id"]: row for row in read_rows(self._folder, ids)}
        if group_by_prompt:  # text and data of a completion of each prompt, and the prompt's numbers
            rows = {
                id: {name: rows[id][name] for name in ("prompt_id", "prompt", "data")} | numbers
                for id, numbers in zip(ids, prompts[window], strict=True)
                if id in rows
            }
        return {
            "total": len(places),
            "is_indexed": is_complete,
            "message": self.problem,
            "rows": list(rows.values()),
            "history": history,
        }

    def _follow(self, text: str, is_newest_first: bool) -> tuple[_Scan, Future[None]]:
        """Return the scan for a text, which reads what is new, and the end of its reading."""
        with self._lock:
            scan = self._scans.pop(text, None) or _Scan(self._folder / FOLDER, text, is_newest_first)
            self._scans[text] = scan
            if len(self._scans) > MOST_SCANS:
                self._scans.pop(next(iter(self._scans))).stop.set()
            if scan.reading is None or scan.reading.done():
                scan.reading = self._pool.submit(scan.read)
            return scan, scan.reading


class _Scan:
    """Hits of one text in the files of completions of a folder."""

    def __init__(self, folder: Path, text: str, is_newest_first: bool) -> None:
        self._folder, self._text, self._is_newest_first = folder, text, is_newest_first
        self._hits: dict[str, tuple[tuple[int, int], Hits | None]] = {}  # stem -> stamp; None: unreadable
        self.stop = threading.Event()
        self.reading: Future[None] | None = None
        """The last call of `read`."""

    def read(self) -> None:
        """Read the files that are new, and forget those that are gone; raises OSError for their folder's."""
        import pyarrow

        stamps = _stamps(self._folder)
        for stem in [stem for stem, (stamp, _) in self._hits.items() if stamps.get(stem) != stamp]:
            del self._hits[stem]
        new = sorted(stamps.keys() - self._hits.keys(), key=batch_of, reverse=self._is_newest_first)
        for place, stem in enumerate(new, 1):
            if self.stop.is_set():
                return
            if place % RELEASE_FILES == 0 or place == len(new):
                pyarrow.default_memory_pool().release_unused()
            try:
                self._hits[stem] = stamps[stem], _read_hits(self._folder / f"{stem}.parquet", self._text)
            except FileNotFoundError:  # a resumed run has removed it
                continue
            except (OSError, ValueError) as error:
                logger.debug("%s.parquet cannot be read: %s", stem, text_of(error))
                self._hits[stem] = stamps[stem], None

    @property
    def problem(self) -> str:
        """Files that cannot be read; empty: none."""
        broken = sorted(stem for stem, (_, hits) in self._hits.copy().items() if hits is None)
        what = f"{pluralize(len(broken), 'file')} of completions cannot be read, such as"
        return f"{what} {broken[0]}.parquet" if broken else ""

    def hits(self) -> dict[str, Hits]:
        """Return the hits in each file that has some, in the order of the run."""
        by_file = {
            stem: hits for stem, (_, hits) in self._hits.copy().items() if hits is not None and len(hits)
        }
        return {stem: by_file[stem] for stem in sorted(by_file, key=batch_of)}


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Return time and size of each file of completions, which tell it from one that took its place."""
    stamps = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                stem = entry.name.removesuffix(".parquet")
                if stem != entry.name and FILE.fullmatch(stem):
                    with suppress(FileNotFoundError):  # a resumed run has removed it
                        stat = entry.stat()
                        stamps[stem] = stat.st_mtime_ns, stat.st_size
    except FileNotFoundError:  # no completions yet
        pass
    return stamps


def _read_hits(path: Path, text: str) -> Hits:
    """Return the completions of a file that contain a text, in themselves or in their prompts.

    Arrow's arrays become numpy's by DLPack: Arrow's own conversions import pandas, which takes 36 MiB.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no file of completions.
    """
    table = read_parquet(path, COMPLETIONS, columns=(*_READ, "completion") if text else _READ)
    first, parts = 0, [np.empty(0, _HIT)]
    for batch in table.to_batches(BATCH_ROWS):
        prompts = batch.column("prompt").dictionary_encode()
        hashes = [_hash_of(prompt_id(prompt)) for prompt in prompts.dictionary.to_pylist()]
        place = np.from_dlpack(prompts.indices)
        hits = np.empty(len(batch), _HIT)
        hits["row"] = np.arange(first, first + len(batch))
        hits["step"] = np.from_dlpack(batch.column("step"))
        hits["reward"] = np.from_dlpack(batch.column("reward"))
        hits["prompt"] = np.array(hashes, "u8")[place]
        if text:
            in_prompt = _contain(prompts.dictionary, text)[place]
            hits = hits[in_prompt | _contain(batch.column("completion"), text)]
        parts.append(hits)
        first += len(batch)
    return np.concatenate(parts)


def _contain(texts: pyarrow.Array, text: str) -> NDArray[np.bool_]:
    from pyarrow import compute

    return np.from_dlpack(compute.match_substring(texts, text, ignore_case=True).cast("uint8")).astype(bool)


def _hash_of(prompt: str) -> np.uint64:
    """Return the hash that is written in the id of a prompt; 0 for a text that is no id."""
    try:
        return np.uint64(int(prompt, 16))
    except (ValueError, OverflowError):
        return np.uint64(0)


def _keys(values: Numbers, order: str) -> Numbers:
    """Return values that ascend in one of `ORDERS`; NaN is always last."""
    return -values if order in ("-step", "reward") else values


def _by_prompt(
    steps: Numbers, rewards: Numbers, hashes: Numbers, order: str
) -> tuple[Places, list[dict[str, Any]]]:
    """Return the place of each prompt's first hit, and the numbers of each prompt, both in `order`."""
    _, starts, prompt, counts = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    first = last = steps[starts]
    last = last.copy()
    np.maximum.at(last, prompt, steps)
    means = []
    for each in (first, last):
        counted = (steps == each[prompt]) & np.isfinite(rewards)
        sums = np.bincount(prompt[counted], rewards[counted], len(starts))
        numbers = np.bincount(prompt[counted], minlength=len(starts))
        means.append(np.divide(sums, numbers, out=np.full(len(starts), np.nan), where=numbers > 0))
    shown = np.lexsort((starts, _keys(first if order.endswith("step") else means[1], order)))
    rows = zip(*(each[shown].tolist() for each in (counts, first, last, *means)), strict=True)
    names = ("count", "first_step", "last_step", "reward_first", "reward_last")
    return starts[shown], [dict(zip(names, map(finite, row), strict=True)) for row in rows]
