"""30 plugins more: one is broken, one imports torch, one sleeps; nobody who selects none of them notices."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.fixtures import GrpoxCommand

MAKE = Path(__file__).parents[2] / "benchmarks" / "plugins_list.py"
ONE_STEP = ("train.max_steps=1", "evaluation=null", "tracking={}", "train.warmup_steps=0")


class Listed(NamedTuple):
    """The first `grpox plugins list` of all, with a cache that was empty."""

    rows: list[dict[str, Any]]
    imported: set[str]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the 30 distributions, for PYTHONPATH."""
    made = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, str(MAKE), "--make", str(made)], check=True)
    return made


@pytest.fixture(scope="module")
def listed(site: Path, grpox: GrpoxCommand, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listed]:
    """Every plugin was asked once and left its answer in the cache of these tests."""
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("GRPOX_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield Listed(rows_of(grpox), imported(site))


@pytest.fixture(autouse=True)
def forgotten(site: Path, listed: Listed) -> None:
    """No plugin was imported since the test began."""
    forget_imports(site)


def rows_of(grpox: GrpoxCommand) -> list[dict[str, Any]]:
    done = grpox("plugins", "list", "--json")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def forget_imports(site: Path) -> None:
    for note in site.glob("*/imported"):
        note.unlink()


def imported(site: Path) -> set[str]:
    return {note.parent.name for note in site.glob("*/imported")}


def test_a_list_imports_all_of_them_the_first_time_and_none_afterwards(
    site: Path, grpox: GrpoxCommand, listed: Listed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(listed.imported) == 30
    started = time.perf_counter()
    warm = rows_of(grpox)
    with capsys.disabled():
        print(f" [plugins list with 30 more: {time.perf_counter() - started:.2f} s]", end="")
    assert imported(site) == set()
    assert warm == listed.rows


def test_29_offer_their_loss_and_the_broken_one_is_a_row_with_its_reason(listed: Listed) -> None:
    many = [row for row in listed.rows if row["distribution"].startswith("grpox-many-")]
    assert sorted(row["kind"] for row in many) == ["loss"] * 29 + ["plugin"]
    (broken,) = (row for row in many if row["kind"] == "plugin")
    assert (broken["distribution"], broken["status"]) == ("grpox-many-broken", "broken")
    assert broken["reason"] == "ModuleNotFoundError: No module named 'no_such_library_anywhere'"


def test_selecting_the_broken_one_exits_2_with_the_original_error(site: Path, grpox: GrpoxCommand) -> None:
    done = grpox("validate", "quickstart", "loss=grpox-many-broken:many-broken")
    assert done.returncode == 2
    (told,) = (line for line in done.stderr.splitlines() if "may offer it, but it is broken" in line)
    assert "plugin 'plugin' of grpox-many-broken 1.0" in told
    assert "ModuleNotFoundError: No module named 'no_such_library_anywhere'" in told
    assert imported(site) == {"grpox_many_broken"}


def test_a_name_that_nobody_offers_asks_none_but_the_broken_one(site: Path, grpox: GrpoxCommand) -> None:
    done = grpox("validate", "quickstart", "loss=many-33")
    assert done.returncode == 2
    assert "no loss called 'many-33' is installed" in done.stderr
    assert imported(site) == {"grpox_many_broken"}


def test_a_run_with_a_loss_of_one_imports_none_but_that(site: Path, grpox: GrpoxCommand, folder: Path) -> None:
    done = grpox("train", "quickstart", *ONE_STEP, "loss=many-7", "output_dir=runs/many")
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "runs" / "many" / "summary.json").read_text())
    assert imported(site) == {"grpox_many_7"}


def test_a_run_with_a_built_in_loss_imports_none(site: Path, grpox: GrpoxCommand) -> None:
    done = grpox("validate", "quickstart", "loss=dapo")
    assert done.returncode == 0, done.stderr
    assert imported(site) == set()


def test_a_plugin_that_changes_is_imported_and_no_other(
    site: Path, grpox: GrpoxCommand, listed: Listed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "site"
    shutil.copytree(site, copy, ignore=shutil.ignore_patterns("grpox_many_slow*", "grpox_many_heavy*"))
    monkeypatch.setenv("PYTHONPATH", str(copy))
    monkeypatch.setenv("GRPOX_CACHE_DIR", str(tmp_path / "cache"))
    rows_of(grpox)
    assert len(imported(copy)) == 28
    forget_imports(copy)
    plugin = copy / "grpox_many_8" / "plugin.py"
    plugin.write_text(plugin.read_text().replace("many-8", "many-eight"))
    changed = {row["name"] for row in rows_of(grpox)} - {row["name"] for row in listed.rows}
    assert changed == {"many-eight"}
    assert imported(copy) == {"grpox_many_8"}
