"""Components that have passed `grpox plugins check` on this machine, and those of a run that have not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpox.plugins.registry import bind
from grpox.runfile.checked import checks_file, record_pass, unchecked_message
from grpox.runfile.load import load_run

LOSS = """
from grpox.contracts import Reduction

class Mine:
    reduction = Reduction.TOKEN_MEAN

    def per_token(self, inputs):
        raise NotImplementedError
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "mine.py"
    path.write_text(LOSS)
    return path


def message(path: Path) -> str:
    return unchecked_message(load_run("quickstart", [f"loss={{path: '{path}:Mine'}}"]))


def test_a_run_of_built_ins_is_silent(mine: Path) -> None:
    assert unchecked_message(load_run("quickstart", [])) == ""
    assert record_pass(bind("loss", "dapo")) == ""
    assert not checks_file().exists()


def test_a_component_is_named_with_the_command_until_it_passes(mine: Path) -> None:
    text = message(mine)
    assert text.startswith("loss 'Mine' has not passed the check of its kind here: ")
    assert text.endswith(f"grpox plugins check {mine}:Mine")
    assert record_pass(bind("loss", {"path": f"{mine}:Mine"})) == ""
    assert message(mine) == ""


def test_a_function_of_two_rewards_is_named_once(mine: Path) -> None:
    mine.write_text("def constant(completions, **columns):\n    return [1.0] * len(completions)\n")
    reward = f"{{path: '{mine}:constant'}}"
    text = unchecked_message(load_run("quickstart", [f"rewards=[{reward}, {reward}]", "evaluation=null"]))
    assert (
        text
        == f"reward 'constant' has not passed the check of its kind here: grpox plugins check {mine}:constant"
    )


def test_a_component_that_has_changed_is_named_again(mine: Path) -> None:
    record_pass(bind("loss", {"path": f"{mine}:Mine"}))
    mine.write_text(LOSS + "\n# another\n")
    assert message(mine).startswith("loss 'Mine' (changed since) has not passed")


def test_the_record_says_when_and_which_code(mine: Path) -> None:
    record_pass(bind("loss", {"path": f"{mine}:Mine"}))
    [(name, passed)] = json.loads(checks_file().read_text()).items()
    assert name == f"loss/{mine}:Mine"
    assert set(passed) == {"version", "sha256", "time"}


def test_a_record_that_cannot_be_written_is_reported_and_harms_nothing(mine: Path) -> None:
    checks_file().parent.parent.write_text("a file in the place of the cache folder")
    assert str(checks_file()) in record_pass(bind("loss", {"path": f"{mine}:Mine"}))
    assert message(mine) != ""


@pytest.mark.parametrize("content", ["", "[]", "{", '{"loss": 1}'])
def test_a_damaged_record_counts_as_none(mine: Path, content: str) -> None:
    checks_file().parent.mkdir(parents=True)
    checks_file().write_text(content)
    assert message(mine) != ""
    assert record_pass(bind("loss", {"path": f"{mine}:Mine"})) == ""
    assert message(mine) == ""


def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checks_file() == tmp_path / ".cache" / "grpox" / "checks.json"
