"""JSON of the record, as parsers read it that know no NaN."""

from __future__ import annotations

import json
import math

import pytest

from grpox.observing.record_files import as_json
from grpox.runtime.files import as_strict_json


def test_numbers_that_json_lacks_are_texts_at_every_depth() -> None:
    value = {"accuracy": math.nan, "alarms": [{"value": math.inf}], "pair": (-math.inf, 1.5), "steps": 3}
    expected = {"accuracy": "nan", "alarms": [{"value": "inf"}], "pair": ["-inf", 1.5], "steps": 3}
    for text in (as_strict_json(value), as_json(value)):  # of the record, and of the table of completions
        assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == expected
