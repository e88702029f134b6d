"""benchmarks/gpu.py: its small form works on the CPU, and its file tells of each part whatever became of it."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import processes
from support.patience import patient

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu  # noqa: E402
import gpu_part  # noqa: E402
from gpu_parts import PARTS, Plan, nccl_transfer, parity  # noqa: E402
from gpu_parts.memory import WatchedOnGpu  # noqa: E402
from gpu_parts.models import QWEN_05B, QWEN_15B, Shape  # noqa: E402
from gpu_parts.part import Part  # noqa: E402
from gpu_parts.shapes import needs_recomputation  # noqa: E402
from weight_sync import only_gpu  # noqa: E402

SKIPS = {"syncs": "CUDA"}
"""Parts that take their steps on the CPU but measure nothing there, and a word of the reason."""
COMPARED = {
    "attention": ("3 sequences, flex", "3 behind a prompt, flex", "3 behind a prompt, sdpa with a mask")
}
"""Figures of a part that have errors on the CPU too, which the part holds to its tolerances."""


def small(name: str, folder: Path) -> dict[str, Any]:
    """Run the small form of a part as gpu.py does, in a process of its own."""
    told, out = folder / "arguments.json", folder / "figures.json"
    given = {"name": name, "device": "cpu", "small": True, "folder": str(folder), "out": str(out)}
    told.write_text(json.dumps(given))
    done = processes.run(BENCHMARKS / "gpu_part.py", told, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    part: dict[str, Any] = json.loads(out.read_text())
    return part


@pytest.mark.parametrize("name", [name for name, plan in PARTS.items() if not plan.gpus])
def test_the_small_form_of_a_part_runs_on_the_cpu(tmp_path: Path, name: str) -> None:
    part = small(name, tmp_path)
    assert part["status"] == ("skipped" if name in SKIPS else "ok"), part["reason"]
    assert SKIPS.get(name, "") in part["reason"]
    assert all(part[place]["errors"] for place in COMPARED.get(name, ()))


def command(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run gpu.py on the CPU; returns it and its file."""
    words = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device=cpu", "--small", "--out=gpu.json", *options]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=patient(240), check=False)
    return done, json.loads((folder / "gpu.json").read_text())


