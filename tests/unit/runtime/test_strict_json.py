"""JSON of the record, as parsers read it that know no NaN."""

from __future__ import annotations

import json
import math

import pytest

from grpox.observing.record_files import as_json
from grpox.runtime.files import as_strict_json


def test_numbers_that_json_lacks_are_texts_at_every_depth() -> None:
    value = {"accuracy": math.nan, "alarms": [{"value": math.inf}], "pair": (-math.inf, 1.5), "steps": 3}
    read = json.loads(as_strict_json(value), parse_constant=lambda name: pytest.fail(name))
    expected = {"accuracy": "nan", "alarms": [{"value": "inf"}], "pair": ["-inf", 1.5], "steps": 3}
    assert read == expected


def test_json_in_the_table_of_completions_has_no_bare_nan() -> None:
    value = {"score": math.inf, "weights": [math.nan, 1.0]}
    assert as_json(value) == '{"score": "inf", "weights": ["nan", 1.0]}'
