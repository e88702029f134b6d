"""Contract of every dataset component: prompts and columns, the same in each process.

from grpox.testing import DatasetConformance

class TestMine(DatasetConformance):
    component = "mine"
    prompt_column = "prompt"
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

from grpox.data.unusable_columns import REWARD_ARGUMENTS
from grpox.errors import RunFailed
from grpox.plugins.component_state import odd_part
from grpox.plugins.registry import Mention, bind, installed
from grpox.runtime.foreign_code import call
from grpox.testing.conformance import Conformance, Violation, require

ROWS = 200
"""Rows that are looked at, the first of the dataset."""
IN_ANOTHER_PROCESS = (
    "import sys, json; from grpox.testing.datasets import digest_of; print(digest_of(json.loads(sys.argv[1])))"
)


class DatasetConformance(Conformance):
    """The checks of a dataset component."""

    kind = "dataset"
    prompt_column: ClassVar[str] = "prompt"
    """As `data.prompt_column` of a run file."""

    def test_runs(self) -> None:
        """Loads a datasets.Dataset or IterableDataset that has rows and the prompt column."""
        rows = _rows_of(self.build())
        require(bool(rows), "it loads no row")
        column, columns = self.prompt_column, list(rows[0])
        advice = "name its column in the suite's `prompt_column`, as in data.prompt_column of a run file"
        require(column in columns, f"it has no column '{column}' but {', '.join(columns)}", advice=advice)
        others = ", ".join(name for name in columns if name != column) or "none"
        self.notes.append(f"{len(rows)} rows read; columns beside the prompt: {others}")

    def test_prompts(self) -> None:
        """Every prompt is a text that is not empty, or messages with role and content, alike in all rows."""
        sorts = set()
        for place, row in enumerate(_rows_of(self.build())):
            prompt = row.get(self.prompt_column)
            example = f"row {place}: {prompt!r:.100}"
            is_text = isinstance(prompt, str) and prompt != ""
            require(is_text or _is_conversation(prompt), "a prompt is neither text nor messages", example)
            sorts.add(type(prompt).__name__)
            require(len(sorts) == 1, f"prompts are of {' and '.join(sorted(sorts))}", example)

    def test_columns(self) -> None:
        """Columns are the same in all rows, of plain values, and none has the name of a reward's argument."""
        rows = _rows_of(self.build())
        for place, row in enumerate(rows):
            require(row.keys() == rows[0].keys(), f"row {place} has columns {sorted(row)}", sorted(rows[0]))
            for name, value in row.items():
                what = f"column '{name}' has a {type(value).__name__}"
                advice = "rewards get numbers, texts, None, and lists and dicts of these"
                require(odd_part(value, is_a=isinstance) is None, what, f"row {place}", advice)
        clashes = sorted({name for name in REWARD_ARGUMENTS if name in rows[0] and name != self.prompt_column})
        what = f"column '{clashes[0] if clashes else ''}' has the name of an argument that rewards are given"
        require(not clashes, what, advice="rename it")

    def test_same_rows(self) -> None:
        """Loads the same rows a second time, and reads them a second time."""
        source = self.build()
        first, second, other = _rows_of(source), _rows_of(source), _rows_of(self.build())
        advice = "seed what is drawn at random, and keep no iterator from one call to the next"
        for what, rows in (("loaded again", second), ("built and loaded again", other)):
            place = next((n for n, (a, b) in enumerate(zip(first, rows, strict=False)) if a != b), None)
            same = place is None and len(first) == len(rows)
            example = f"{len(first)} rows, then {len(rows)}"
            if place is not None:
                example = f"row {place}: {first[place]!r:.100}\nthen   {rows[place]!r:.100}"
            require(same, f"{what}, it has other rows", example, advice)

    def test_other_process(self) -> None:
        """Loads the same rows in another process, as a second rank of a run does."""
        mention = json.dumps(self.component if isinstance(self.component, str) else dict(self.component))
        variables = {**os.environ, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "PYTHONHASHSEED": "77"}
        command = [sys.executable, "-c", IN_ANOTHER_PROCESS, mention]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
        last = (done.stderr.strip().splitlines() or [""])[-1]
        require(done.returncode == 0, f"on rank 1 it fails: {last}")
        same = done.stdout.splitlines()[-1:] == [digest_of(self.component)]
        advice = (
            "its rows depend on the process: on hash(), a set's order, the time, or a seed that is not fixed"
        )
        require(same, "on rank 1 it has other rows than on rank 0", advice=advice)


def digest_of(mention: Mention) -> str:
    """Hash the first rows of a dataset component."""
    rows = _rows_of(installed().build(bind("dataset", mention)))
    return hashlib.sha256(repr([sorted(row.items()) for row in rows]).encode()).hexdigest()


def _rows_of(source: Any) -> list[Mapping[str, Any]]:
    """Load the dataset and read its first rows."""
    import datasets

    try:
        loaded = call("dataset", source.load)
    except RunFailed as error:
        raise Violation(str(error)) from error
    is_dataset = isinstance(loaded, datasets.Dataset | datasets.IterableDataset)
    what = f"load() returned a {type(loaded).__name__}"
    advice = "return a datasets.Dataset, such as Dataset.from_list(rows), or an IterableDataset"
    require(is_dataset, what, advice=advice)
    try:
        return [dict(row) for row in islice(loaded, ROWS)]
    except Exception as error:
        raise Violation(f"reading a row raises {type(error).__name__}: {error}") from error


def _is_conversation(prompt: Any) -> bool:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    return is_list and all(isinstance(each, Mapping) and {"role", "content"} <= each.keys() for each in prompt)
