"""Facts about the tokens of some completions of a run, as parquet files: written by a run, read by its page.

``tokens/step_000003.parquet`` has a row for each completion whose tokens step 3 trained on for the first time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpox.observing.record_files import finite, read_parquet
from grpox.runtime.files import atomic_path

if TYPE_CHECKING:
    import pyarrow
    from transformers import PreTrainedTokenizerBase

    from grpox.update.token_metrics import TokenFacts

FOLDER = "tokens"
KEY = ("step", "part", "group", "sample")
"""Columns that find a completion: those of `CompletionKey`."""
CompletionKey = tuple[int, int, int, int]
"""Step and part in the name of the completion's file, ``completions/step_<step>_<part>.parquet`` (part 1 has no
number), group and sample."""
NUMBERS = ("logprob", "policy_logprob", "ratio", "advantage", "entropy", "correction")
FACTS = (
    *("ids", "record.turns", "is_scored", "is_counted"),
    *("sampler_logprob", "advantage", "logprob", "ratio", "entropy", "correction"),
)
"""Attributes of `TokenFacts` with an entry for each token."""
MOST_FILES = 4096
"""Number of files whose keys are kept."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Text of a character's bytes while some are missing."""
LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, so the most tokens that one can be split over."""
SLACK = 8
"""Characters by which a token's text may lie further on than the end of the last one, such as a lost space."""


def token_file(folder: Path, step: int) -> Path:
    """Return the file of the optimizer step `step` of the run in `folder`."""
    return folder / FOLDER / f"step_{step:06d}.parquet"


def step_of(path: Path) -> int:
    """Return the step in the name of a file of tokens or completions."""
    return int(path.stem.split("_")[1])


def write_tokens(path: Path, completions: Sequence[TokenFacts], texts: TokenTexts) -> None:
    """Write the tokens of `completions` as parquet, whole or not at all.

    Columns: step, part, group, sample, and lists with an entry for each token: id, text, special (the name of a
    special token), logprob (the generator's), policy_logprob, ratio, advantage, entropy, correction, mask (1
    where the policy loss counts the token), turn (null for an observation). Numbers that were not computed are
    null.

    Raises:
        OSError: it cannot be written.
    """
    import pyarrow
    from pyarrow import parquet

    key = attrgetter(*(f"record.{name}" for name in KEY))
    rows = sorted(completions, key=key)
    keys = np.array([*map(key, rows)], dtype=np.int64).reshape(-1, len(KEY))
    columns = {name: pyarrow.array(keys[:, place]) for place, name in enumerate(KEY)}
    facts = {name: np.concatenate([*map(attrgetter(name), rows)]) for name in FACTS}
    turns, sampler, is_scored = facts["record.turns"], facts["sampler_logprob"], facts["is_scored"]
    is_written = turns >= 0
    ids = [each.ids.tolist() for each in rows]
    specials = [texts.special(token) for each in ids for token in each]
    values: dict[str, pyarrow.Array] = {
        "id": pyarrow.array(facts["ids"]),
        "text": pyarrow.array([text for each in ids for text in texts.of(each)], pyarrow.string()),
        "special": pyarrow.array(specials, pyarrow.string()),
        "logprob": pyarrow.array(sampler, mask=~is_written | np.isnan(sampler)),
        "policy_logprob": pyarrow.array(facts["logprob"], mask=~is_scored),
        "ratio": pyarrow.array(facts["ratio"], mask=~is_scored),
        "advantage": pyarrow.array(facts["advantage"], mask=~is_written),
        "entropy": pyarrow.array(facts["entropy"], mask=~is_scored),
        "correction": pyarrow.array(facts["correction"], mask=~is_scored),
        "mask": pyarrow.array(facts["is_counted"].astype(np.int8)),
        "turn": pyarrow.array(turns, mask=~is_written),
    }
    ends = np.cumsum([0, *map(len, ids)], dtype=np.int32)
    columns |= {name: pyarrow.ListArray.from_arrays(ends, flat) for name, flat in values.items()}
    table = pyarrow.table(columns)
    # Into memory, and without what nobody reads: half the time for a file as small as this.
    buffer = pyarrow.BufferOutputStream()
    options = {"use_dictionary": False, "write_statistics": False, "store_schema": False}
    with parquet.ParquetWriter(buffer, table.schema, **options) as writer:
        writer.write_table(table)
    with atomic_path(path) as unfinished:
        unfinished.write_bytes(buffer.getvalue())


def read_tokens(folder: Path, step: int, group: int, sample: int, part: int = 1) -> list[dict[str, Any]]:
    """Read the tokens of one completion of the run in `folder`, in their order.

    Args:
        step: step in the name of the completion's file, its column ``step``.
        part: number after the step in that name; 1 if there is none.

    Returns:
        a dict for each token: text, id, logprob (the generator's), policy_logprob, ratio, advantage, entropy,
        correction, mask (0 or 1), turn, kind (``model`` or ``observation``), special. Numbers are None where
        they were not computed or are not finite. Empty if the tokens of this completion are not recorded.

    Raises:
        OSError: a file cannot be read, or is no parquet file (`pyarrow.ArrowInvalid` is a ValueError).
    """
    place = _find(folder, (step, part, group, sample))
    if place is None:
        return []
    path, row = place
    try:
        values = _read(path).slice(row, 1).to_pylist()[0]
        names = [name for name in values if name not in KEY]
        columns = zip(*(map(finite, values[name] or ()) for name in names), strict=True)
        tokens: list[dict[str, Any]] = [dict(zip(names, each, strict=True)) for each in columns]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return [{**each, "kind": "observation" if each["turn"] is None else "model"} for each in tokens]


