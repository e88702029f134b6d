"""Collects the wheels that a GPU machine without a network lacks, to run benchmarks/gpu.py and to train there.

    .venv/bin/python requirements/gpu_wheels.py build/gpu-wheels [--without-trl]

The machine has CPython 3.12 on x86_64 Linux, with the packages in `PRESENT` and all that they need. Of what
grpox, this repository's own, and TRL need beyond them, the folder gets one wheel each, in the versions of this
environment; of what they need on any machine, pip resolves nothing else. mlflow is left out: runs there have
`tracking: {}`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import Parser
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[1]
PRESENT = ("torch", "transformers", "accelerate", "peft", "pandas", "pyarrow", "matplotlib", "aiohttp", "scipy")
"""Installed on the machine, with what they need."""
RENEWED = ("filelock", "fsspec", "jinja2", "packaging", "rich", "typer", "typing-extensions")
"""Small ones that it has too, perhaps in versions older than grpox's bounds; they come with what they need."""
LEFT_OUT = {"mlflow": "runs there have tracking: {}"}
LIMIT = 64 * 2**20
"""Bytes that all wheels together may have."""
TAGS = ("--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:")
GLIBC = ("1", "2010", "2014", *(f"_2_{minor}" for minor in (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)))
MACHINE = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "os_name": "posix",
    "extra": "",
}
OF_GRPOX = ("pyproject.toml", "README.md", "LICENSE", "grpox", "plugins/builtin")


class Collected:
    """The folder of wheels, and what is still needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.present = present()
        self.wheels: dict[str, Path] = {}

    def add(self, wheel: Path) -> list[Requirement]:
        """Keep a wheel; returns what it needs on the machine beyond what is there or collected."""
        self.wheels[canonicalize_name(parse_wheel_filename(wheel.name)[0])] = wheel
        return [need for need in needs_of(metadata_of(wheel)) if self.lacks(need.name)]

    def lacks(self, name: str) -> bool:
        key = canonicalize_name(name)
        return key not in self.present and key not in self.wheels and key not in LEFT_OUT

    def fetch(self, need: Requirement) -> Path:
        """Download the wheel of a requirement, or build one without compiled parts."""
        pin = pinned(need)
        print(f"  {pin}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            platforms = [word for glibc in GLIBC for word in ("--platform", f"manylinux{glibc}_x86_64")]
            download = pip("download", "--no-deps", *TAGS, *platforms, "--dest", folder, pin)
            if download.returncode:  # there is only its source
                built = pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, pin)
                if built.returncode:
                    sys.exit(f"{pin} can neither be downloaded nor built:\n{download.stderr}\n{built.stderr}")
            [wheel] = Path(folder).glob("*.whl")
            return Path(shutil.move(wheel, self.folder / wheel.name))


def present() -> set[str]:
    """Names of what the machine has: `PRESENT` and all that it needs, as far as this environment knows."""
    names: set[str] = set()
    ahead = list(PRESENT)
    while ahead:
        name = canonicalize_name(ahead.pop())
        if name in names or name in RENEWED:
            continue
        names.add(name)
        try:
            ahead += [need.name for need in needs_of(metadata.requires(name) or ())]
        except metadata.PackageNotFoundError:
            continue  # it is there, and what it needs as well
    return names


def needs_of(texts: Sequence[str]) -> Iterator[Requirement]:
    """The requirements that count on the machine, without those of extras."""
    for need in map(Requirement, texts):
        if need.marker is None or need.marker.evaluate(MACHINE):
            yield need


def metadata_of(wheel: Path) -> list[str]:
    """The requirements in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []


def pinned(need: Requirement) -> str:
    """The requirement in the version of this environment, where it has one that fits."""
    try:
        version = metadata.version(need.name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return f"{need.name}{need.specifier}"
    return f"{need.name}=={version}" if need.specifier.contains(version, prereleases=True) else str(need)


def pip(*words: str) -> subprocess.CompletedProcess[str]:
    """Run pip; DeepSpeed builds without compiled operators."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    environment = os.environ | {"DS_BUILD_OPS": "0"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def wheel_of_grpox(folder: Path) -> Path:
    """Build grpox from a copy of its sources, which leaves no build folder behind and packs none."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "grpox"
        copy.mkdir()
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        for part in OF_GRPOX:
            source, target = ROOT / part, copy / part
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=ignored)
            else:
                shutil.copy(source, target)
        built = pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(copy))
    if built.returncode:
        sys.exit(f"grpox cannot be built:\n{built.stderr}")
    [wheel] = folder.glob("grpox-*.whl")
    return wheel


def expected(collected: Collected) -> list[str]:
    """List the bounds that the wheels set for packages of the machine."""
    bounds: dict[str, SpecifierSet] = {}
    for wheel in collected.wheels.values():
        for need in needs_of(metadata_of(wheel)):
            name = canonicalize_name(need.name)
            if name in collected.present and name not in collected.wheels:
                bounds[name] = bounds.get(name, SpecifierSet()) & need.specifier
    return sorted(f"{name}{specifier}" for name, specifier in bounds.items())


def unmet(collected: Collected) -> list[str]:
    """Requirements between the wheels that their versions do not meet."""
    problems = []
    for name, wheel in collected.wheels.items():
        for need in needs_of(metadata_of(wheel)):
            other = collected.wheels.get(canonicalize_name(need.name))
            if other is None:
                continue
            version = parse_wheel_filename(other.name)[1]
            if not need.specifier.contains(version, prereleases=True):
                problems.append(f"{name} needs {need}, and {other.name} is here")
    return problems


def collect(folder: Path, with_trl: bool) -> Collected:
    """Fill the folder with wheels, beginning with grpox's own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    collected = Collected(folder)
    ahead = [Requirement(name) for name in RENEWED]
    if with_trl:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        ahead += map(Requirement, project["optional-dependencies"]["bench"])
    ahead += collected.add(wheel_of_grpox(folder))
    while ahead:
        need = ahead.pop()
        if collected.lacks(need.name):
            ahead += collected.add(collected.fetch(need))
    return collected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="emptied first")
    parser.add_argument("--without-trl", action="store_true", help="leave out what only the part trl needs")
    arguments = parser.parse_args()
    collected = collect(arguments.folder, not arguments.without_trl)
    sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(collected.wheels.values())}
    for name, size in sizes.items():
        print(f"{size / 2**20:7.2f} MiB  {name}")
    print(f"{sum(sizes.values()) / 2**20:7.2f} MiB  in {len(sizes)} wheels")
    print("\nExpected on the machine:", ", ".join(expected(collected)))
    if problems := unmet(collected):
        sys.exit("\n".join(problems))
    if sum(sizes.values()) > LIMIT:
        sys.exit(f"more than {LIMIT / 2**20:g} MiB")
    site = arguments.folder.with_name("gpu-site")
    print("\nThere, in a copy of this repository with this folder:")
    print(f"python3 -m pip install --no-compile --no-index --no-deps --target {site} {arguments.folder}/*.whl")
    print(f'PYTHONPATH="$(realpath {site})" python3 benchmarks/gpu.py --out gpu.json')


if __name__ == "__main__":
    main()
