"""What a plugin said is remembered for as long as it would say the same, and no longer."""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest

from grpox.errors import ConfigError
from grpox.plugins.cache import PluginCache, cache_file
from grpox.plugins.component import ComponentRef
from grpox.plugins.discovery import Offer, PluginRecord, PluginSet, discover
from grpox.plugins.fingerprint import Surroundings
from grpox.plugins.loader import load
from grpox.plugins.registry import Registry
from grpox.runfile.required_plugins import missing_plugins

LOSS = """
from grpox import ComponentSpec, hookimpl

@hookimpl
def grpox_losses():
    return [ComponentSpec({name!r}, "some.module:Loss", {extra})]
"""
WATCHES = "@hookimpl\ndef grpox_step_finished(step): ...\n"
NEEDS_LIBRARY = "import grpox_library\n"


def loss(name: str = "foo", extra: str = "") -> str:
    return LOSS.format(name=name, extra=extra)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of a cache that is empty."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("GRPOX_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def install(make_distribution):
    """As `make_distribution`, for a module that writes a line to `imports(folder)` when it is imported."""

    def make(name: str, source: str = "", **options) -> Path:
        return make_distribution(name, noting(source), **options)

    return make


def noting(source: str) -> str:
    return f"with open(__file__ + '.imports', 'a') as note:\n    note.write('x')\n{source}"


def imports(folder: Path) -> int:
    """How often the module was imported."""
    return sum(len(note.read_text()) for note in folder.rglob("*.imports"))


def found(fresh: bool = False) -> PluginSet:
    """What discovery finds in a process that has imported no third-party plugin yet."""
    for name in [name for name in sys.modules if name.startswith(("grpox_foo", "grpox_library"))]:
        del sys.modules[name]
    return discover(fresh=fresh)


def record(plugins: PluginSet, distribution: str = "grpox-foo") -> PluginRecord:
    return next(record for record in plugins.records if record.distribution == distribution)


def offers(plugins: PluginSet, distribution: str = "grpox-foo") -> list[Offer]:
    return [offer for offer in plugins.offers if offer.distribution == distribution]


def names(plugins: PluginSet) -> list[str]:
    return [offer.spec.name for offer in offers(plugins)]


# -- Remembered --------------------------------------------------------------------------------------------


def test_a_plugin_is_imported_once_and_offers_the_same_ever_after(install):
    extra = "config='a.b:C', summary='A sum', needs=('x', 'y'), provides=('z',), formula='f', source='s', api=1"
    folder = install("grpox-foo", loss("foo", extra))
    first, second = offers(found()), offers(found())
    assert imports(folder) == 1
    assert first == second
    assert second[0].spec.needs == ("x", "y")


def test_a_broken_plugin_is_imported_once_and_stays_a_record_with_its_reason(install):
    folder = install("grpox-foo", "raise ValueError('why')")
    first, second = record(found()), record(found())
    assert imports(folder) == 1
    assert (second.status, second.reason) == ("broken", "ValueError: why")
    assert first.error is not None
    assert second.error is None


def test_the_lifecycle_hooks_of_a_plugin_are_known_without_importing_it(install):
    folder = install("grpox-foo", loss() + WATCHES)
    found()
    plugins = found()
    assert record(plugins).observes == ("grpox_step_finished",)
    assert imports(folder) == 1


def test_a_run_imports_the_plugins_that_observe_it_and_no_others(install):
    watches, other = install("grpox-foo", loss() + WATCHES), install("grpox-foo-other", loss("other"))
    found()
    implementations = found().manager.hook.grpox_step_finished.get_hookimpls()
    assert "grpox-foo:plugin" in [implementation.plugin_name for implementation in implementations]
    assert (imports(watches), imports(other)) == (2, 1)


def test_a_disabled_plugin_is_neither_asked_nor_forgotten(install, monkeypatch):
    folder = install("grpox-foo", loss())
    found()
    monkeypatch.setenv("GRPOX_DISABLE_PLUGINS", "grpox-foo")
    assert record(found()).status == "disabled"
    monkeypatch.delenv("GRPOX_DISABLE_PLUGINS")
    assert names(found()) == ["foo"]
    assert imports(folder) == 1


