"""Calls lifecycle hooks one implementation at a time, so that a broken observer cannot end a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pluggy

from grpox.contracts import RunContext, SweepContext
from grpox.errors import ConfigError, Problem, RunFailed, describe, left_by_rich, text_of
from grpox.errors.redaction import redact
from grpox.observing.control import RunControl
from grpox.plugins.loader import InvalidPlugin, check_hooks
from grpox.runtime.foreign_code import copied
from grpox.runtime.logs import get_logger
from grpox.runtime.signals import first_signal_waits, may_be_signal, raise_if_signal, raise_if_signalled

if TYPE_CHECKING:
    from pluggy import HookImpl

    from grpox.contracts import ScoredRollout, SweepResults


class Observers:
    """The observers of one run: the selected ones, and every plugin module that implements a lifecycle hook.

    Implementations are called in pluggy's order (`tryfirst` first, then the latest registered). A selected
    observer that raises in `run_started` ends the run; every other failure is a warning, logged once per
    observer and hook, and counted in `failures`. Selected observers are unregistered when the run ends, so that
    one process can train twice.

    Args:
        manager: has grpox's hook specs and the discovered plugins.
        selected: (name, instance) of each selected observer.

    Raises:
        ConfigError: a selected observer implements no lifecycle hook, or one that does not exist.
    """

    def __init__(self, manager: pluggy.PluginManager, selected: Sequence[tuple[str, object]]) -> None:
        self.failures: Counter[tuple[str, str]] = Counter()
        """(observer, hook) -> number of failures; the total is the metric ``observers/failures``."""
        self.first_failure = ""
        """Name of the observer that failed first, and its error."""
        self._manager = manager
        self._selected: dict[int, str] = {}
        self._contexts: dict[int, tuple[object, Any]] = {}
        """Identity of an observer -> the context of the run or sweep, and the observer's copy of it."""
        for name, observer in selected:
            self._register(name, observer)

    def run_started(self, run: RunContext) -> None:
        """Report the start of the run; raises RunFailed if a selected observer cannot start.

        The caller then calls `run_failed`, so that observers that have started can close their resources.
        """
        self._tell("grpox_run_started", is_start=True, run=run)

    def rollouts_scored(self, run: RunContext, step: int, rollouts: Sequence[ScoredRollout]) -> None:
        self._tell("grpox_rollouts_scored", run=run, step=step, rollouts=rollouts)

    @property
    def uses_control(self) -> bool:
        """True if an observer names the argument `control` of a hook."""
        hook = self._manager.hook
        callers = (hook.grpox_step_finished, hook.grpox_evaluated, hook.grpox_alarm_raised)
        return any("control" in impl.argnames for caller in callers for impl in caller.get_hookimpls())

    def step_finished(
        self, run: RunContext, step: int, metrics: Mapping[str, float], control: RunControl | None = None
    ) -> None:
        self._tell("grpox_step_finished", run=run, step=step, metrics=ReadOnlyMetrics(metrics), control=control)

    def evaluated(
        self, run: RunContext, step: int, metrics: Mapping[str, float], control: RunControl | None = None
    ) -> None:
        self._tell("grpox_evaluated", run=run, step=step, metrics=ReadOnlyMetrics(metrics), control=control)

    def alarm_raised(
        self, run: RunContext, step: int, alarm: Mapping[str, Any], control: RunControl | None = None
    ) -> None:
        self._tell("grpox_alarm_raised", run=run, step=step, alarm=alarm, control=control)

    def checkpoint_saved(self, run: RunContext, step: int, path: Path) -> None:
        self._tell("grpox_checkpoint_saved", run=run, step=step, path=path)

    def run_failed(self, run: RunContext, error: BaseException) -> None:
        """Report that `error` ended the run, and unregister the selected observers."""
        self._end("grpox_run_failed", run=run, error=error)

    def run_finished(self, run: RunContext, summary: Mapping[str, object]) -> None:
        """Report that the run is complete, and unregister the selected observers.

        A signal that arrives meanwhile is raised after the last observer.
        """
        self._end("grpox_run_finished", run=run, summary=summary)
        raise_if_signalled()

    def sweep_started(self, sweep: SweepContext) -> dict[str, str]:
        """Report the start of a sweep; raises RunFailed if a selected observer cannot start.

        Returns:
            environment variables for the sweep's runs, from all observers.
        """
        answers = self._tell("grpox_sweep_started", is_start=True, sweep=sweep)
        return {name: value for answer in answers if answer is not None for name, value in answer.items()}

    def sweep_run_ended(self, sweep: SweepContext, results: SweepResults) -> None:
        """Report the end of a sweep's run."""
        self._tell("grpox_sweep_run_ended", sweep=sweep, results=results)

    def sweep_finished(self, sweep: SweepContext, results: SweepResults, status: str) -> None:
        """Report the end of a sweep, and unregister the selected observers."""
        self._end("grpox_sweep_finished", sweep=sweep, results=results, status=status)
        raise_if_signalled()

    def tracked_run(self, folder: Path) -> str | None:
        """Return the id of the run in `folder` from the first tracker that has one."""
        answers = self._tell("grpox_tracked_run", folder=folder)
        return next((str(answer) for answer in answers if answer is not None), None)

    def _register(self, name: str, observer: object) -> None:
        self._selected[id(observer)] = name
        try:
            if not check_hooks(observer).get_hookcallers(observer):
                raise ValueError("it implements no lifecycle hook")
            self._manager.register(observer, name=f"observer:{name}")
        except (InvalidPlugin, ValueError) as error:
            self._unregister()
            problem = Problem(f"cannot be used as an observer: {text_of(error)}", key=f"tracking.{name}")
            raise ConfigError(problem) from error

    def _unregister(self) -> None:
        for name in self._selected.values():
            if self._manager.has_plugin(f"observer:{name}"):
                self._manager.unregister(name=f"observer:{name}")
        self._selected.clear()
        self._contexts.clear()

    def _end(self, hook: str, **arguments: Any) -> None:
        with first_signal_waits():
            self._tell(hook, **arguments)
            self._unregister()

    def _tell(self, hook: str, *, is_start: bool = False, **arguments: object) -> list[Any]:
        """Call a hook's implementations.

        Args:
            is_start: a failure of a selected observer ends the run.
        """
        answers = []
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        for impl in reversed(caller.get_hookimpls()):
            try:
                own = [self._copy_for(impl.plugin, arguments[name]) for name in impl.argnames]
                answers.append(impl.function(*own))
            except BaseException as error:  # any error of a plugin: it becomes RunFailed or a warning
                if isinstance(error, KeyboardInterrupt) and may_be_signal():
                    raise
                if is_start:
                    raise_if_signal(error)
                    if left_by_rich(error):
                        raise
                    if id(impl.plugin) in self._selected:
                        message = f"observer {self._name(impl)!r} cannot start: {_error_message(error)}"
                        raise RunFailed(message) from error
                self.note_failure(self._name(impl), hook, error)
        return answers

    def _copy_for(self, observer: object, value: Any) -> Any:
        """Return an argument of a hook as `observer` gets it, so that no observer changes the data of others.

        Exceptions and the run's control are shared, metrics are read-only, and everything else is copied: the
        context, with its long config, once for each observer.
        """
        if isinstance(value, int | str | BaseException | ReadOnlyMetrics | RunControl | None):
            return value
        if isinstance(value, RunContext | SweepContext):
            before, own = self._contexts.get(id(observer), (None, None))
            if before is not value:
                own = copied(value)
                own.config.make_read_only()
                self._contexts[id(observer)] = value, own
            return own
        if isinstance(value, Sequence):  # tuples, such as the many tokens of rollouts, are not copied
            rows = []
            for each in value:
                extra = copied(dict(each.extra)) if each.extra else {}
                rows.append(replace(each, rewards=dict(each.rewards), extra=extra))
            return rows
        return copied(value)

    def note_failure(self, name: str, hook: str, error: BaseException) -> None:
        """Count a failure of an observer, and warn of the first one in `hook`."""
        self.failures[name, hook] += 1
        if self.failures[name, hook] == 1:
            message = f"observer {name!r} failed in {hook}: {_error_message(error)}"
            self.first_failure = self.first_failure or message
            get_logger(__name__).warning(
                "%s\n    the run continues; further failures there are only counted (observers/failures)",
                message,
            )

    def _name(self, impl: HookImpl) -> str:
        return self._selected.get(id(impl.plugin), impl.plugin_name)


class ReadOnlyMetrics(dict[str, float]):
    """Metrics that all observers share: a plain dict to read, for json too, that refuses changes."""

    def _refuse(self, *arguments: Any, **named: Any) -> NoReturn:
        raise TypeError("metrics are read-only; dict(metrics) is a copy that may be changed")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy may be changed


def _error_message(error: BaseException) -> str:
    """Return the message of an error, with the type in front unless it is grpox's own."""
    if left_by_rich(error) and error.__context__ is not None:
        error = error.__context__
    message = text_of(error) if isinstance(error, RunFailed | ConfigError) else describe(error)
    return redact(message)
