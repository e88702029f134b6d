"""The verdict of `grpox plan --memory`: a run fits a machine, is tight, or does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpox.cli import app as cli
from grpox.errors import ConfigError
from grpox.policy.memory_plan import fit
from grpox.policy.memory_plan.fit import Line, Memory, gpus_here, host_here, verdict_lines, worst_of
from grpox.policy.memory_plan.formula import parts_of, peak_of
from grpox.policy.memory_plan.of_run import run_setting
from grpox.runfile.load import load_run

GIB = 2**30


@pytest.mark.parametrize(
    ("free", "answer"), [(12, "fits"), (11, "tight"), (7, "tight"), (6, "does not fit"), (0, "does not fit")]
)
def test_an_answer_by_the_free_memory(free: int, answer: str) -> None:
    memory = Memory(free * GIB, 20 * GIB)
    assert Line("host", 1, 7 * GIB, "update", 12 * GIB, memory).answer == answer


def lines(host: Memory | None, *gpus: Memory) -> Sequence[Line]:
    run = load_run("quickstart", world_size=2)
    return list(verdict_lines(run_setting(run, gpu=True), run_setting(run, gpu=False), host, gpus))


def test_without_gpus_all_ranks_share_the_host() -> None:
    run = load_run("quickstart", world_size=2)
    peak = peak_of(parts_of(run_setting(run, gpu=False)), on_host=True)
    (line,) = lines(Memory(2 * peak.size, 100 * GIB))
    assert (line.where, line.ranks, line.phase) == ("host", 2, peak.phase)
    assert line.counted == 2 * peak.size
    assert line.needed == 2 * peak.size + 2 * GIB
    assert line.answer == "tight"


def test_with_gpus_the_fullest_one_of_the_run_and_the_host_are_judged() -> None:
    run = load_run("quickstart", world_size=2)
    peak = peak_of(parts_of(run_setting(run, gpu=True)), on_host=False)
    gpus = [Memory(free * GIB, 80 * GIB) for free in (3, 70, 1)]
    on_gpu, host = lines(Memory(100 * GIB, 100 * GIB), *gpus)
    assert (on_gpu.counted, on_gpu.needed) == (peak.size, int(peak.size * 1.1) + 2 * GIB)
    assert (on_gpu.memory.free, on_gpu.answer) == (3 * GIB, "tight")
    assert (host.ranks, host.answer) == (2, "fits")
    assert worst_of([on_gpu, host]) == "tight"
    one_gpu = lines(Memory(100 * GIB, 100 * GIB), gpus[0])
    assert [line.ranks for line in one_gpu] == [1, 1]  # the other rank runs elsewhere
    (alone,) = lines(None, Memory(40 * GIB, 40 * GIB))
    assert (alone.where, alone.answer) == ("each GPU", "fits")


@pytest.mark.parametrize(
    ("visible", "free"),
    [
        *((None, [100, 300]), ("", []), ("1", [300]), ("1,0", [300, 100]), ("GPU-ab", [100])),
        *(("-1", []), ("7", []), ("1,-1,0", [300])),
    ],
)
def test_the_driver_is_asked_for_the_visible_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, free: list[int]
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho '100, 1000'\necho '300, 1000'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_here() == [Memory(mib * 2**20, 1000 * 2**20) for mib in free]
    driver.write_text("#!/bin/sh\nexit 9\n")
    assert gpus_here() == []


def test_a_container_has_what_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\n")
    monkeypatch.setattr(fit, "CGROUP", tmp_path)
    assert host_here() == Memory(600_000, 1_000_000)
    (tmp_path / "memory.stat").write_text("anon 100000\ninactive_file 250000\nactive_file 50000\n")
    assert host_here() == Memory(850_000, 1_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_here().total > 1_000_000


@pytest.mark.parametrize(
    ("size", "code", "last"),
    [
        ("80", 0, "fits on GPUs of 80 GiB"),
        ("3", 0, "tight on GPUs of 3 GiB"),
        ("1", 1, "does not fit on GPUs"),
    ],
)
def test_the_command_ends_with_the_verdict(size: str, code: int, last: str) -> None:
    arguments = ["plan", "quickstart", "--memory", "--gpu-gib", size, "sampling.max_completion_length=50"]
    done = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "80"})
    assert done.exit_code == code, done.output
    assert done.output.splitlines()[-1].startswith(last)
    assert max(map(len, done.output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--gpu-gib", "8"], "has no effect without --memory"),
        (["--memory", "--gpu-gib", "inf"], "is no size of a GPU"),
    ],
)
def test_a_size_that_says_nothing_is_refused(options: list[str], what: str) -> None:
    done = CliRunner().invoke(cli.app, ["plan", "quickstart", *options])
    assert isinstance(done.exception, ConfigError)
    assert what in str(done.exception)