def has_tokens(folder: Path, step: int, group: int, sample: int, part: int = 1) -> bool:
    """Return True if `read_tokens` finds tokens; False too where a file is damaged or gone."""
    try:
        return _find(folder, (step, part, group, sample)) is not None
    except (OSError, ValueError):
        return False


def _find(folder: Path, wanted: CompletionKey) -> tuple[Path, int] | None:
    """Return the file with the tokens of a completion, and the row."""
    if not (folder / FOLDER).is_dir():
        return None
    steps = _steps(folder / FOLDER, (folder / FOLDER).stat().st_mtime_ns)
    for step in steps[bisect_left(steps, wanted[0]) :]:
        path = token_file(folder, step)
        rows = _rows(path, path.stat().st_mtime_ns)
        if wanted in rows:
            return path, rows[wanted]
        if rows and min(rows)[0] > wanted[0]:  # later steps train on later generation batches
            return None
    return None


@lru_cache
def _steps(folder: Path, mtime_ns: int) -> list[int]:
    """Return the steps that have a file; a folder's time changes with each new one."""
    return sorted(step_of(path) for path in folder.glob("step_*.parquet") if path.stem[5:].isdecimal())


@lru_cache(MOST_FILES)
def _rows(path: Path, mtime_ns: int) -> dict[CompletionKey, int]:
    """Return key -> row of the completions in a file; a resumed run writes another one of the same name."""
    table = _read(path, KEY)
    keys = zip(*(table[name].to_pylist() for name in KEY), strict=True)
    return {key: row for row, key in enumerate(keys)}


def _read(path: Path, columns: Sequence[str] | None = None) -> pyarrow.Table:
    from pyarrow import list_, type_for_alias

    keys = dict.fromkeys(KEY, "int64")
    if columns is not None:
        return read_parquet(path, keys, columns=columns)
    lists = {"string": ("text", "special"), "float64": NUMBERS, "int64": ("id", "mask", "turn")}
    types = {name: list_(type_for_alias(kind)) for kind, names in lists.items() for name in names}
    return read_parquet(path, {**keys, "text": types["text"], "turn": types["turn"]}, types)


class TokenTexts:
    """Splits the text of completions into that of their tokens; special tokens have an empty one.

    Tokenizers decode whole sequences. A character can be split over several tokens, and a decoder can write a
    token otherwise at the beginning than behind another one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._special |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._before: list[int] = tokenizer.encode("a", add_special_tokens=False)[-1:]
        """A plain token, behind which any other is written as within a text."""
        self._behind: dict[int, str] = {}
        """Text of each token seen so far, behind another one."""

    def of(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token; together they are the completion's text without special tokens.

        A character that is split over several tokens is the text of the last of them. A decoder that writes a
        text otherwise than token by token leaves what does not fit to the tokens that follow.
        """
        if not ids:
            return []
        whole = self._decode(ids)
        texts = [self._decode(ids[:1]), *map(self._text_behind, ids[1:])]
        return texts if "".join(texts) == whole else _aligned(self._streamed(ids), whole)

    def special(self, token: int) -> str | None:
        """Return the name of a special token, such as ``<|im_end|>``; None for any other."""
        return str(self._tokenizer.convert_ids_to_tokens(token)) if token in self._special else None

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _text_behind(self, token: int) -> str:
        if token not in self._behind:
            before = len(self._decode(self._before))
            self._behind[token] = self._decode([*self._before, token])[before:]
        return self._behind[token]

    def _streamed(self, ids: Sequence[int]) -> list[str]:
        """Decode token by token, each behind the last ones, and wait for the end of a character."""
        texts, begin, end = [], 0, 0  # ids[begin:end]: the tokens before, whose text is complete
        for place in range(len(ids)):
            before, now = self._decode(ids[begin:end]), self._decode(ids[begin : place + 1])
            if now.endswith(UNFINISHED) and place + 1 - end < LONGEST_CHARACTER:
                texts.append("")
                continue
            texts.append(now[len(before) :])
            begin, end = end, place + 1
        return texts


def _aligned(texts: Sequence[str], whole: str) -> list[str]:
    """Find each text in `whole`, in order, and cut `whole` behind it; the last one takes the rest."""
    cut, end = [], 0
    for text in texts:
        place = whole.find(text, end, end + len(text) + SLACK) if text else -1
        begin, end = end, place + len(text) if place >= 0 else end
        cut.append(whole[begin:end])
    cut[-1] += whole[end:]
    return cut
