"""What a plugin uses of an older plugin API works on, and its author is told by name what to change."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from grpox.cli.app import app as cli
from grpox.cli.plugin_report import rows
from grpox.cli.plugins import app
from grpox.errors import ConfigError
from grpox.observing.observers import Observers
from grpox.plugins import hookspecs, loader
from grpox.plugins.deprecation import (
    PluginDeprecation,
    api_note,
    api_problem,
    author_of,
    collected,
    renamed_argument,
    renamed_fields,
    renamed_hook,
)
from grpox.plugins.discovery import Offer, PluginRecord, PluginSet, discover
from grpox.plugins.hookspecs import hookspec
from grpox.plugins.loader import new_manager
from grpox.plugins.registry import Registry
from grpox.testing.conformance import registry as suites_registry

HEADER = "from grpox import ComponentSpec, hookimpl\n\n"
OLD_ARGUMENT = (
    HEADER + "@hookimpl\ndef grpox_checkpoint_saved(step, path):\n    SAVED.append((step, path))\nSAVED = []\n"
)
NEW_ARGUMENT = HEADER + "@hookimpl\ndef grpox_checkpoint_saved(step, folder): ...\n"
OLD_HOOK = (
    HEADER + "@hookimpl\ndef grpox_policy_losses():\n    return [ComponentSpec('old', 'some.module:Loss')]\n"
)
HOOK_NOTE = "hook grpox_policy_losses is now grpox_losses; grpox 0.3 drops the old name"
BOTH_HOOKS = (
    OLD_HOOK + "\n@hookimpl\ndef grpox_losses():\n    return [ComponentSpec('new', 'some.module:Loss')]\n"
)


def later_hookspecs() -> ModuleType:
    """grpox's hooks as a later version might have them: an argument and two hooks have new names."""

    @hookspec(
        warn_on_impl_args={"path": renamed_argument("grpox_checkpoint_saved", "path", "folder", until="0.3")}
    )
    def grpox_checkpoint_saved(run, step, path, folder): ...

    @hookspec(warn_on_impl=renamed_hook("grpox_policy_losses", "grpox_losses", until="0.3"))
    def grpox_policy_losses(): ...

    @hookspec(warn_on_impl=renamed_hook("grpox_step_done", "grpox_step_finished", until="0.3"))
    def grpox_step_done(run, step, metrics): ...

    module = ModuleType("later_hookspecs")
    vars(module).update(vars(hookspecs))
    for hook in (grpox_checkpoint_saved, grpox_policy_losses, grpox_step_done):
        setattr(module, hook.__name__, hook)
    return module


