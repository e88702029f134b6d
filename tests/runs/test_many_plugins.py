"""30 plugins more: one is broken, one imports torch, one sleeps; nobody who selects none of them notices."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

MAKE = Path(__file__).parents[2] / "benchmarks" / "plugins_list.py"
ONE_STEP = ("train.max_steps=1", "evaluation=null", "tracking={}", "train.warmup_steps=0")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder with the 30 distributions, for PYTHONPATH."""
    made = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, str(MAKE), "--make", str(made)], check=True)
    return made


@pytest.fixture(autouse=True)
def listed(site, grpox, monkeypatch):
    """The rows of `grpox plugins list`; before each test every plugin was asked and left its answer."""
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    rows = rows_of(grpox)
    forget_imports(site)
    return rows


def rows_of(grpox):
    done = grpox("plugins", "list", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def forget_imports(site):
    for note in site.glob("*/imported"):
        note.unlink()


def imported(site):
    return {note.parent.name for note in site.glob("*/imported")}


def test_a_list_imports_all_of_them_the_first_time_and_none_afterwards(
    site, grpox, listed, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("GRPOX_CACHE_DIR", str(tmp_path))
    cold = rows_of(grpox)
    assert len(imported(site)) == 30
    forget_imports(site)
    started = time.perf_counter()
    warm = rows_of(grpox)
    with capsys.disabled():
        print(f" [plugins list with 30 more: {time.perf_counter() - started:.2f} s]", end="")
    assert imported(site) == set()
    assert warm == cold == listed


def test_29_offer_their_loss_and_the_broken_one_is_a_row_with_its_reason(listed):
    many = [row for row in listed if row["distribution"].startswith("grpox-many-")]
    assert sorted(row["kind"] for row in many) == ["loss"] * 29 + ["plugin"]
    (broken,) = (row for row in many if row["kind"] == "plugin")
    assert (broken["distribution"], broken["status"]) == ("grpox-many-broken", "broken")
    assert broken["reason"] == "ModuleNotFoundError: No module named 'no_such_library_anywhere'"


def test_selecting_the_broken_one_exits_2_with_the_original_error(site, grpox):
    done = grpox("validate", "quickstart", "loss=grpox-many-broken:many-broken")
    assert done.returncode == 2
    (told,) = (line for line in done.stderr.splitlines() if "may offer it, but it is broken" in line)
    assert "plugin 'plugin' of grpox-many-broken 1.0" in told
    assert "ModuleNotFoundError: No module named 'no_such_library_anywhere'" in told
    assert imported(site) == {"grpox_many_broken"}


def test_a_name_that_nobody_offers_asks_none_but_the_broken_one(site, grpox):
    done = grpox("validate", "quickstart", "loss=many-33")
    assert done.returncode == 2
    assert "no loss called 'many-33' is installed" in done.stderr
    assert imported(site) == {"grpox_many_broken"}


@pytest.mark.slow
def test_a_run_with_a_loss_of_one_imports_none_but_that(site, grpox, folder):
    done = grpox("train", "quickstart", *ONE_STEP, "loss=many-7", "output_dir=runs/many")
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "runs" / "many" / "summary.json").read_text())
    assert imported(site) == {"grpox_many_7"}


def test_a_run_with_a_built_in_loss_imports_none(site, grpox):
    done = grpox("validate", "quickstart", "loss=dapo")
    assert done.returncode == 0, done.stderr
    assert imported(site) == set()


def test_a_plugin_that_changes_is_imported_and_no_other(site, grpox, listed, tmp_path, monkeypatch):
    copy = tmp_path / "site"
    shutil.copytree(site, copy)
    monkeypatch.setenv("PYTHONPATH", str(copy))
    rows_of(grpox)
    forget_imports(copy)
    plugin = copy / "grpox_many_8" / "plugin.py"
    plugin.write_text(plugin.read_text().replace("many-8", "many-eight"))
    changed = {row["name"] for row in rows_of(grpox)} - {row["name"] for row in listed}
    assert changed == {"many-eight"}
    assert imported(copy) == {"grpox_many_8"}
