"""Variables are put back: those that were set, those that were not, and after an error."""

from __future__ import annotations

import os

import pytest

from grpox.runtime.setup import preserve_env


def test_variables_are_afterwards_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPOX_TEST_SET", "one")
    monkeypatch.setenv("GRPOX_TEST_GONE", "here")
    monkeypatch.delenv("GRPOX_TEST_NEW", raising=False)

    def change() -> None:
        with preserve_env("GRPOX_TEST_SET", "GRPOX_TEST_GONE", "GRPOX_TEST_NEW"):
            os.environ |= {"GRPOX_TEST_SET": "two", "GRPOX_TEST_NEW": "new"}
            del os.environ["GRPOX_TEST_GONE"]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        change()
    assert (os.environ["GRPOX_TEST_SET"], os.environ["GRPOX_TEST_GONE"]) == ("one", "here")
    assert "GRPOX_TEST_NEW" not in os.environ