@pytest.fixture(autouse=True)
def _later_grpox(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(loader, "hookspecs", later_hookspecs())
    monkeypatch.setenv("GRPOX_CACHE_DIR", str(tmp_path / "cache"))


def record(plugins: PluginSet, distribution: str) -> PluginRecord:
    return next(record for record in plugins.records if record.distribution == distribution)


def offers(plugins: PluginSet, distribution: str) -> list[Offer]:
    return [offer for offer in plugins.offers if offer.distribution == distribution]


def told(call: Any, *arguments: Any) -> list[warnings.WarningMessage]:
    """The deprecations that a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*arguments)
    return [warning for warning in caught if issubclass(warning.category, PluginDeprecation)]


# -- Hooks and their arguments ---------------------------------------------------------------------------


def test_an_old_argument_is_told_to_its_author_by_name_with_the_line_and_what_to_use(make_distribution):
    folder = make_distribution("grpox-olden", OLD_ARGUMENT, version="1.3")
    make_distribution("grpox-newer", NEW_ARGUMENT)
    (first, *again) = told(discover)
    author, _, what = str(first.message).partition(": ")
    assert author == "grpox-olden 1.3"
    for fact in ("argument path", "grpox_checkpoint_saved", "now folder", "grpox 0.3 drops"):
        assert fact in what
    assert issubclass(first.category, DeprecationWarning)
    assert (first.filename, first.lineno) == (str(folder / "grpox_olden.py"), 3)
    assert {str(warning.message) for warning in again} <= {str(first.message)}


def test_an_old_argument_is_still_passed(make_distribution):
    make_distribution("grpox-olden2", OLD_ARGUMENT)
    hook = discover().manager.hook.grpox_checkpoint_saved
    hook(run=None, step=7, path="there", folder="there")
    assert sys.modules["grpox_olden2"].SAVED == [(7, "there")]


def test_what_an_old_discovery_hook_offers_is_offered_and_nothing_of_it_observes(make_distribution):
    make_distribution("grpox-olden3", OLD_HOOK)
    found: list[PluginSet] = []
    (warning,) = told(lambda: found.append(discover()))
    (plugins,) = found
    for fact in ("grpox-olden3 1.0: ", "hook grpox_policy_losses", "now grpox_losses"):
        assert fact in str(warning.message)
    assert [(offer.kind, offer.spec.name) for offer in offers(plugins, "grpox-olden3")] == [("loss", "old")]
    assert record(plugins, "grpox-olden3").observes == ()


def test_a_plugin_for_both_versions_is_asked_by_the_new_name_alone(make_distribution):
    make_distribution("grpox-both", BOTH_HOOKS)
    assert [offer.spec.name for offer in offers(discover(), "grpox-both")] == ["new"]


def test_an_old_lifecycle_hook_observes_as_before(make_distribution):
    make_distribution("grpox-olden4", HEADER + "@hookimpl\ndef grpox_step_done(step): ...\n")
    assert record(discover(), "grpox-olden4").observes == ("grpox_step_done",)


def test_a_filter_that_makes_errors_of_warnings_breaks_no_plugin_and_hides_no_deprecation(make_distribution):
    make_distribution("grpox-olden5", OLD_ARGUMENT)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        assert record(discover(), "grpox-olden5").status == "ok"
    assert "grpox-olden5 1.0" in str(caught[0].message)


def test_an_observer_that_a_run_selects_is_named_too(make_distribution):
    source = HEADER + "class Watch:\n    @hookimpl\n    def grpox_checkpoint_saved(self, path): ...\n"
    make_distribution("grpox-watching", source + "\n@hookimpl\ndef grpox_observers():\n    return []\n")
    discover()
    watch = sys.modules["grpox_watching"].Watch()
    (warning,) = told(Observers, new_manager(), [("watch", watch)])
    assert str(warning.message).startswith("grpox-watching 1.0: argument path of grpox_checkpoint_saved")


# -- What is shown ---------------------------------------------------------------------------------------


def test_the_list_notes_it_in_the_plugins_row_also_when_the_answer_is_remembered(make_distribution):
    make_distribution("grpox-olden6", OLD_HOOK)
    for imported in (True, False):
        sys.modules.pop("grpox_olden6", None)
        (row,) = (row for row in rows(discover(), "plugin") if row.distribution == "grpox-olden6")
        assert (row.status, row.reason) == ("ok", f"{HOOK_NOTE} (grpox_olden6.py:3)")
        assert ("grpox_olden6" in sys.modules) == imported


def test_whoever_selects_a_component_of_such_a_plugin_is_told_once(make_distribution):
    make_distribution("grpox-olden7", OLD_HOOK)
    registry = Registry(discover())
    for _ in range(2):
        registry.find("loss", "old")
    told_users = [warning for warning in registry.plugins.warnings if "grpox-olden7" in warning]
    assert told_users == [f"plugin 'plugin' of grpox-olden7 1.0: {HOOK_NOTE} (grpox_olden7.py:3)"]


def test_check_ends_with_what_is_deprecated(make_distribution):
    loss = (
        "class Plain:\n    from grpox.contracts import Reduction\n    reduction = Reduction.TOKEN_MEAN\n"
        "    def per_token(self, inputs):\n        from grpox.contracts import LossOutput\n"
        "        ratio = (inputs.logprobs - inputs.old_logprobs).exp()\n"
        "        return LossOutput(-ratio * inputs.advantages)\n"
    )
    make_distribution("grpox-olden8", OLD_HOOK.replace("some.module:Loss", "grpox_olden8:Plain") + loss)
    suites_registry.cache_clear()
    try:
        done = CliRunner().invoke(app, ["check", "grpox-olden8:old"], env={"COLUMNS": "200"})
    finally:
        suites_registry.cache_clear()
    assert done.exit_code == 0, done.output
    (line,) = (line for line in done.output.splitlines() if line.startswith("deprecated:"))
    assert line == f"deprecated: grpox-olden8 1.0: {HOOK_NOTE} (grpox_olden8.py:3)"


def test_collected_takes_deprecations_alone_each_once():
    with warnings.catch_warnings(record=True) as others, collected() as found:
        warnings.simplefilter("always")
        for _ in range(2):
            warnings.warn(PluginDeprecation("old"), stacklevel=1)
        warnings.warn("another", UserWarning, stacklevel=1)
    assert [note.partition(" (")[0] for note in found] == ["old"]
    assert [str(warning.message) for warning in others] == ["another"]


# -- Fields of contracts ---------------------------------------------------------------------------------


@renamed_fields("0.3", probabilities="logprobs")
@dataclasses.dataclass(frozen=True)
class Example:
    """A contract with a field that was once called `probabilities`."""

    logprobs: float
    mask: bool = True


def test_an_old_field_is_read_and_the_reader_told_by_name_where_and_what(make_distribution):
    source = HEADER + "class Mine:\n    def per_token(self, inputs):\n        return inputs.probabilities\n"
    folder = make_distribution("grpox-reads", source, version="2.0")
    discover()
    mine = sys.modules["grpox_reads"].Mine()
    values: list[float] = []
    (warning,) = told(lambda: values.append(mine.per_token(Example(0.5))))
    assert values == [0.5]
    author, _, what = str(warning.message).partition(": ")
    assert author == "grpox-reads 2.0 in Mine.per_token"
    for fact in ("field probabilities of Example", "now logprobs", "grpox 0.3 drops"):
        assert fact in what
    assert (warning.filename, warning.lineno) == (str(folder / "grpox_reads.py"), 5)


def test_an_old_field_may_be_passed_and_replaced_and_the_line_that_does_is_told():
    made: list[Example] = []
    (warning,) = told(lambda: made.append(Example(probabilities=0.25, mask=False)))
    assert warning.filename == __file__
    assert made == [Example(0.25, False)]
    (warning,) = told(lambda: made.append(dataclasses.replace(made[0], probabilities=0.75)))
    assert warning.filename == __file__


def test_new_names_are_silent_and_the_fields_are_the_new_ones():
    assert told(lambda: Example(logprobs=1.0).logprobs) == []
    assert [field.name for field in dataclasses.fields(Example)] == ["logprobs", "mask"]


def test_a_line_that_runs_in_every_step_is_told_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            Example(1.0).probabilities  # noqa: B018
    assert len(caught) == 1


def test_the_author_is_that_of_the_nearest_plugin_and_else_the_module_itself(make_distribution):
    make_distribution("shared-one", "", entry_points={"plugin": "shared.one.plugin"}, version="1.1")
    make_distribution("shared-two", "", entry_points={"plugin": "shared.two.plugin"}, version="2.2")
    assert author_of("shared.two.loss") == "shared-two 2.2"
    assert author_of("shared.one.inner.loss") == "shared-one 1.1"
    assert author_of("no_plugin_at_all.loss") == "no_plugin_at_all.loss"


# -- Versions of the plugin API --------------------------------------------------------------------------


@pytest.fixture
def api_two_to_three(monkeypatch) -> None:
    monkeypatch.setattr(hookspecs, "SUPPORTED_API", range(2, 4))


@pytest.mark.usefixtures("api_two_to_three")
@pytest.mark.parametrize(
    ("api", "problem", "note"),
    [
        (1, ("API 1", "grpox has 3", "takes 2 and later", "upgrade the plugin"), ()),
        (2, (), ("API 2", "drop", "move to 3")),
        (3, (), ()),
        (4, ("API 4", "grpox has 3", "takes 2 and later", "upgrade grpox"), ()),
    ],
)
def test_an_older_supported_version_is_noted_and_others_are_refused(api, problem, note):
    for text, facts in ((api_problem(api), problem), (api_note(api), note)):
        assert bool(text) == bool(facts)
        assert [fact for fact in facts if fact not in text] == []


@pytest.mark.usefixtures("api_two_to_three")
def test_a_component_for_an_older_supported_version_is_listed_with_a_note_and_can_be_selected(
    make_distribution,
):
    specs = ", ".join(f"ComponentSpec('api{api}', 'some.module:Loss', api={api})" for api in (1, 2, 3))
    make_distribution("grpox-versions", f"{HEADER}@hookimpl\ndef grpox_losses():\n    return [{specs}]\n")
    plugins = discover()
    registry = Registry(plugins)
    assert {o.spec.name: o.status for o in offers(plugins, "grpox-versions")} == {
        "api1": "incompatible",
        "api2": "ok",
        "api3": "ok",
    }
    note = "loss 'api2' of grpox-versions 1.0 is written for plugin API 2"
    with pytest.warns(PluginDeprecation, match=note):
        assert registry.find("loss", "api2").status == "ok"
    assert told(registry.find, "loss", "api3") == []
    assert [note in warning for warning in plugins.warnings] == [True]
    with pytest.raises(ConfigError, match="plugin API 1"):
        registry.find("loss", "api1")


def test_a_run_that_selects_such_a_component_warns_its_user(make_distribution, monkeypatch):
    monkeypatch.setattr(hookspecs, "SUPPORTED_API", range(1, 3))
    spec = "ComponentSpec('api1', 'some.module:Loss', api=1)"
    source = f"{HEADER}@hookimpl\ndef grpox_losses():\n    return [{spec}]\n"
    make_distribution("grpox-behind", source)
    done = CliRunner().invoke(cli, ["validate", "quickstart", "loss=api1"])
    assert done.exit_code == 0, done.output
    [line] = [line for line in done.stderr.splitlines() if line.startswith("warning: loss 'api1' ")]
    for fact in ("grpox-behind 1.0", "API 1", "move to 2"):
        assert fact in line


def test_the_oldest_version_is_the_default_of_a_component_that_names_none():
    assert hookspecs.ComponentSpec("x", "a:B").api == hookspecs.OLDEST_API == 1
    assert list(hookspecs.SUPPORTED_API) == list(range(hookspecs.OLDEST_API, hookspecs.API_VERSION + 1))


def test_every_argument_of_a_lifecycle_hook_is_passed_to_it():
    """That of a deprecated name too, for as long as a specification has it."""
    called: dict[str, set[str]] = {}
    manager = loader.PluginManager()
    manager.add_hookspecs(hookspecs)
    lifecycle = [name for name in vars(manager.hook) if name not in hookspecs.KINDS.values()]

    class All:
        """Implements each hook with each of its arguments."""

    for name in lifecycle:
        arguments = getattr(manager.hook, name).spec.argnames
        source = f"def {name}({', '.join(arguments)}): called[{name!r}] = set(locals())"
        names: dict[str, Any] = {"called": called}
        exec(source, names)
        setattr(All, name, staticmethod(hookspecs.hookimpl(names[name])))
    observers = Observers(manager, [("all", All)])
    context: Any = SimpleNamespace()
    observers.run_started(context)
    observers.rollouts_scored(context, 1, [])
    observers.step_finished(context, 1, {})
    observers.evaluated(context, 1, {})
    observers.checkpoint_saved(context, 1, context)
    observers.run_finished(context, {})
    another = Observers(manager, [("all", All)])
    another.run_failed(context, ValueError())
    assert not observers.failures + another.failures
    assert called == {name: set(getattr(manager.hook, name).spec.argnames) for name in lifecycle}
