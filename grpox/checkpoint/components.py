"""The instances of all components that a run selects: the steps that they follow, and their states.

A checkpoint has one state per component, the same on all ranks: plain values and tensors only, which
``weights_only=True`` can read. Rank 0 writes the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpox.checkpoint.rank_state import read_state
from grpox.contracts import StatisticReduction, StepContext, TrainerState
from grpox.data.schedule import StepPlan
from grpox.errors import ConfigError, Problem, RunFailed
from grpox.observing.observers import Observers
from grpox.plugins.component_state import (
    NotPlain,
    attribute_hashes,
    changed_attributes,
    plain_state,
    state_hashes,
)
from grpox.plugins.optional_methods import (
    STEPS,
    has_method,
    has_state,
    is_stateless,
    methods_problem,
    statistics_of,
)
from grpox.policy.batch import Sample
from grpox.rollout.rewards.process import RemoteComponent, RewardProcess
from grpox.runfile.load import ResolvedRun
from grpox.runtime.foreign_code import call
from grpox.runtime.logs import get_logger
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World, on_every_rank
from grpox.update.step_statistics import StepStatistics

logger = get_logger(__name__)
FILE = "components.pt"


@dataclass(frozen=True)
class RunComponent:
    """An instance of a component that the run uses."""

    key: str
    """Dotted key in the run file, for example ``loss`` or ``rewards[0]``."""
    kind: str
    label: str
    instance: Any
    distribution: str | None = None
    """Distribution of the plugin; None for an object given by path or in Python."""
    version: str | None = None

    def __str__(self) -> str:
        origin = f" of {self.distribution} {self.version}" if self.distribution else ""
        return f"{self.kind} '{self.label}'{origin}"

    def state(self) -> dict[str, Any]:
        """Return its state as plain values and CPU tensors.

        Raises:
            RunFailed: state_dict raised or returned what a checkpoint cannot hold.
        """
        try:
            return plain_state(call(self.kind, self.instance.state_dict))
        except NotPlain as error:
            raise RunFailed(f"{self}: {error}") from error

    def attribute_hashes(self) -> dict[str, str]:
        """Hash its attributes, in its own process where it has one."""
        remote = isinstance(self.instance, RemoteComponent)
        return self.instance.attribute_hashes() if remote else attribute_hashes(self.instance)

    def is_saved_in(self, entry: Mapping[str, Any]) -> bool:
        """Tell whether an entry of the file is of this component, in whatever version."""
        saved = (entry["kind"], entry["name"], entry["distribution"])
        return saved == (self.kind, self.label, self.distribution)


class RunComponents:
    """Key of the run file -> the run's component on this rank; observers are on rank 0 only."""

    def __init__(self, run: ResolvedRun, world: World, times: PhaseTimes) -> None:
        self._run = run
        self.by_key: dict[str, RunComponent] = {}
        self.statistics = StepStatistics({})
        self._world = world
        self._times = times
        self._observers: Observers | None = None
        self.has_begin_step = self.has_end_step = False
        """True if a component of any rank has this method."""
        self._followers: dict[str, list[RunComponent]] = {}
        """``begin_step`` or ``end_step`` -> the components that have this method."""
        self._before: dict[str, dict[str, str]] | None = None
        """Hashes of the attributes of components without state, until the first checkpoint."""

    def build(self, key: str) -> Any:
        """Build the component under `key` of the run file, and add it."""
        instance = self._run.build(key)
        self.add(key, instance)
        return instance

    def add(self, key: str, instance: Any) -> None:
        """Add the instance of the component under `key`, or the process that has it."""
        bound = self._run.components[key]
        origin = (None, None) if bound.offer is None else (bound.offer.distribution, bound.offer.version)
        instance = RemoteComponent(instance) if isinstance(instance, RewardProcess) else instance
        self.by_key[key] = RunComponent(key, bound.kind, bound.label, instance, *origin)

    def add_callback(self, key: str, observer: object) -> tuple[str, object]:
        """Add an observer given in Python; return its name in messages, and itself."""
        label = type(observer).__name__
        self.by_key[key] = RunComponent(key, "observer", label, observer)
        return f"{label}, {key}", observer

    def complete(self, observers: Observers, beta: float) -> None:
        """Check the optional methods of all components, once all are added; a collective.

        Raises:
            ConfigError: a component asks for what no step has, or its optional methods do not fit together.
        """
        self._observers = observers
        wanted: dict[tuple[str, StatisticReduction], str] = {}
        components = self.by_key.values()
        for component in components:
            if problem := methods_problem(component.instance):
                raise ConfigError(f"{component} {problem}", component.key)
            statistics = statistics_of(component.instance)
            if "kl" in statistics and beta == 0:
                what = f"{component} asks for the statistic 'kl', and the run has no reference"
                raise ConfigError(what, component.key, allowed="train.beta above 0")
            wanted |= {(name, reduction): str(component) for name, reduction in statistics.items()}
        for method in STEPS:
            self._followers[method] = [each for each in components if has_method(each.instance, method)]
        begins = bool(self._followers["begin_step"])
        ends = bool(self._followers["end_step"] or self._restartable)
        # Rank 0 alone has the observers.
        own = [(wanted, begins, ends)] if self._world.is_main else []
        [(wanted, self.has_begin_step, self.has_end_step)] = self._world.gather(own)
        self.statistics = StepStatistics(wanted)

    @property
    def _restartable(self) -> list[RunComponent]:
        """Components with state in a process that may be started again."""
        remote = (each for each in self.by_key.values() if isinstance(each.instance, RemoteComponent))
        return [each for each in remote if has_state(each.instance)]

    def begin_step(self, step: int, progress: TrainerState) -> None:
        """Call `begin_step` of all components; a collective, if any component has it.

        Raises:
            RunFailed: a component raised.
        """
        context = StepContext(step, progress.max_steps, progress.epoch)
        calls = [(each, context) for each in self._followers["begin_step"]]
        on_every_rank(self._world, self._times, lambda: self._call_all(calls, "begin_step"))

    def end_step(self, plan: StepPlan, micro_batches: Sequence[Sequence[Sample]]) -> None:
        """Call `end_step` of all components with their statistics; a collective, if any component has it.

        Args:
            micro_batches: this rank's samples of the step.

        Raises:
            RunFailed: a component raised.
        """
        wanted = self.statistics.wanted
        values = self.statistics.reduce(plan, micro_batches, self._world) if wanted else {}

        def end() -> None:
            calls = []
            for each in self._followers["end_step"]:
                names = statistics_of(each.instance).items()
                own = {name: values[name, reduction] for name, reduction in names}
                # Tensors as copies, which it may change.
                copies = {n: value if isinstance(value, float) else value.clone() for n, value in own.items()}
                calls.append((each, copies))
            self._call_all(calls, "end_step")
            for component in self._restartable:  # a process that is started again begins with this
                component.state()

        on_every_rank(self._world, self._times, end)

    def _call_all(self, calls: Sequence[tuple[RunComponent, object]], method: str) -> None:
        for component, argument in calls:
            try:
                call(component.kind, getattr(component.instance, method), argument)
            except RunFailed as error:
                if component.kind != "observer" or self._observers is None:
                    raise
                self._observers.note_failure(component.label, method, error)  # an observer cannot end a run

    def start(self) -> None:
        """Read the states once, so that one that no checkpoint can hold ends the run before its first step.

        A reward in a process of its own notes its state for the next process. Of components without state the
        attributes are hashed, for the first checkpoint to compare.

        Raises:
            RunFailed: a state cannot be saved.
        """

        def start() -> None:
            for component in self._stateful().values():
                component.state()
            self._before = {
                key: component.attribute_hashes()
                for key, component in self.by_key.items()
                if not has_state(component.instance) and not is_stateless(component.instance)
            }

        on_every_rank(self._world, self._times, start)

    def _stateful(self) -> dict[str, RunComponent]:
        return {key: each for key, each in self.by_key.items() if has_state(each.instance)}

    def saved(self) -> dict[str, dict[str, Any]]:
        """Return the content of the file: key -> kind, name, distribution, version and state; a collective.

        Raises:
            RunFailed: a state cannot be saved, or differs between ranks.
        """
        entries = on_every_rank(self._world, self._times, self._entries)
        if self._world.size == 1:
            return entries
        shared = [key for key in entries if self.by_key[key].kind != "observer"]
        ranks = self._world.gather([{key: state_hashes(entries[key]["state"]) for key in shared}])
        for key in shared:
            others = [rank for rank, states in enumerate(ranks) if states.get(key) != ranks[0][key]]
            if others:
                paths = changed_attributes(ranks[0][key], ranks[others[0]].get(key, {}))
                raise RunFailed(
                    f"{self.by_key[key]} ({key}) has another state on rank "
                    f"{', '.join(map(str, others))} than on rank 0, at {', '.join(paths[:3])}: a run has one "
                    "state per component. Ranks call a component for their own parts of a batch: change the "
                    "state in end_step, whose statistics are the same on all ranks (docs/state-and-steps.md)"
                )
        return entries

    def _entries(self) -> dict[str, dict[str, Any]]:
        self._warn_of_changes()
        return {
            key: {
                "kind": component.kind,
                "name": component.label,
                "distribution": component.distribution,
                "version": component.version,
                "state": component.state(),
            }
            for key, component in self._stateful().items()
        }

    def _warn_of_changes(self) -> None:
        before, self._before = self._before, None
        for key, hashes in (before or {}).items():
            component = self.by_key[key]
            changed = changed_attributes(hashes, component.attribute_hashes())
            if changed and self._world.is_main:
                logger.warning(
                    "%s (%s) changes %s between calls and has no state_dict: a resumed run begins without "
                    "that. Give it state_dict and load_state_dict, or declare stateless = True "
                    "(docs/state-and-steps.md)",
                    component,
                    key,
                    ", ".join(f"its attribute {name}" for name in changed[:3]),
                )

    def restore(self, folder: Path, allow: bool = False) -> None:
        """Restore the states in the checkpoint `folder`; a collective.

        Args:
            allow: a component whose state is missing or cannot be restored begins anew, with a warning.

        Raises:
            ConfigError: components and states do not belong together, or a load_state_dict raised.
        """
        on_every_rank(self._world, self._times, lambda: self._restore(folder, allow))

    def _restore(self, folder: Path, allow: bool) -> None:
        saved = read_state(folder / FILE)
        misfits = [self._misfit(key, entry) for key, entry in saved.items()]
        misfits += [self._load(component, saved.get(key)) for key, component in self._stateful().items()]
        if not (problems := [problem for problem in misfits if problem]):
            return
        if not allow:
            cure = "the run as it was saved; `grpox train` with --allow-changes goes on all the same"
            raise ConfigError([Problem(f"cannot go on from {folder}", allowed=cure), *problems])
        if self._world.is_main:
            lines = "\n".join(f"    {each}" for each in problems)
            logger.warning("going on in spite of states that are not restored:\n%s", lines)

    def _load(self, component: RunComponent, entry: Mapping[str, Any] | None) -> Problem | None:
        """Restore the state of a component from its entry; return the problem if that fails."""
        if entry is None or not component.is_saved_in(entry):
            what = f"{component} has a state, and the checkpoint holds none of it: it would begin anew"
            return Problem(what, component.key)
        try:
            call(component.kind, component.instance.load_state_dict, entry["state"])
        except RunFailed as error:
            of_version = f" of version {entry['version']}" if entry["version"] else ""
            return Problem(f"{component} cannot restore its state{of_version}: {error}", component.key)
        return None

    def _misfit(self, key: str, entry: Mapping[str, Any]) -> Problem | None:
        """Return the problem with an entry that no component of this rank can load; None if one can."""
        component = self.by_key.get(key)
        is_same = component is not None and component.is_saved_in(entry)
        if (is_same and key in self._stateful()) or (entry["kind"] == "observer" and not self._world.is_main):
            return None
        origin = f" of {entry['distribution']} {entry['version']}" if entry["distribution"] else ""
        lacks = "which has no load_state_dict now" if is_same else "which the run does not use there"
        what = f"the checkpoint holds a state of {entry['kind']} '{entry['name']}'{origin}, {lacks}"
        return Problem(what, key)