def test_whether_a_requirement_is_met_is_not_remembered(install, make_distribution):
    folder = install("grpox-foo", loss(extra="requires=('grpox-dep>=2',)"))
    assert offers(found())[0].status == "unavailable"
    make_distribution("grpox-dep", "", version="2.0", entry_points={})
    assert offers(found())[0].status == "ok"
    assert imports(folder) == 1


# -- Asked again -------------------------------------------------------------------------------------------


def test_a_plugin_whose_module_changes_is_asked_again(install):
    folder = install("grpox-foo", loss())
    assert names(found()) == ["foo"]
    (folder / "grpox_foo.py").write_text(loss("other-name"))
    assert names(found()) == ["other-name"]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("regular", [True, False], ids=["with __init__", "without"])
def test_a_plugin_is_asked_again_when_a_module_beside_it_changes(make_distribution, depth, regular):
    packages = ["grpox_foo", "inner", "deepest"][:depth]
    folder = make_distribution("grpox-foo", "", entry_points={"plugin": ".".join([*packages, "plugin"])})
    (folder / "grpox_foo.py").unlink()
    inside = folder.joinpath(*packages)
    inside.mkdir(parents=True)
    for package in [inside, *inside.parents][:depth] if regular else []:
        (package / "__init__.py").write_text("")
    (inside / "plugin.py").write_text("from .names import NAME\n" + loss("?").replace("'?'", "NAME"))
    (inside / "names.py").write_text("NAME = 'before'")
    assert names(found()) == ["before"]
    (inside / "names.py").write_text("NAME = 'afterwards'")
    assert names(found()) == ["afterwards"]


def test_nothing_of_the_package_is_imported_to_see_whether_it_changed(make_distribution):
    folder = make_distribution("grpox-foo", "", entry_points={"plugin": "grpox_foo.inner.plugin"})
    (folder / "grpox_foo.py").unlink()
    inner = folder / "grpox_foo" / "inner"
    inner.mkdir(parents=True)
    for package in (inner.parent, inner):
        (package / "__init__.py").write_text(noting(""))
    (inner / "plugin.py").write_text(loss())
    found()
    assert names(found()) == ["foo"]
    assert imports(folder) == 2


def test_a_wheel_is_asked_again_when_its_record_changes_and_not_when_another_file_does(install):
    folder = install("grpox-foo", loss())
    (folder / "grpox_foo_other.py").write_text("")
    listing = folder / "grpox_foo-1.0.dist-info" / "RECORD"
    listing.write_text("grpox_foo.py,sha256=one,10\n")
    found()
    (folder / "grpox_foo_other.py").write_text("changed = True")
    found()
    assert imports(folder) == 1
    listing.write_text("grpox_foo.py,sha256=two,10\n")
    found()
    assert imports(folder) == 2


def test_another_version_is_asked_again(install):
    folder = install("grpox-foo", loss())
    found()
    information = folder / "grpox_foo-1.0.dist-info"
    text = (information / "METADATA").read_text().replace("1.0", "1.1")
    (information / "METADATA").write_text(text)
    plugins = found()
    assert imports(folder) == 2
    assert offers(plugins)[0].version == "1.1"


def test_a_plugin_is_asked_again_when_another_version_of_what_it_requires_is_installed(
    install, make_distribution
):
    folder = install("grpox-foo", loss())
    with (folder / "grpox_foo-1.0.dist-info" / "METADATA").open("a") as headers:
        headers.write("Requires-Dist: Grpox.Library>=1; python_version > '3'\n")
    library = make_distribution("grpox-library", "", entry_points={})
    found()
    make_distribution("grpox-unrelated", "", entry_points={})
    found()
    assert imports(folder) == 1
    (library / "grpox_library-1.0.dist-info").rename(library / "grpox_library-2.0.dist-info")
    found()
    assert imports(folder) == 2


