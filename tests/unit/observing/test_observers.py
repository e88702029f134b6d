"""Observers are called one by one: a broken one is named and counted, and the others hear everything."""

from __future__ import annotations

import copy
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pluggy
import pytest
from support.contexts import context_of, scored
from support.handlers import handlers_kept
from support.logs import LOGGED

from grpox.contracts import RunContext
from grpox.errors import ConfigError, RunFailed
from grpox.observing.observers import Observers
from grpox.plugins import hookspecs
from grpox.plugins.hookspecs import hookimpl
from grpox.plugins.loader import new_manager
from grpox.runtime import signals
from grpox.runtime.signals import install_handlers


@pytest.fixture
def run(tmp_path: Path) -> RunContext:
    return context_of(tmp_path)


@pytest.fixture
def manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager("grpox")
    manager.add_hookspecs(hookspecs)
    return manager


def hooks(function: Callable[..., Any], *names: str, **options: bool) -> SimpleNamespace:
    """An observer that calls the function in each of these hooks."""
    return SimpleNamespace(**dict.fromkeys(names, hookimpl(**options)(function)))


class Listener:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    @hookimpl
    def grpox_step_finished(self, metrics: Mapping[str, float], step: int) -> None:
        self.heard.append((step, dict(metrics)))

    @hookimpl
    def grpox_run_failed(self, error: BaseException) -> None:
        self.heard.append(error)


class Broken:
    @hookimpl
    def grpox_run_started(self) -> None:
        raise OSError("no room left")

    @hookimpl
    def grpox_step_finished(self) -> None:
        raise ValueError("cannot count [beyond] three")


@pytest.mark.parametrize("order", [("broken", "listener"), ("listener", "broken")])
def test_a_failure_hurts_no_other(manager: pluggy.PluginManager, run: RunContext, order: Sequence[str]) -> None:
    both: dict[str, Any] = {"broken": Broken(), "listener": Listener()}
    told = Observers(manager, [(name, both[name]) for name in order])
    for step in (1, 2, 3):
        told.step_finished(run, step, {})
    assert both["listener"].heard == [(1, {}), (2, {}), (3, {})]
    assert told.failures == {("broken", "grpox_step_finished"): 3}
    [line] = [line for line in LOGGED.getvalue().splitlines() if "ValueError" in line]
    assert "'broken' failed in grpox_step_finished: ValueError: cannot count [beyond] three" in line


def test_an_unselected_plugin_cannot_hurt_the_start(manager: pluggy.PluginManager, run: RunContext) -> None:
    def interrupted(step: int) -> None:
        raise KeyboardInterrupt

    module = ModuleType("someones_plugin")
    module.grpox_run_started = Broken().grpox_run_started  # type: ignore[attr-defined]
    manager.register(module, name="someones-dist:plugin")
    told = Observers(manager, [("slow", hooks(interrupted, "grpox_step_finished"))])
    told.run_started(run)
    assert re.search("'someones-dist:plugin'.*grpox_run_started.*OSError: no room left", LOGGED.getvalue())
    with pytest.raises(KeyboardInterrupt):
        told.step_finished(run, 1, {})


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(0), "SystemExit: 0"),
        (GeneratorExit(), "GeneratorExit"),
        (Mute(), "Mute: its message cannot be read: KeyboardInterrupt"),
    ],
)
def test_whatever_an_observer_raises_is_its_failure_where_no_signal_came(
    manager: pluggy.PluginManager, run: RunContext, error: BaseException, text: str
) -> None:
    def raises() -> None:
        raise error

    listener, broken = Listener(), hooks(raises, "grpox_run_started", "grpox_step_finished")
    told = Observers(manager, [("listener", listener), ("broken", broken)])
    with handlers_kept():
        install_handlers()
        with pytest.raises(RunFailed, match=f"observer 'broken' cannot start: {text}") as caught:
            told.run_started(run)
        told.step_finished(run, 1, {})
    assert caught.value.__cause__ is error
    assert f"observer 'broken' failed in grpox_step_finished: {text}" in LOGGED.getvalue()
    assert listener.heard == [(1, {})]