def test_the_file_has_the_environment_and_each_part_that_was_named(tmp_path: Path) -> None:
    done, result = command(tmp_path, "--parts=ceilings,multi_gpu")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == result
    assert result["environment"]["versions"]["torch"] == torch.__version__
    assert result["environment"]["gpus"] == []
    assert result["environment"]["missing"] == []
    parts = result["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {"ceilings": "ok", "multi_gpu": "skipped"}
    assert parts["ceilings"]["copy_gb_per_second"] > 0
    assert not list(tmp_path.glob("*.new"))


def test_a_budget_skips_what_does_not_fit_and_limits_what_it_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(gpu, "run_part", lambda name, _, limit, late: calls.append((limit, *late)) or {})
    monkeypatch.setitem(PARTS, "head", Plan(100))
    given = argparse.Namespace(budget=250.0, limit=None)
    for left in (250.0, 120.0, 50.0):
        gpu.part_within("head", given, 0, left)
    assert calls == [
        (200, "failed", "took more than 200 s"),
        (120.0, "skipped", "took more than the 120 s left of the budget of 250 s"),
        (50.0, "skipped", "took more than the 50 s left of the budget of 250 s"),
    ]
    skipped = gpu.part_within("head", given, 0, 49.0)
    assert skipped["status"] == "skipped"
    assert skipped["reason"] == "takes about 100 s, and 49 s are left of the budget of 250 s"
    assert len(calls) == 3


@pytest.mark.parametrize(("value", "status"), [(0.0, "skipped"), (2.0, "failed")])
def test_a_part_that_the_budget_ends_keeps_its_figures_and_failures(
    value: float, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(words: list[str], **_: Any) -> None:
        given = json.loads(Path(words[2]).read_text())
        part = Part(torch.device("cpu"), True, tmp_path, Path(given["out"]))
        part.record("ms", 3)
        part.check("the error", value, 1.0)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(gpu, "wait_or_end", lambda *_: False)
    given = argparse.Namespace(device="cpu", small=True)
    part = gpu.run_part("head", given, 1.0, ("skipped", "the budget is used up"))
    assert (part["status"], part["ms"]) == (status, 3)
    assert "the budget is used up" in part["reason"]
    assert ("the error is 2" in part["reason"]) is (status == "failed")


def test_a_part_that_takes_too_long_is_ended_and_stops_no_other(tmp_path: Path) -> None:
    done, result = command(tmp_path, "--parts=head,ceilings", "--limit=0.05")
    assert done.returncode == 1
    reasons = {name: (part["status"], part["reason"]) for name, part in result["parts"].items()}
    assert reasons == dict.fromkeys(("ceilings", "head"), ("failed", "took more than 0.05 s"))


def run_with(measure: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a part made of this function in the test's process; returns its file."""
    module = ModuleType("gpu_parts.mine")
    module.measure = measure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gpu_parts.mine", module)
    part = Part(torch.device("cpu"), True, folder, folder / "out.json")
    gpu_part.run_part(part, "mine")
    result: dict[str, Any] = json.loads(part.out.read_text())
    return result


def test_a_part_that_raises_keeps_its_figures_and_tells_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(part: Part) -> None:
        part.record("before", 7)
        part.check("the error", 0.5, 0.25)
        raise ValueError("no kernel for this")

    assert run_with(measure, tmp_path, monkeypatch) == {
        "status": "failed",
        "reason": "the error is 0.5, more than 0.25; ValueError: no kernel for this",
        "before": 7,
    }


def test_a_point_that_fails_does_not_stop_its_part_and_too_little_memory_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(error: Exception) -> Any:
        raise error

    def measure(part: Part) -> None:
        part.attempt("large", lambda: raising(torch.OutOfMemoryError("CUDA out of memory\nand more")))
        part.attempt("wrong", lambda: raising(RuntimeError("illegal address")))
        part.attempt("right", lambda: {"ms": 2.0})

    assert run_with(measure, tmp_path, monkeypatch) == {
        "status": "failed",
        "reason": "wrong: RuntimeError: illegal address",
        "large": {"out_of_memory": "CUDA out of memory"},
        "wrong": {"error": "RuntimeError: illegal address"},
        "right": {"ms": 2.0},
    }


def test_nan_is_out_of_every_tolerance(tmp_path: Path) -> None:
    part = Part(torch.device("cpu"), True, tmp_path, tmp_path / "out.json")
    part.check("the error", float("nan"), 1.0)
    part.check("the error", 1.0, 1.0)
    assert part.failures == ["the error is nan, more than 1"]


@pytest.mark.parametrize(
    ("device", "dtype", "failures"),
    [("cuda", torch.float32, 0), ("cuda", torch.bfloat16, 1), ("cpu", torch.float32, 1)],
)
def test_packing_has_to_work_where_there_is_a_kernel_for_the_precision(
    device: str, dtype: torch.dtype, failures: int, tmp_path: Path
) -> None:
    part = Part(torch.device(device), True, tmp_path, tmp_path / "out.json")
    for installed in ("all logits", "train.packing"):
        part.record(f"{dtype}, packed, varlen", {"installed": installed, "failures": ["no kernel"]})
        parity.check(part, f"{dtype}, packed, varlen", dtype)
    assert len(part.failures) == failures


def test_trainer_and_server_have_a_gpu_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses a group that has a GPU twice."""
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(Part, "run_script", lambda part, *words: calls.append(words) or {})
    nccl_transfer.measure(Part(torch.device("cuda"), False, tmp_path, tmp_path / "out.json"))
    [(script, *options)] = calls
    assert script == "weight_sync.py"
    assert "--server-gpu=1" in options  # the only rank has the first
    visible = [only_gpu(1, given)["CUDA_VISIBLE_DEVICES"] for given in ({}, {"CUDA_VISIBLE_DEVICES": "6, 3"})]
    assert visible == ["1", "3"]


def test_the_peak_of_a_phase_on_a_gpu_is_what_was_allocated_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, most = 0, 0

    def allocate(size: int) -> None:
        nonlocal now, most
        now += size
        most = max(most, now)

    def reset() -> None:
        nonlocal most
        most = now

    for name, function in (
        ("memory_allocated", lambda: now),
        ("max_memory_allocated", lambda: most),
        ("reset_peak_memory_stats", reset),
        ("empty_cache", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, function)
    watched = WatchedOnGpu()
    allocate(5)
    with watched.phase("load"):
        allocate(100)
        allocate(-40)
    with watched.phase("update"):
        allocate(7)
        with watched.phase("reduce"):
            allocate(20)
            allocate(-20)
        allocate(2)
    assert watched.before == 5
    assert {name: watched.most[name] for name in ("load", "update", "reduce")} == {
        "load": 105,
        "update": 74,
        "reduce": 92,
    }


def test_operations_of_a_step_by_hand() -> None:
    """A layer has 2 * 8 * 8 + 2 * 8 * 4 weights of attention and 3 * 8 * 16 of the MLP, the head 8 * 100."""
    shape = Shape(hidden=8, intermediate=16, layers=3, heads=4, key_heads=2, vocabulary=100)
    assert shape.body == 3 * (128 + 64 + 384)
    # 6 a weight and token; attention to half of 5 tokens: 3 * (2 + 2) * 8 * 5 / 2 a token and layer.
    assert shape.operations(tokens=10, scored=6, length=5) == 6 * (1728 * 10 + 800 * 6) + 10 * 3 * 240


def test_activations_are_recomputed_where_they_would_not_fit() -> None:
    """The goal is a pass of 16,384 tokens at the 1.5B shape, which fills 80 GB without recomputation."""
    decided = [
        [needs_recomputation(shape, tokens, 32_768, gib * 2**30) for tokens in (2048, 8192, 16_384, 32_768)]
        for shape, gib in ((QWEN_05B, 79), (QWEN_15B, 79), (QWEN_15B, 139))
    ]
    assert decided == [
        [False, False, False, True],
        [False, False, True, True],
        [False, False, False, True],
    ]


def test_the_estimate_of_memory_by_hand() -> None:
    shape = Shape(hidden=8, intermediate=16, layers=3, heads=4, key_heads=2, vocabulary=100)
    assert shape.state_bytes == 18 * (1728 + 800)
    assert shape.activation_bytes(10) == 10 * 3 * 2 * (4 * 16 + 20 * 8)


def test_old_log_probabilities_are_not_near_a_bound_of_clipping() -> None:
    """A token that rounding moves over a bound would change the gradient by a hundredth or more."""
    current = torch.randn(parity.GROUPS * parity.SIZE, parity.LONGEST, dtype=torch.float64)
    batch = parity.batch_of(512, torch.device("cpu"), torch.float64, current)
    olds = [sample.old_logprobs for sample in batch.samples]
    pairs = zip(current, olds, strict=True)
    ratios = torch.cat([now[: len(old)] - old for now, old in pairs if old is not None])
    assert min(float((ratios - math.log(bound)).abs().min()) for bound in (0.8, 1.2, 1.28)) > 0.03
    assert 0.3 < float((ratios.abs() > 0.3).double().mean()) < 0.7
