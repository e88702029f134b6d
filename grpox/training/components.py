"""The instances of all components that a run selects: their states, and the steps that they follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from grpox.checkpoint.component_states import ComponentStates, RunComponent
from grpox.contracts import StatisticReduction, StepContext, TrainerState
from grpox.data.schedule import StepPlan
from grpox.errors import ConfigError, RunFailed
from grpox.observing.observers import Observers
from grpox.plugins.optional_methods import has_method, has_state, methods_problem, statistics_of
from grpox.policy.batch import Sample
from grpox.rollout.rewards.process import RemoteComponent, RewardProcess
from grpox.runfile.load import ResolvedRun
from grpox.runtime.foreign_code import call
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World, on_every_rank
from grpox.update.step_statistics import Statistics, StepStatistics


class RunComponents:
    """Key of the run file -> the run's component on this rank; observers are on rank 0 only."""

    def __init__(self, run: ResolvedRun, world: World, times: PhaseTimes) -> None:
        self._run = run
        self._components: dict[str, RunComponent] = {}
        self.states = ComponentStates(self._components, world, times)
        self.statistics = StepStatistics({})
        self._world = world
        self._times = times
        self._observers: Observers | None = None
        self._followers: dict[str, list[RunComponent]] = {}
        """``begin_step`` or ``end_step`` -> the components that have this method."""
        self._follows_steps: dict[str, bool] = {}
        """Method -> True if a component of any rank has it."""

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
        self._components[key] = RunComponent(key, bound.kind, bound.label, instance, *origin)

    def add_callback(self, key: str, observer: object) -> tuple[str, object]:
        """Add an observer given in Python; return its name in messages, and itself."""
        label = type(observer).__name__
        self._components[key] = RunComponent(key, "observer", label, observer)
        return f"{label}, {key}", observer

    def complete(self, observers: Observers, beta: float) -> None:
        """Check the optional methods of all components, once all are added; a collective.

        Raises:
            ConfigError: a component asks for what no step has, or its optional methods do not fit together.
        """
        self._observers = observers
        wanted: dict[tuple[str, StatisticReduction], str] = {}
        for component in self._components.values():
            wanted |= _wanted_by(component, beta)
        for method in ("begin_step", "end_step"):
            with_it = [each for each in self._components.values() if has_method(each.instance, method)]
            self._followers[method], self._follows_steps[method] = with_it, bool(with_it)
        self._follows_steps["end_step"] |= bool(self._restartable)
        # Rank 0 alone has the observers.
        own = [(wanted, self._follows_steps)] if self._world.is_main else []
        [(wanted, self._follows_steps)] = self._world.gather(own)
        self.statistics = StepStatistics(wanted)

    @property
    def _restartable(self) -> list[RunComponent]:
        """Components with state in a process that may be started again."""
        remote = (each for each in self._components.values() if isinstance(each.instance, RemoteComponent))
        return [each for each in remote if has_state(each.instance)]

    def start(self) -> None:
        """Note the attributes and states of components before the first step of this process; a collective."""
        on_every_rank(self._world, self._times, self.states.begin)

    def begin_step(self, step: int, progress: TrainerState) -> None:
        """Call `begin_step` of all components; a collective where one has it.

        Raises:
            RunFailed: a component raised.
        """
        context = StepContext(step, progress.max_steps, progress.epoch)
        if self._follows_steps["begin_step"]:
            begun = [(each, context) for each in self._followers["begin_step"]]
            on_every_rank(self._world, self._times, lambda: self._call_all(begun, "begin_step"))

    def end_step(self, plan: StepPlan, micro_batches: Sequence[Sequence[Sample]]) -> None:
        """Call `end_step` of all components with their statistics; a collective where one has it.

        Args:
            micro_batches: this rank's samples of the step.

        Raises:
            RunFailed: a component raised.
        """
        values = self.statistics.reduce(plan, micro_batches, self._world)

        def end() -> None:
            followers = self._followers["end_step"]
            self._call_all([(each, _own_values(each, values)) for each in followers], "end_step")
            for component in self._restartable:  # a process that is started again begins with this
                component.state()

        if self._follows_steps["end_step"]:
            on_every_rank(self._world, self._times, end)

    def _call_all(self, calls: Sequence[tuple[RunComponent, object]], method: str) -> None:
        for component, argument in calls:
            try:
                call(component.kind, getattr(component.instance, method), argument)
            except RunFailed as error:
                if component.kind != "observer" or self._observers is None:
                    raise
                self._observers.note_failure(component.label, method, error)  # an observer cannot end a run


def _own_values(component: RunComponent, values: Statistics) -> dict[str, float | Tensor]:
    """Return the statistics that a component asks for, tensors as copies, which it may change."""
    own = {name: values[name, reduction] for name, reduction in statistics_of(component.instance).items()}
    return {name: value if isinstance(value, float) else value.clone() for name, value in own.items()}


def _wanted_by(component: RunComponent, beta: float) -> Mapping[tuple[str, StatisticReduction], str]:
    """Return the statistics that a component asks for, with its description; ConfigError if no step has one."""
    if problem := methods_problem(component.instance):
        raise ConfigError(f"{component} {problem}", component.key)
    statistics = statistics_of(component.instance)
    if "kl" in statistics and beta == 0:
        what = f"{component} asks for the statistic 'kl', and the run has no reference"
        raise ConfigError(what, component.key, allowed="train.beta above 0")
    return {(name, reduction): str(component) for name, reduction in statistics.items()}
