"""Search in the completions of a run: an index that is built in the background, and kept.

Numbers are columns of the index, which numpy compares. Texts stand one behind the other in one file, in lower
case, and a search reads through it: as fast as memory, for any part of a word in any language, and there is no
query language that a text could break out of. The rows to show come from the run's own files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpox.errors import ConfigError, text_of
from grpox.errors.formatting import pluralize
from grpox.observing.page.buffers import finite, integers, numbers
from grpox.observing.page.index_files import PROMPTS, TEXT, Entry, IndexFiles
from grpox.observing.page.rows import FILE, FOLDER, id_of, prompt_id, read_rows
from grpox.observing.page.scan import lower, lower_text, scan
from grpox.runtime.files import open_regular, write_error_message
from grpox.runtime.logs import get_logger

if TYPE_CHECKING:
    import numpy as np
    import pyarrow
    from numpy.typing import NDArray

    Places = NDArray[np.int64]

logger = get_logger(__name__)
ORDERS = ("step", "-step", "reward", "-reward")
"""Orders of the answer: of the run, the newest first, the highest reward first, the lowest first."""
MOST_ROWS = 500
"""Largest number of rows in an answer."""
MOST_RESULTS = 4
"""Number of results that are kept for their next pages."""
LOOK_SECONDS, RETRY_SECONDS = 1.0, 30.0
"""Seconds between two looks for new files; seconds until the next attempt after a write error."""
BATCH_ROWS = 4096
"""Rows of a file that are in memory at a time."""
_BEGIN_SECONDS = 0.5
"""Seconds until the building begins, so that the page gets its first answers before."""
_NEEDED = ("step", "prompt", "completion", "reward")
_SHOWN = (*_NEEDED, "group", "sample", "advantage", "finish_reason", "completion_length")


class _Unreadable(Exception):
    """Raised for a file that is no file of completions."""


class _Stamp(NamedTuple):
    """Tells a file from one that has taken its place."""

    mtime_ns: int
    size: int


class _Query(NamedTuple):
    text: str
    reward_min: float | None
    reward_max: float | None
    step_min: int | None
    step_max: int | None
    prompt: str | None


class _State(NamedTuple):
    """Part of the index that searches see."""

    rows: int = 0
    prompts: int = 0
    gone: tuple[int, ...] = ()
    """Places in the journal of files that are gone."""


class CompletionIndex:
    """The index of the completions in a run's folder, which follows the run.

    Args:
        folder: the run's folder.
        is_live: build it in a thread, and follow the run; False: only when `refresh` is called.
    """

    def __init__(self, folder: Path, is_live: bool = True) -> None:
        self._folder = folder.absolute()
        self.problem = ""
        """Reason why the index is incomplete; empty: none."""
        self.is_complete = False
        """True once every file of completions is indexed."""
        self.count = 0
        """Number of indexed completions, without those of files that are gone."""
        self._files: IndexFiles | None = None
        self._state = _State()
        self._places: dict[str, int] = {}  # stem of a file -> its place in the journal
        self._gone: set[int] = set()  # places in the journal
        self._prompts: dict[int, int] = {}  # hash of a prompt -> its place
        self._unreadable: dict[str, _Stamp] = {}
        self._listed = 0
        self._results: dict[Any, Places] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="completion-index", daemon=True)
        if is_live:
            self._thread.start()

    @property
    def index_s(self) -> float:
        """Seconds that the building has taken, in this process and before."""
        return 0.0 if self._files is None else round(self._files.sizes.seconds, 2)

    def close(self) -> None:
        """Stop the building, and close the files."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            self._state = _State()
            if self._files is not None:
                self._files.close()

    def refresh(self) -> None:
        """Index the files that are new, and forget those that are gone.

        Raises:
            OSError: the index cannot be written; it keeps what it has.
        """
        changed = _changed(self._folder / FOLDER)
        if changed and changed == self._listed:
            return
        there = _list(self._folder / FOLDER)
        files = self._files or self._open(there)
        for stem, place in list(self._places.items()):
            if there.get(stem) != _stamp(files.entries[place]):
                self._gone.add(place)
                del self._places[stem]
        self._publish(files)
        for stem in sorted(there.keys() - self._places.keys(), key=_order):
            if self._stop.is_set():
                return
            if self._unreadable.get(stem) != there[stem]:
                self._add(files, stem, there[stem])
        is_settled = time.time() - changed / 1e9 > 2 * LOOK_SECONDS  # else a later file may have the same time
        self._listed = changed if is_settled else 0
        broken = sorted(self._unreadable.keys() & there.keys())
        what = f"{pluralize(len(broken), 'file')} of completions cannot be read, such as"
        self.problem = f"{what} {broken[0]}.parquet" if broken else ""
        self.is_complete = True

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
            rows and counts; with `prompt` also ``history``, step and reward of all completions that match.

        Raises:
            ConfigError: there is no such order.
        """
        if order not in ORDERS:
            raise ConfigError("no such order", "order", given=order, allowed=", ".join(ORDERS))
        window = slice(max(0, offset), max(0, offset) + min(max(0, limit), MOST_ROWS))
        with self._lock:
            matches = self._matches(_Query(text, reward_min, reward_max, step_min, step_max, prompt), order)
            if group_by_prompt:
                total, rows = self._by_prompt(matches, order, window)
            else:
                total, rows = len(matches), read_rows(self._folder, self._ids(matches[window]))
            history = None if prompt is None else self._rewards(matches)
        return {
            "total": total,
            "is_indexed": self.is_complete,
            "index_s": self.index_s,
            "count": self.count,
            "message": self.problem,
            "rows": rows,
            "history": history,
        }

    def _follow(self) -> None:
        """Keep the index up to date until `close`."""
        pause = _BEGIN_SECONDS
        while not self._stop.wait(pause):
            pause = LOOK_SECONDS
            try:
                self.refresh()
            except OSError as error:
                path = Path(error.filename or self._folder / FOLDER)
                self.problem = f"not all completions can be searched: {write_error_message(error, path)}"
                self.is_complete, pause = False, RETRY_SECONDS

    def _open(self, there: Mapping[str, _Stamp]) -> IndexFiles:
        """Open the index, and empty it if most of its content is of files that are gone."""
        files = IndexFiles(self._folder)
        remaining = sum(
            _rows(files, place)
            for place, entry in enumerate(files.entries)
            if there.get(entry.stem) == _stamp(entry)
        )
        if 2 * remaining < files.sizes.rows:
            files.clear()
        self._places = {entry.stem: place for place, entry in enumerate(files.entries)}
        self._gone = set(range(len(files.entries))) - set(self._places.values())
        self._remember_prompts(files)
        self._files = files
        return files

    def _remember_prompts(self, files: IndexFiles) -> None:
        digests = files.column("prompt_digest", files.sizes.prompts).tolist()
        self._prompts = {digest: place for place, digest in enumerate(digests)}

    def _publish(self, files: IndexFiles) -> None:
        """Let searches see what the index holds."""
        with self._lock:
            self._state = _State(files.sizes.rows, files.sizes.prompts, tuple(sorted(self._gone)))
            self.count = files.sizes.rows - sum(_rows(files, place) for place in self._gone)

    def _add(self, files: IndexFiles, stem: str, stamp: _Stamp) -> None:
        """Index a file of completions."""
        began, before = time.perf_counter(), files.sizes
        place, rows, text, prompt_text = len(files.entries), 0, before.text, before.prompt_text
        try:
            for batch in _batches(self._folder / FOLDER / f"{stem}.parquet"):
                contents = self._columns(batch, place, rows, text, prompt_text)
                files.append(contents)
                rows, text = rows + len(batch), text + len(contents[TEXT])
                prompt_text += len(contents[PROMPTS])
            seconds = before.seconds + time.perf_counter() - began
            files.commit(
                Entry(stem, *stamp, before.rows + rows, len(self._prompts), text, prompt_text, seconds)
            )
        except Exception as error:  # such as texts that are missing, or numbers that are texts
            files.undo()
            self._remember_prompts(files)
            if isinstance(error, OSError):
                raise
            logger.debug("%s.parquet cannot be read: %s", stem, error)
            self._unreadable[stem] = stamp
            return
        self._unreadable.pop(stem, None)
        self._places[stem] = place
        self._publish(files)

    def _columns(
        self, batch: pyarrow.RecordBatch, place: int, row: int, text: int, prompt_text: int
    ) -> dict[str, Any]:
        """Return the columns and texts of a part of a file for the index.

        Args:
            place: the file's place in the journal.
            row: row of the file at which the part begins.
            text: bytes of the texts before it.
            prompt_text: bytes of the prompts before it.
        """
        import numpy as np

        prompts = batch.column("prompt").dictionary_encode()
        places, digests, new = [], [], []
        for number, prompt in enumerate(prompts.dictionary.to_pylist()):
            digest = int(prompt_id(prompt), 16)
            if digest not in self._prompts:
                self._prompts[digest] = len(self._prompts)
                digests.append(digest)
                new.append(number)
            places.append(self._prompts[digest])
        texts, ends = lower(batch.column("completion"))
        new_prompts, prompt_ends = lower(prompts.dictionary.take(integers(new)))
        return {
            TEXT: texts,
            PROMPTS: new_prompts,
            "file": np.full(len(batch), place, "i4"),
            "row": np.arange(row, row + len(batch), dtype="i4"),
            "step": numbers(batch.column("step"), "i4"),
            "prompt": np.array(places, "i4")[numbers(prompts.indices, "i4")],
            "reward": numbers(batch.column("reward"), "f8"),
            "end": ends + text,
            "prompt_digest": np.array(digests, "u8"),
            "prompt_end": prompt_ends + prompt_text,
        }

    def _column(self, name: str) -> NDArray[Any]:
        import numpy as np

        count = self._state.prompts if name.startswith("prompt_") else self._state.rows
        return np.empty(0, "i4") if self._files is None else self._files.column(name, count)

    def _matches(self, query: _Query, order: str) -> Places:
        """Return the places of the completions that a query finds, in order; the last results are kept."""
        key = (self._state, query, order)
        if key not in self._results:
            while len(self._results) >= MOST_RESULTS:
                del self._results[next(iter(self._results))]
            self._results[key] = self._sorted(self._find(query), order)
        return self._results[key]

    def _find(self, query: _Query) -> Places:
        import numpy as np

        mask = np.ones(self._state.rows, bool)
        if self._state.gone:
            mask &= ~np.isin(self._column("file"), self._state.gone)
        for name, low, high in (
            ("step", query.step_min, query.step_max),
            ("reward", query.reward_min, query.reward_max),
        ):
            if low is not None:
                mask &= self._column(name) >= low
            if high is not None:
                mask &= self._column(name) <= high
        if query.prompt is not None:
            mask &= self._column("prompt") == self._place_of(query.prompt)
        if query.text and self._files is not None:
            mask = self._containing(self._files, query.text, mask)
        return np.flatnonzero(mask).astype("i4")

    def _place_of(self, prompt: str) -> int:
        """Return the place of a prompt by its id; -1 if there is none."""
        try:
            return self._prompts.get(int(prompt, 16), -1)
        except ValueError:
            return -1

    def _containing(self, files: IndexFiles, text: str, among: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which completions contain a text, in themselves or in their prompts."""
        import numpy as np

        needle = lower_text(text)
        ends = self._column("prompt_end")
        prompts = scan(
            lambda start, stop: files.text(PROMPTS, start, stop), ends, np.ones(len(ends), bool), needle
        )
        in_prompt: NDArray[np.bool_] = among & prompts[self._column("prompt")]
        rest = among & ~in_prompt
        in_prompt |= scan(lambda start, stop: files.text(TEXT, start, stop), self._column("end"), rest, needle)
        return in_prompt

    def _sorted(self, places: Places, order: str) -> Places:
        return places[_order_of(self._column(order.removeprefix("-"))[places], order)]

    def _rewards(self, places: Places) -> list[list[Any]]:
        """Return step and reward of completions."""
        return [
            self._column("step")[places].tolist(),
            [finite(reward) for reward in self._column("reward")[places].tolist()],
        ]

    def _ids(self, places: Places) -> list[str]:
        assert self._files is not None or not len(places)
        files, rows = self._column("file")[places].tolist(), self._column("row")[places].tolist()
        entries = [] if self._files is None else self._files.entries
        return [id_of(entries[file].stem, row) for file, row in zip(files, rows, strict=True)]

    def _by_prompt(self, matches: Places, order: str, window: slice) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of prompts among completions, and the rows of some prompts."""
        import numpy as np

        if not len(matches):
            return 0, []
        prompts, steps = self._column("prompt")[matches], self._column("step")[matches]
        by_prompt = np.lexsort((steps, prompts))
        matches, prompts, steps = matches[by_prompt], prompts[by_prompt], steps[by_prompt]
        rewards = self._column("reward")[matches]
        starts = np.flatnonzero(np.append(True, prompts[1:] != prompts[:-1]))
        counts = np.diff(np.append(starts, len(matches)))
        first, last = steps[starts], steps[starts + counts - 1]
        at_first, at_last = (
            _means(rewards, steps == np.repeat(each, counts), starts) for each in (first, last)
        )
        values = first if order.endswith("step") else at_last
        shown = _order_of(values, order)[window]
        ids = self._ids(matches[starts[shown]])
        samples = {each["id"]: each for each in read_rows(self._folder, ids)}
        rows = []
        for place, sample in zip(shown, ids, strict=True):
            if sample in samples:
                rows.append(
                    {name: samples[sample][name] for name in ("prompt_id", "prompt", "data")}
                    | {
                        "count": int(counts[place]),
                        "first_step": int(first[place]),
                        "last_step": int(last[place]),
                    }
                    | {
                        "reward_first": finite(float(at_first[place])),
                        "reward_last": finite(float(at_last[place])),
                    }
                )
        return len(starts), rows


def _order_of(values: NDArray[Any], order: str) -> Places:
    """Return the places of values in one of `ORDERS`; NaN is always last."""
    import numpy as np

    return np.argsort(-values if order in ("-step", "reward") else values, kind="stable")


def _means(rewards: NDArray[np.float64], among: NDArray[np.bool_], starts: Places) -> NDArray[np.float64]:
    """Return the mean reward of each prompt among some of its completions; NaN where none has a reward."""
    import numpy as np

    counted = among & np.isfinite(rewards)
    sums = np.add.reduceat(np.where(counted, rewards, 0.0), starts)
    numbers = np.add.reduceat(counted.astype("i4"), starts)
    means: NDArray[np.float64] = np.divide(sums, numbers, out=np.full(len(starts), np.nan), where=numbers > 0)
    return means


def _stamp(entry: Entry) -> _Stamp:
    return _Stamp(entry.mtime_ns, entry.size)


def _rows(files: IndexFiles, place: int) -> int:
    """Return the number of completions of a file in the journal."""
    return files.entries[place].rows - (files.entries[place - 1].rows if place else 0)


def _changed(folder: Path) -> int:
    """Return the time at which files of a folder were added or removed, in nanoseconds; 0: it is missing."""
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _list(folder: Path) -> dict[str, _Stamp]:
    """Return the files of completions that are there."""
    stamps = {}
    for path in folder.glob("step_*.parquet"):
        if FILE.fullmatch(path.stem):
            try:
                stat = path.stat()
            except FileNotFoundError:  # a resumed run has removed it
                continue
            stamps[path.stem] = _Stamp(stat.st_mtime_ns, stat.st_size)
    return stamps


def _order(stem: str) -> tuple[int, int]:
    """Return step and batch: names stop sorting at a million steps."""
    match = FILE.fullmatch(stem)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    """Yield parts of a file of completions; raises _Unreadable if it is none, or is gone."""
    import pyarrow
    from pyarrow import parquet

    try:
        with open_regular(path) as source, parquet.ParquetFile(source) as file:
            if missing := set(_SHOWN) - set(file.schema_arrow.names):
                raise _Unreadable(f"it has no column {', '.join(sorted(missing))}")
            yield from file.iter_batches(BATCH_ROWS, columns=list(_NEEDED), use_threads=False)
    except (OSError, pyarrow.ArrowException) as error:
        raise _Unreadable(text_of(error)) from error
