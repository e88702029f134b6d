"""Discovery: one plugin's failure is its own, nothing is dropped unsaid, nothing is first-wins."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from grpox.plugins.discovery import Offer, PluginRecord, PluginSet, discover

HEADER = "from grpox import ComponentSpec, hookimpl\n"


def loss(name: str = "x", extra: str = "") -> str:
    """A plugin module that offers one loss."""
    spec = f"ComponentSpec({name!r}, 'some.module:Loss', {extra})"
    return f"{HEADER}@hookimpl\ndef grpox_losses():\n    return [{spec}]\n"


def records(plugins: PluginSet, distribution: str) -> list[PluginRecord]:
    return [record for record in plugins.records if record.distribution == distribution]


def offers(plugins: PluginSet, distribution: str) -> list[Offer]:
    return [offer for offer in plugins.offers if offer.distribution == distribution]


def only_record(distribution: str) -> PluginRecord:
    (record,) = records(discover(), distribution)
    return record


def test_an_offer_says_where_it_comes_from(make_distribution):
    make_distribution("grpox-foo", loss("foo"), version="2.5")
    plugins = discover()
    (offer,) = offers(plugins, "grpox-foo")
    assert (offer.kind, offer.spec.name, offer.version, offer.status) == ("loss", "foo", "2.5", "ok")
    assert records(plugins, "grpox-foo") == [
        PluginRecord("plugin", "grpox_foo", distribution="grpox-foo", version="2.5")
    ]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise GeneratorExit", "GeneratorExit"),
        (HEADER + "@hookimpl\ndef grpox_losses():\n    exit(0)", "SystemExit: 0 (in grpox_losses)"),
        (
            HEADER + "@hookimpl\ndef grpox_losses():\n    raise ValueError('two\\nlines')",
            "ValueError: two lines (in grpox_losses)",
        ),
        (HEADER + "@hookimpl\ndef grpox_losses():\n    return None", "TypeError"),
        (HEADER + "@hookimpl\ndef grpox_losses():\n    return ['x']", "offers a str, not a ComponentSpec"),
        (HEADER + "@hookimpl\ndef grpox_lossess():\n    return []", "did you mean grpox_losses?"),
        (HEADER + "@hookimpl\ndef rewards():\n    return []", "there is no hook rewards"),
        (HEADER + "def grpox_lossess():\n    return []", "did you mean grpox_losses?"),
        (HEADER + "def grpox_losses():\n    return []", "mark it with @grpox.hookimpl"),
        (HEADER + "@hookimpl\ndef grpox_step_finished(run, stepp):\n    pass", "stepp"),
        (
            HEADER + "@hookimpl(wrapper=True)\ndef grpox_run_started(run):\n    return (yield)",
            "grpox_run_started is a hook wrapper",
        ),
        (
            HEADER + "@hookimpl(hookwrapper=True)\ndef grpox_losses():\n    yield",
            "grpox_losses is a hook wrapper",
        ),
        ("raise ValueError('no http://u:a-pass-word@host')", "ValueError: no http://u:***@host"),
        (loss("a b"), "a name may contain no space"),
        (loss("dist:x"), "a name may contain no space"),
        (loss("x", "config='no_colon'"), "the config of 'x' is 'no_colon'"),
        (loss("x", "needs='entropy'"), "needs of 'x' is not a tuple of strings"),
        (loss("x", "no_such_field=1"), "no_such_field"),
        (
            HEADER + "@hookimpl\ndef grpox_losses():\n    return [ComponentSpec('x', 'a:B')] * 2",
            "offers 'x' twice",
        ),
    ],
)
def test_a_broken_plugin_is_a_record_with_its_error_and_offers_nothing(make_distribution, source, reason):
    make_distribution("grpox-good", loss("good"))
    make_distribution("grpox-bad", source)
    plugins = discover()
    (record,) = records(plugins, "grpox-bad")
    assert record.status == "broken"
    assert reason in record.reason
    assert "\n" not in record.reason
    assert type(record.error).__name__ in (record.reason.partition(":")[0], "InvalidPlugin")
    assert offers(plugins, "grpox-bad") == []
    assert [offer.spec.name for offer in offers(plugins, "grpox-good")] == ["good"]


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import os\nos._exit(0)", "calls os._exit(0)"),
        (HEADER + "@hookimpl\ndef grpox_losses():\n    import os\n    os._exit(0)", "calls os._exit(0)"),
        ("from os import _exit\ntry:\n    _exit(3)\nexcept BaseException:\n    pass", "calls os._exit(3)"),
        ("print('hello')", "prints 'hello"),
        ("import os\nos.write(1, b'hello')", "prints 'hello'"),
        ("import sys\nsys.__stdout__.write('hello')", "prints 'hello'"),
    ],
)
def test_every_command_refuses_a_plugin_that_ends_the_process_or_prints(make_distribution, source, fault):
    folder = make_distribution("grpox-bad", source)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "grpox", "plugins", "list", "--json"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 2
    assert f"plugin 'plugin' of grpox-bad 1.0 {fault}" in done.stderr
    assert "as it is imported" in done.stderr
    assert "hello" not in done.stdout.replace(fault, "")
    assert fault.partition("'")[0] in str(json.loads(done.stdout))
    path_of_cure = {**os.environ, "PYTHONPATH": path, "GRPOX_DISABLE_PLUGINS": "grpox-bad"}
    subprocess.run([sys.executable, "-m", "grpox", "schema"], capture_output=True, check=True, env=path_of_cure)


def test_a_run_file_is_not_checked_with_a_plugin_that_prints(make_distribution):
    path = os.pathsep.join([str(make_distribution("grpox-bad", "print(1)")), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "grpox", "validate", "quickstart"]
    assert subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": path}).returncode == 2


def test_a_plugin_may_keep_the_standard_output_that_it_finds(make_distribution):
    make_distribution("grpox-logs", "import logging, sys\nhandler = logging.StreamHandler(sys.stdout)")
    assert only_record("grpox-logs").status == "ok"
    assert not sys.modules["grpox_logs"].handler.stream.closed


def test_a_child_that_a_plugin_forks_may_end_as_it_likes(make_distribution):
    make_distribution(
        "grpox-forks", "import os\npid = os.fork()\npid or os._exit(3)\nended = os.waitpid(pid, 0)[1]"
    )
    assert only_record("grpox-forks").status == "ok"
    assert sys.modules["grpox_forks"].ended >> 8 == 3


def test_a_plugin_loads_whole_or_not_at_all(make_distribution):
    source = loss("x") + "@hookimpl\ndef grpox_rewards():\n    raise ValueError\n"
    make_distribution("grpox-half", source + "@hookimpl\ndef grpox_run_finished(run, summary): ...\n")
    plugins = discover()
    assert offers(plugins, "grpox-half") == []
    assert not plugins.manager.has_plugin("grpox-half:plugin")


def test_an_optional_hook_of_a_later_grpox_is_no_misspelling(make_distribution):
    make_distribution("grpox-ahead", HEADER + "@hookimpl(optionalhook=True)\ndef grpox_new_hook(): ...\n")
    assert only_record("grpox-ahead").status == "ok"


def test_the_lifecycle_hooks_of_a_module_that_two_distributions_ship_are_called_once(make_distribution):
    source = loss("same") + "@hookimpl\ndef grpox_run_finished(run, summary): ...\n"
    make_distribution("grpox-one", source)
    make_distribution("grpox-fork", "", entry_points={"plugin": "grpox_one"})
    plugins = discover()
    assert len([offer for offer in plugins.offers if offer.spec.name == "same"]) == 2
    called = [impl.plugin.__name__ for impl in plugins.manager.hook.grpox_run_finished.get_hookimpls()]
    assert called.count("grpox_one") == 1


def test_a_distribution_met_twice_is_loaded_once(make_distribution, monkeypatch):
    folder = make_distribution("grpox-foo", loss("foo"))
    monkeypatch.syspath_prepend(str(folder) + os.sep + ".")
    # What an interrupted pip leaves behind: another folder name, the same Name inside.
    left_behind = folder / "~rpox_foo-1.0.dist-info"
    left_behind.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (left_behind / name).write_text((folder / "grpox_foo-1.0.dist-info" / name).read_text())
    plugins = discover()
    assert len(records(plugins, "grpox-foo")) == 1
    assert len(offers(plugins, "grpox-foo")) == 1


@pytest.mark.parametrize("spelling", ["grpox-foo", "Grpox_Foo", "grpox.foo", " grpox-foo ,other"])
def test_the_environment_disables_by_any_spelling_unimported(make_distribution, monkeypatch, spelling):
    make_distribution("grpox-foo", "raise RuntimeError('imported')")
    monkeypatch.setenv("GRPOX_DISABLE_PLUGINS", spelling)
    record = only_record("grpox-foo")
    assert (record.status, record.reason) == ("disabled", "by GRPOX_DISABLE_PLUGINS")
    assert "grpox_foo" not in sys.modules


def test_an_argument_disables_one_distribution_and_no_other(make_distribution):
    make_distribution("grpox-foo", loss("foo"))
    make_distribution("grpox-foo-extra", loss("extra"))
    plugins = discover(disable=["GRPOX_foo"])
    assert records(plugins, "grpox-foo")[0].status == "disabled"
    assert offers(plugins, "grpox-foo") == []
    assert records(plugins, "grpox-foo-extra")[0].status == "ok"


def test_a_distribution_to_disable_that_is_not_installed_is_a_warning_with_the_nearest(
    make_distribution, monkeypatch
):
    make_distribution("grpox-foo", loss("foo"))
    monkeypatch.setenv("GRPOX_DISABLE_PLUGINS", "Grpox_Foo,zzz")
    plugins = discover(disable=["grpox-fooo", "GRPOX.foo"])
    far, near = plugins.warnings
    assert far.startswith("GRPOX_DISABLE_PLUGINS names 'zzz'")
    assert "did you mean" not in far
    assert near.startswith("the plugins.disable list names 'grpox-fooo'")
    assert near.endswith("did you mean grpox-foo?")
    assert records(plugins, "grpox-foo")[0].status == "disabled"


@pytest.mark.parametrize(("api", "remedy"), [(0, "upgrade the plugin"), (2, "upgrade grpox")])
def test_another_api_version_makes_an_offer_incompatible(make_distribution, api, remedy):
    make_distribution("grpox-foo", loss("foo", f"api={api}"))
    (offer,) = offers(discover(), "grpox-foo")
    assert offer.status == "incompatible"
    assert f"plugin API {api}, but this grpox has 1" in offer.reason
    assert remedy in offer.reason
