"""States of the run's components in a checkpoint: one state per component, the same on all ranks.

They have plain values and tensors only, which ``weights_only=True`` can read. Rank 0 writes the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpox.checkpoint.rank_state import read_state
from grpox.errors import ConfigError, Problem, RunFailed
from grpox.plugins.component_state import (
    NotPlain,
    attribute_hashes,
    changed_attributes,
    plain_state,
    state_hashes,
)
from grpox.plugins.optional_methods import has_state, is_stateless
from grpox.rollout.rewards.process import RemoteComponent
from grpox.runtime.foreign_code import call
from grpox.runtime.logs import get_logger
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World, on_every_rank

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


class ComponentStates:
    """Saves and restores the states of components, and notices components that change without having one.

    Args:
        components: key -> component on this rank; observers are on rank 0 only.
    """

    def __init__(self, components: Mapping[str, RunComponent], world: World, times: PhaseTimes) -> None:
        self._components = components
        self._world = world
        self._times = times
        self._before: dict[str, dict[str, str]] | None = None
        """Hashes of the attributes of components without state, until the first checkpoint."""

    def begin(self) -> None:
        """Read the states once, so that one that no checkpoint can hold ends the run before its first step.

        A reward in a process of its own notes its state for the next process. Of components without state the
        attributes are hashed, for the first checkpoint to compare.

        Raises:
            RunFailed: a state cannot be saved.
        """
        for component in self._stateful().values():
            component.state()
        self._before = {
            key: component.attribute_hashes()
            for key, component in self._components.items()
            if not has_state(component.instance) and not is_stateless(component.instance)
        }

    def _stateful(self) -> dict[str, RunComponent]:
        return {key: each for key, each in self._components.items() if has_state(each.instance)}

    def saved(self) -> dict[str, dict[str, Any]]:
        """Return the content of the file: key -> kind, name, distribution, version and state; a collective.

        Raises:
            RunFailed: a state cannot be saved, or differs between ranks.
        """
        entries = on_every_rank(self._world, self._times, self._entries)
        if self._world.size == 1:
            return entries
        shared = [key for key in entries if self._components[key].kind != "observer"]
        ranks = self._world.gather([{key: state_hashes(entries[key]["state"]) for key in shared}])
        for key in shared:
            others = [rank for rank, states in enumerate(ranks) if states.get(key) != ranks[0][key]]
            if others:
                paths = changed_attributes(ranks[0][key], ranks[others[0]].get(key, {}))
                raise RunFailed(
                    f"{self._components[key]} ({key}) has another state on rank "
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
            component = self._components[key]
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
        component = self._components.get(key)
        is_same = component is not None and component.is_saved_in(entry)
        if (is_same and key in self._stateful()) or (entry["kind"] == "observer" and not self._world.is_main):
            return None
        origin = f" of {entry['distribution']} {entry['version']}" if entry["distribution"] else ""
        lacks = "which has no load_state_dict now" if is_same else "which the run does not use there"
        what = f"the checkpoint holds a state of {entry['kind']} '{entry['name']}'{origin}, {lacks}"
        return Problem(what, key)