def test_a_failure_is_forgotten_when_something_is_installed_or_removed(install, make_distribution):
    folder = install("grpox-foo", NEEDS_LIBRARY + loss())
    assert record(found()).reason == "ModuleNotFoundError: No module named 'grpox_library'"
    library = make_distribution("grpox-library", "", entry_points={})
    assert names(found()) == ["foo"]
    shutil.rmtree(library)
    assert names(found()) == ["foo"], "what it offers is known, though nothing says that it needs the library"
    assert imports(folder) == 2


@pytest.mark.parametrize("source", [loss(), "raise ValueError"])
def test_asked_afresh_every_plugin_is_imported_and_remembered_anew(install, source):
    folder = install("grpox-foo", source)
    found()
    found(fresh=True)
    assert imports(folder) == 2
    found()
    assert imports(folder) == 2


# -- Selected ----------------------------------------------------------------------------------------------


def test_a_plugin_that_is_selected_speaks_for_itself_and_no_other_is_imported(install):
    chosen, other = install("grpox-foo", loss("foo")), install("grpox-foo-other", loss("other"))
    broken = install("grpox-foo-bad", "raise ValueError")
    found()
    assert Registry(found()).find("loss", "foo").spec.name == "foo"
    assert (imports(chosen), imports(other), imports(broken)) == (2, 1, 1)


def test_a_selected_plugin_that_broke_since_is_told_with_its_error(install, make_distribution):
    library = make_distribution("grpox-library", "", entry_points={})
    install("grpox-foo", NEEDS_LIBRARY + loss())
    found()
    shutil.rmtree(library)
    with pytest.raises(ConfigError) as caught:
        Registry(found()).parse("loss", ComponentRef(name="foo"), "loss")
    for fact in ("grpox-foo 1.0 may offer it", "broken: ModuleNotFoundError"):
        assert fact in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert record(found()).status == "broken"


def test_a_broken_plugin_that_is_selected_is_loaded_again_for_its_original_error(install):
    install("grpox-foo", "raise ValueError('why')")
    found()
    with pytest.raises(ConfigError) as caught:
        Registry(found()).find("loss", "grpox-foo:wanted")
    assert repr(caught.value.__cause__) == "ValueError('why')"


def test_a_broken_plugin_that_loads_when_it_is_selected_is_used(install, monkeypatch):
    install("grpox-foo", "import os\nif 'GRPOX_FOO' not in os.environ:\n    raise ValueError\n" + loss())
    assert record(found()).status == "broken"
    monkeypatch.setenv("GRPOX_FOO", "1")
    plugins = found()
    assert record(plugins).status == "broken"
    assert Registry(plugins).find("loss", "foo").distribution == "grpox-foo"
    assert record(plugins).status == "ok"
    assert names(found()) == ["foo"]


def test_only_the_broken_plugins_that_are_meant_are_loaded_again(install):
    folder, other = install("grpox-foo", "raise ValueError"), install("grpox-foo-bad", "raise ValueError")
    found()
    with pytest.raises(ConfigError):
        Registry(found()).find("loss", "GRPOX_foo:wanted")
    assert (imports(folder), imports(other)) == (2, 1)


def test_a_required_plugin_speaks_for_itself(install, make_distribution):
    library = make_distribution("grpox-library", "", entry_points={})
    install("grpox-foo", NEEDS_LIBRARY + loss())
    assert missing_plugins(found(), ["grpox-foo"]) == []
    shutil.rmtree(library)
    (problem,) = missing_plugins(found(), ["grpox-foo"])
    assert "is broken: ModuleNotFoundError" in problem.what


