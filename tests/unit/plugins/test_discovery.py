"""Discovery: one plugin's failure is its own, nothing is dropped unsaid, nothing is first-wins."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from grpox.plugins.discovery import Offer, PluginRecord, PluginSet, discover

HEADER = "from grpox import ComponentSpec, hookimpl\n"


def hook(body: str, name: str = "grpox_losses()", mark: str = "@hookimpl\n") -> str:
    """A plugin module with one hook."""
    return f"{HEADER}{mark}def {name}:\n    {body}\n"


def loss(name: str = "x", extra: str = "") -> str:
    """A plugin module that offers one loss."""
    return hook(f"return [ComponentSpec({name!r}, 'some.module:Loss', {extra})]")


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
        ("raise GeneratorExit", "GeneratorExit"),
        (hook("exit(0)"), "SystemExit: 0 (in grpox_losses)"),
        (hook("raise ValueError('two\\nlines')"), "ValueError: two lines (in grpox_losses)"),
        (hook("return None"), "TypeError"),
        (hook("return ['x']"), "offers a str, not a ComponentSpec"),
        (hook("return []", "grpox_lossess()"), "did you mean grpox_losses?"),
        (hook("return []", "rewards()"), "there is no hook rewards"),
        (hook("return []", "grpox_lossess()", mark=""), "did you mean grpox_losses?"),
        (hook("return []", mark=""), "mark it with @grpox.hookimpl"),
        (hook("pass", "grpox_step_finished(run, stepp)"), "stepp"),
        (hook("return (yield)", mark="@hookimpl(wrapper=True)\n"), "grpox_losses is a hook wrapper"),
        (hook("yield", mark="@hookimpl(hookwrapper=True)\n"), "grpox_losses is a hook wrapper"),
        ("raise ValueError('no http://u:a-pass-word@host')", "ValueError: no http://u:***@host"),
        (loss("a b"), "a name may contain no space"),
        (loss("dist:x"), "a name may contain no space"),
        (loss("x", "config='no_colon'"), "the config of 'x' is 'no_colon'"),
        (loss("x", "needs='entropy'"), "needs of 'x' is not a tuple of strings"),
        (loss("x", "no_such_field=1"), "no_such_field"),
        (hook("return [ComponentSpec('x', 'a:B')] * 2"), "offers 'x' twice"),
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
        (hook("import os\n    os._exit(0)"), "calls os._exit(0)"),
        ("from os import _exit\ntry:\n    _exit(3)\nexcept BaseException:\n    pass", "calls os._exit(3)"),
        ("print('hello')", "prints 'hello"),
        ("import os\nos.write(1, b'hello')", "prints 'hello'"),
    ],
)
def test_every_command_refuses_a_plugin_that_ends_the_process_or_prints(make_distribution, source, fault):
    path = os.pathsep.join([str(make_distribution("grpox-bad", source)), os.environ.get("PYTHONPATH", "")])

    def grpox(*arguments, **variables):
        command = [sys.executable, "-m", "grpox", *arguments]
        variables = {**os.environ, "PYTHONPATH": path, **variables}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)

    done = grpox("plugins", "list", "--json")
    assert done.returncode == 2
    assert f"plugin 'plugin' of grpox-bad 1.0 {fault}" in done.stderr
    assert "as it is imported" in done.stderr
    assert "hello" not in done.stdout.replace(fault, "")
    assert fault.partition("'")[0] in str(json.loads(done.stdout))
    assert grpox("schema", GRPOX_DISABLE_PLUGINS="grpox-bad").returncode == 0
    if fault == "prints 'hello":
        assert grpox("validate", "quickstart").returncode == 2


def test_a_plugin_may_keep_standard_output_fork_and_implement_a_hook_of_a_later_grpox(make_distribution):
    make_distribution("grpox-logs", "import logging, sys\nhandler = logging.StreamHandler(sys.stdout)")
    fork = "import os\npid = os.fork()\npid or os._exit(3)\nended = os.waitpid(pid, 0)[1]"
    make_distribution("grpox-forks", fork)
    make_distribution("grpox-ahead", hook("...", "grpox_new_hook()", "@hookimpl(optionalhook=True)\n"))
    for distribution in ("grpox-logs", "grpox-forks", "grpox-ahead"):
        assert only_record(distribution).status == "ok"
    assert not sys.modules["grpox_logs"].handler.stream.closed
    assert sys.modules["grpox_forks"].ended >> 8 == 3


def test_a_plugin_loads_whole_or_not_at_all(make_distribution):
    source = loss("x") + hook("raise ValueError", "grpox_rewards()")
    make_distribution("grpox-half", source + hook("...", "grpox_run_finished(run, summary)"))
    plugins = discover()
    assert offers(plugins, "grpox-half") == []
    assert not plugins.manager.has_plugin("grpox-half:plugin")


def test_the_lifecycle_hooks_of_a_module_that_two_distributions_ship_are_called_once(make_distribution):
    source = loss("same") + hook("...", "grpox_run_finished(run, summary)")
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


def test_the_list_disables_one_distribution_and_a_name_that_is_not_installed_is_a_warning(
    make_distribution, monkeypatch
):
    make_distribution("grpox-foo", loss("foo"))
    make_distribution("grpox-foo-extra", loss("extra"))
    monkeypatch.setenv("GRPOX_DISABLE_PLUGINS", "Grpox_Foo,zzz")
    plugins = discover(disable=["grpox-fooo", "GRPOX.foo"])
    far, near = plugins.warnings
    assert far.startswith("GRPOX_DISABLE_PLUGINS names 'zzz'")
    assert "did you mean" not in far
    assert near.startswith("the plugins.disable list names 'grpox-fooo'")
    assert near.endswith("did you mean grpox-foo?")
    monkeypatch.delenv("GRPOX_DISABLE_PLUGINS")
    plugins = discover(disable=["GRPOX_foo"])
    assert records(plugins, "grpox-foo")[0].status == "disabled"
    assert offers(plugins, "grpox-foo") == []
    assert records(plugins, "grpox-foo-extra")[0].status == "ok"


@pytest.mark.parametrize(("api", "remedy"), [(0, "upgrade the plugin"), (2, "upgrade grpox")])
def test_another_api_version_makes_an_offer_incompatible(make_distribution, api, remedy):
    make_distribution("grpox-foo", loss("foo", f"api={api}"))
    (offer,) = offers(discover(), "grpox-foo")
    assert offer.status == "incompatible"
    assert f"plugin API {api}, but this grpox has 1" in offer.reason
    assert remedy in offer.reason