def test_an_observer_changes_nothing_for_others(manager: pluggy.PluginManager, run: RunContext) -> None:
    first = hookimpl(tryfirst=True)

    class Vandal:
        @first
        def grpox_run_started(self, run: Any) -> None:
            with pytest.raises(TypeError, match="config is read-only: max_steps"):
                run.config.train.max_steps = 9
            run.config.tracking.clear()
            run.versions.clear()

        @first
        def grpox_rollouts_scored(self, rollouts: Any) -> None:
            rollouts[0].rewards["judge"] = 9.0
            rollouts[0].extra["note"].append("more")
            rollouts.clear()

        @first
        def grpox_step_finished(self, metrics: Any) -> None:
            for change in (metrics.clear, lambda: metrics.__setitem__("accuracy", 9.0)):
                with pytest.raises(TypeError, match="metrics are read-only"):
                    change()

        grpox_evaluated = grpox_step_finished

        @first
        def grpox_run_finished(self, summary: Any) -> None:
            summary["stopped_early"]["step"] = 9

    heard: list[Any] = []

    def hear_start(run: RunContext) -> None:
        heard.append((run.config.train.max_steps, run.versions))

    hears = SimpleNamespace(
        grpox_run_started=hookimpl(hear_start),
        grpox_rollouts_scored=hookimpl(lambda rollouts: heard.append(rollouts)),
        grpox_step_finished=hookimpl(lambda metrics: heard.append(metrics)),
        grpox_evaluated=hookimpl(lambda metrics: heard.append(metrics)),
        grpox_run_finished=hookimpl(lambda summary: heard.append(summary)),
    )
    row = scored(rewards={"judge": 1.0}, extra={"note": ["a"]})
    given: Any = [row], {"loss": 1.0}, {"accuracy": 0.5}, {"stopped_early": {"step": 1}}
    whole = copy.deepcopy(given)
    as_it_was = run.config.train.max_steps, dict(run.versions)
    told = Observers(manager, [("hears", hears), ("vandal", Vandal())])
    told.run_started(run)
    told.rollouts_scored(run, 1, given[0])
    told.step_finished(run, 1, given[1])
    told.evaluated(run, 1, given[2])
    told.run_finished(run, given[3])
    assert (run.config.train.max_steps, run.versions) == as_it_was
    assert given == whole
    assert heard == [as_it_was, *whole]
    assert not told.failures