# -- The file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"format": 1, "plugins": 3}', '{"format": 99}', "\xff", "[" * 100_000],
    ids=["empty", "cut", "list", "null", "number", "other format", "no text", "deep"],
)
def test_a_file_that_cannot_be_read_is_as_none_and_is_replaced(install, cache, content):
    folder = install("grpox-foo", loss())
    cache.mkdir()
    cache_file().write_bytes(content.encode("latin-1"))
    assert names(found()) == ["foo"]
    assert names(found()) == ["foo"]
    assert imports(folder) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"components": None},
        {"components": [["loss"]]},
        {"components": [["no-such-kind", {}]]},
        {"components": [["loss", {"name": "foo"}]]},
        {
            "components": [
                ["loss", {"name": "a b", "target": "a:B", "needs": [], "provides": [], "requires": []}]
            ]
        },
        {
            "components": [
                ["loss", {"name": "foo", "target": "a:B", "needs": [], "provides": [], "requires": [3]}]
            ]
        },
        {
            "components": [
                ["loss", {"name": "x", "target": "a:B", "needs": [], "provides": [], "requires": [], "api": ""}]
            ]
        },
        {"observes": [3]},
        {"failure": None},
    ],
    ids=str,
)
def test_an_entry_that_holds_no_answer_is_as_none(install, change):
    folder = install("grpox-foo", loss())
    found()
    whole = json.loads(cache_file().read_text())
    key = next(key for key in whole["plugins"] if key.startswith("grpox-foo "))
    whole["plugins"][key] |= change
    cache_file().write_text(json.dumps(whole))
    assert names(found()) == ["foo"]
    assert imports(folder) == 2


def test_a_cache_that_cannot_be_written_changes_nothing_but_the_time(install, cache):
    folder = install("grpox-foo", loss())
    cache.write_text("a file where the folder should be")
    assert names(found()) == ["foo"]
    assert names(found()) == ["foo"]
    assert imports(folder) == 2


def test_no_half_written_file_is_left(install, cache):
    install("grpox-foo", loss())
    found()
    assert [file.name for file in cache.iterdir()] == ["plugins.json"]


def test_what_is_no_text_is_asked_each_time_and_keeps_no_other_plugin_from_being_remembered(install):
    odd, plain = install("grpox-foo", loss(extra="summary=b'x'")), install("grpox-foo-other", loss("other"))
    found()
    assert names(found()) == ["foo"]
    assert (imports(odd), imports(plain)) == (2, 1)


def test_what_another_process_wrote_meanwhile_is_kept(install):
    theirs, mine = install("grpox-foo", loss()), install("grpox-foo-mine", loss("mine"))
    cache = PluginCache()
    discover(disable=["grpox-foo-mine"])
    (plugin,) = (point for point in metadata.entry_points(group="grpox") if point.value == "grpox_foo_mine")
    cache.put(plugin, load(plugin).answer)
    cache.save()
    assert names(found()) == ["foo"]
    assert (imports(theirs), imports(mine)) == (1, 1)


def test_nothing_is_written_when_nothing_is_new(install):
    install("grpox-foo", loss())
    found()
    before = cache_file().stat()
    found()
    after = cache_file().stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_the_cache_is_the_users_own_unless_another_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("GRPOX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file() == tmp_path / "grpox" / "plugins.json"


def test_a_plugin_whose_module_is_not_there_is_found_when_it_is(make_distribution):
    folder = make_distribution("grpox-foo", "", entry_points={"plugin": "grpox_foo_later"})
    assert record(found()).status == "broken"
    (folder / "grpox_foo_later.py").write_text(loss())
    assert names(found()) == ["foo"]


def test_a_distribution_in_the_current_folder_counts_among_what_is_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    before = Surroundings().fingerprint
    os.mkdir("grpox_here-1.0.dist-info")
    assert Surroundings().fingerprint != before


def test_whether_a_requirement_is_met_is_remembered_until_something_is_installed(install, monkeypatch):
    install("grpox-foo", loss(extra='requires=("grpox-engine>=1",)'))
    [first] = offers(found())
    assert (first.status, "grpox-engine>=1: not installed" in first.reason) == ("unavailable", True)
    with monkeypatch.context() as patch:
        patch.setattr("grpox.plugins.cache.none_met", None)
        assert offers(found()) == [first]
    install("grpox-engine", version="1.2")
    assert [offer.status for offer in offers(found())] == ["ok"]
