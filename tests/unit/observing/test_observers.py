"""Observers are called one by one: a broken one is named and counted, and the others hear everything."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pluggy
import pytest
from support.handlers import handlers_kept
from support.logs import LOGGED, LoggedText

from grpox.config import RunConfig
from grpox.contracts import Rollout, RunContext, ScoredRollout
from grpox.errors import ConfigError, RunFailed
from grpox.observing.observers import Observers
from grpox.plugins import hookspecs
from grpox.plugins.hookspecs import hookimpl
from grpox.plugins.loader import new_manager
from grpox.runtime import signals
from grpox.runtime.signals import install_handlers

CONFIG = RunConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": ["math"]})


@pytest.fixture
def run(tmp_path: Path) -> RunContext:
    return RunContext(CONFIG, tmp_path, 10, 1, {"grpox": "0.1.0"}, None, "run.yaml")


@pytest.fixture
def manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager("grpox")
    manager.add_hookspecs(hookspecs)
    return manager


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


def observers(manager: pluggy.PluginManager, *selected: tuple[str, object]) -> tuple[Observers, LoggedText]:
    output = LOGGED
    return Observers(manager, selected), output


@pytest.mark.parametrize("order", [("broken", "listener"), ("listener", "broken")])
def test_a_failure_is_told_once_and_counted_and_others_get_the_call(
    manager: pluggy.PluginManager, run: RunContext, order: Sequence[str]
) -> None:
    both: dict[str, Any] = {"broken": Broken(), "listener": Listener()}
    told, output = observers(manager, *((name, both[name]) for name in order))
    for step in (1, 2, 3):
        told.step_finished(run, step, {})
    assert both["listener"].heard == [(1, {}), (2, {}), (3, {})]
    assert told.failures == {("broken", "grpox_step_finished"): 3}
    [line] = [line for line in output.getvalue().splitlines() if "ValueError" in line]
    assert "'broken' failed in grpox_step_finished: ValueError: cannot count [beyond] three" in line


def test_a_plugin_nobody_selected_cannot_keep_the_run_from_starting(
    manager: pluggy.PluginManager, run: RunContext
) -> None:
    module = ModuleType("someones_plugin")
    module.grpox_run_started = Broken().grpox_run_started  # type: ignore[attr-defined]
    manager.register(module, name="someones-dist:plugin")
    told, output = observers(manager)
    told.run_started(run)
    for fact in ("'someones-dist:plugin'", "grpox_run_started", "OSError: no room left"):
        assert fact in output.getvalue()


def test_an_interrupt_inside_an_observer_is_not_taken_for_its_failure(
    manager: pluggy.PluginManager, run: RunContext
) -> None:
    def interrupted(step: int) -> None:
        raise KeyboardInterrupt

    told, _ = observers(manager, ("slow", SimpleNamespace(grpox_step_finished=hookimpl(interrupted))))
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

    hooks = dict.fromkeys(("grpox_run_started", "grpox_step_finished"), hookimpl(raises))
    listener = Listener()
    told, output = observers(manager, ("listener", listener), ("broken", SimpleNamespace(**hooks)))
    with handlers_kept():
        install_handlers()
        with pytest.raises(RunFailed, match=f"observer 'broken' cannot start: {text}") as caught:
            told.run_started(run)
        told.step_finished(run, 1, {})
    assert caught.value.__cause__ is error
    assert f"observer 'broken' failed in grpox_step_finished: {text}" in output.getvalue()
    assert listener.heard == [(1, {})]


def test_changes_of_an_observer_affect_neither_others_nor_the_run(
    manager: pluggy.PluginManager, run: RunContext
) -> None:
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

    class Hears(Listener):
        @hookimpl
        def grpox_run_started(self, run: RunContext) -> None:
            self.heard.append((run.config.train.max_steps, run.versions))

        @hookimpl
        def grpox_rollouts_scored(self, rollouts: Sequence[ScoredRollout]) -> None:
            self.heard.append(rollouts)

        @hookimpl
        def grpox_evaluated(self, metrics: Mapping[str, float]) -> None:
            self.heard.append(metrics)

        @hookimpl
        def grpox_run_finished(self, summary: Mapping[str, object]) -> None:
            self.heard.append(summary)

    rollout = Rollout(0, 0, (1,), (2,), "stop", 0)
    scored = ScoredRollout(rollout, "p", "c", {"judge": 1.0}, 1.0, 0.0, {"note": ["a"]})
    given: Any = [scored], {"loss": 1.0}, {"accuracy": 0.5}, {"stopped_early": {"step": 1}}
    whole = copy.deepcopy(given)
    as_it_was = run.config.train.max_steps, dict(run.versions)
    hears = Hears()
    told, _ = observers(manager, ("hears", hears), ("vandal", Vandal()))
    told.run_started(run)
    told.rollouts_scored(run, 1, given[0])
    told.step_finished(run, 1, given[1])
    told.evaluated(run, 1, given[2])
    told.run_finished(run, given[3])
    assert (run.config.train.max_steps, run.versions) == as_it_was
    assert given == whole
    assert hears.heard == [as_it_was, whole[0], (1, whole[1]), whole[2], whole[3]]
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


@pytest.fixture
def _no_signal_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_received", [])


@pytest.mark.usefixtures("_no_signal_yet")
def test_sigterm_at_the_end_of_a_run_waits_until_all_know_and_does_not_replace_a_failure(
    manager: pluggy.PluginManager, run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, struck = Ending(), Ending(terminate)
    told, _ = observers(manager, ("tracker", tracker), ("struck", struck))
    with pytest.raises(signals.Terminated):
        told.run_finished(run, {})
    assert (struck.heard, tracker.heard) == (["finished"], ["finished"])
    monkeypatch.setattr(signals, "_received", [])
    told, _ = observers(manager, ("tracker", tracker), ("struck", struck))
    told.run_failed(run, RunFailed("a reward raised"))
    assert tracker.heard == ["finished", "failed"]


@pytest.mark.usefixtures("_no_signal_yet")
def test_a_second_signal_is_raised_at_once(manager: pluggy.PluginManager, run: RunContext) -> None:
    tracker, struck = Ending(), Ending(terminate)
    told, _ = observers(manager, ("tracker", tracker), ("struck", struck))
    with pytest.raises(signals.Terminated):
        terminate()  # the first one, which ended the run
    with pytest.raises(signals.Terminated):
        told.run_failed(run, signals.Terminated())
    assert tracker.heard == []


def test_a_terminal_that_has_gone_does_not_end_the_run(manager: pluggy.PluginManager, run: RunContext) -> None:
    def closed() -> None:
        # What rich does with a broken pipe.
        try:
            raise BrokenPipeError(32, "Broken pipe")
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904

    tracker = Ending()
    told, output = observers(manager, ("tracker", tracker), ("terminal", Ending(closed)))
    told.run_finished(run, {})
    assert tracker.heard == ["finished"]
    for fact in ("'terminal'", "grpox_run_finished", "BrokenPipeError: [Errno 32]"):
        assert fact in output.getvalue()


def test_pluggys_order_is_kept(manager: pluggy.PluginManager, run: RunContext) -> None:
    order: list[str] = []

    def named(name: str, **options: bool) -> SimpleNamespace:
        def heard(step: int) -> None:
            order.append(name)

        return SimpleNamespace(grpox_step_finished=hookimpl(**options)(heard))

    told, _ = observers(
        manager, ("last", named("last", trylast=True)), ("first", named("first", tryfirst=True)),
        ("older", named("older")), ("newer", named("newer")),
    )  # fmt: skip
    told.step_finished(run, 1, {})
    assert order == ["first", "newer", "older", "last"]


def test_a_wrapper_is_refused_with_a_reason(manager: pluggy.PluginManager) -> None:
    class Wrapper:
        @hookimpl(wrapper=True)
        def grpox_step_finished(self) -> Any:
            return (yield)

    with pytest.raises(ConfigError) as caught:
        observers(manager, ("wrapper", Wrapper()))
    [problem] = caught.value.problems
    assert problem.key == "tracking.wrapper"
    assert "grpox_step_finished is a hook wrapper" in problem.what
    assert not manager.has_plugin("observer:wrapper")


def test_one_process_can_observe_two_runs(manager: pluggy.PluginManager, run: RunContext) -> None:
    first, second = Listener(), Listener()
    failed = RuntimeError("the first run")
    told, _ = observers(manager, ("listener", first))
    told.run_failed(run, failed)
    told, _ = observers(manager, ("listener", second))
    told.step_finished(run, 1, {})
    assert first.heard == [failed]
    assert second.heard == [(1, {})]


class Misspelt:
    @hookimpl
    def grpox_step_finishd(self, step: int) -> None: ...


class UnknownArgument:
    @hookimpl
    def grpox_step_finished(self, stepp: int) -> None: ...


class Deaf:
    def grpox_step_finished(self, step: int) -> None:
        """Not marked, and so never called."""


class HalfDeaf(Deaf):
    @hookimpl
    def grpox_evaluated(self, step: int) -> None:
        """Hear of evaluations alone."""


@pytest.mark.parametrize(
    ("observer", "reason"),
    [
        (Misspelt(), "no hook grpox_step_finishd; did you mean grpox_step_finished"),
        (UnknownArgument(), r"no argument 'stepp'; did you mean step\? \(it has run, step, metrics, control\)"),
        (Deaf(), "mark it with @grpox.hookimpl"),
        (HalfDeaf(), "mark it with @grpox.hookimpl"),
        (object(), "implements no lifecycle hook"),
    ],
)
def test_an_observer_that_would_hear_nothing_is_refused(
    manager: pluggy.PluginManager, observer: object, reason: str
) -> None:
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
    observers.step_finished(context, 1, {})
    observers.evaluated(context, 1, {})
    observers.alarm_raised(context, 1, {})
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