class Ending:
    """Hears how the run ended, while `meanwhile` happens."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.heard: list[str] = []
        self._meanwhile = meanwhile

    @hookimpl
    def grpox_run_finished(self) -> None:
        self._meanwhile()
        self.heard.append("finished")

    @hookimpl
    def grpox_run_failed(self) -> None:
        self._meanwhile()
        self.heard.append("failed")


def terminate() -> None:
    signals._handle(signal.SIGTERM, None)


def test_sigterm_at_the_end_of_a_run_waits_until_all_know_and_a_second_signal_is_raised_at_once(
    manager: pluggy.PluginManager, run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "_received", [])
    tracker, struck = Ending(), Ending(terminate)
    both = [("tracker", tracker), ("struck", struck)]
    with pytest.raises(signals.Terminated):
        Observers(manager, both).run_finished(run, {})
    assert (struck.heard, tracker.heard) == (["finished"], ["finished"])
    # It does not replace a failure.
    monkeypatch.setattr(signals, "_received", [])
    Observers(manager, both).run_failed(run, RunFailed("a reward raised"))
    assert tracker.heard == ["finished", "failed"]
    monkeypatch.setattr(signals, "_received", [])
    with pytest.raises(signals.Terminated):
        terminate()  # the first one, which ended the run
    with pytest.raises(signals.Terminated):
        Observers(manager, both).run_failed(run, signals.Terminated())
    assert tracker.heard == ["finished", "failed"]


def test_a_terminal_that_has_gone_does_not_end_the_run(manager: pluggy.PluginManager, run: RunContext) -> None:
    def closed() -> None:
        # What rich does with a broken pipe.
        try:
            raise BrokenPipeError(32, "Broken pipe")
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904

    tracker = Ending()
    Observers(manager, [("tracker", tracker), ("terminal", Ending(closed))]).run_finished(run, {})
    assert tracker.heard == ["finished"]
    assert re.search(r"'terminal'.*grpox_run_finished.*BrokenPipeError: \[Errno 32\]", LOGGED.getvalue())


def test_pluggys_order_is_kept(manager: pluggy.PluginManager, run: RunContext) -> None:
    order: list[str] = []

    def named(name: str, **options: bool) -> tuple[str, object]:
        return name, hooks(lambda: order.append(name), "grpox_step_finished", **options)

    both = named("last", trylast=True), named("first", tryfirst=True)
    Observers(manager, [*both, named("older"), named("newer")]).step_finished(run, 1, {})
    assert order == ["first", "newer", "older", "last"]
    # One process can observe two runs.
    first, second, failed = Listener(), Listener(), RuntimeError("the first run")
    Observers(manager, [("listener", first)]).run_failed(run, failed)
    Observers(manager, [("listener", second)]).step_finished(run, 1, {})
    assert (first.heard, second.heard) == ([failed], [(1, {})])


class Misspelt:
    @hookimpl
    def grpox_step_finishd(self, step: int) -> None: ...


class UnknownArgument:
    @hookimpl
    def grpox_step_finished(self, stepp: int) -> None: ...


def wraps() -> Any:
    return (yield)


PLAIN: dict[str, Any] = {"grpox_step_finished": lambda step: None}
HALF = PLAIN | {"grpox_evaluated": hookimpl(lambda step: None)}
ARGUMENTS = r"no argument 'stepp'; did you mean step\? \(it has run, step, metrics, control\)"
DEAF = [
    (Misspelt(), "no hook grpox_step_finishd; did you mean grpox_step_finished"),
    (UnknownArgument(), ARGUMENTS),
    (SimpleNamespace(**PLAIN), "mark it with @grpox.hookimpl"),
    (SimpleNamespace(**HALF), "mark it with @grpox.hookimpl"),
    (object(), "implements no lifecycle hook"),
    (hooks(wraps, "grpox_step_finished", wrapper=True), "grpox_step_finished is a hook wrapper"),
]


@pytest.mark.parametrize(("observer", "reason"), DEAF)
def test_a_deaf_observer_is_refused(manager: pluggy.PluginManager, observer: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        Observers(manager, [("good", Listener()), ("mine", observer)])
    assert caught.value.problems[0].key == "tracking.mine"
    assert manager.get_plugins() == set()


def test_every_argument_of_a_lifecycle_hook_is_passed_to_it() -> None:
    called: dict[str, set[str]] = {}
    manager = new_manager()
    lifecycle = [
        name for name in vars(manager.hook) if name not in (*hookspecs.KINDS.values(), "grpox_commands")
    ]

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
    for call in (observers.step_finished, observers.evaluated, observers.alarm_raised):
        call(context, 1, {})
    observers.checkpoint_saved(context, 1, context)
    observers.run_finished(context, {})
    another = Observers(manager, [("all", All)])
    another.run_failed(context, ValueError())
    of_sweep = Observers(manager, [("all", All)])
    of_sweep.sweep_started(context)
    of_sweep.tracked_run(context)
    of_sweep.sweep_run_ended(context, context)
    of_sweep.sweep_finished(context, context, "FINISHED")
    assert not observers.failures + another.failures + of_sweep.failures
    assert called == {name: set(getattr(manager.hook, name).spec.argnames) for name in lifecycle}
