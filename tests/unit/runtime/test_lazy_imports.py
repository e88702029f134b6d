"""Postponed imports happen at the first call, and earlier imports stay unchanged."""

from __future__ import annotations

import subprocess
import sys
from unittest.mock import Mock

import pytest

from grpox.runtime.lazy_imports import absent, compiled_at_first_call, late

START = """
import sys
import grpox.training.run
import deepspeed.runtime.zero.stage3
import deepspeed.runtime.zero.muon.muon_optimizer as muon
import torch
import transformers.generation.candidate_generator as assisted
import transformers.loss.loss_for_object_detection as detection

for name in ("sklearn", "scipy.stats", "scipy.optimize", "mlflow", "torch._inductor.compile_fx"):
    assert name not in sys.modules, name

cost = torch.tensor([[4.0, 1.0], [2.0, 3.0]])
assert [list(each) for each in detection.linear_sum_assignment(cost)] == [[0, 1], [1, 0]]
assert assisted.roc_curve([0, 1], [0.1, 0.9])[1][-1] == 1.0
assert callable(muon.muon_update)
"""


def test_a_start_leaves_out_what_no_run_calls_and_a_call_brings_it() -> None:
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_function_is_imported_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with late("colorsys", "rgb_to_hls"):
        from colorsys import rgb_to_hls
    assert "colorsys" not in sys.modules
    assert rgb_to_hls(1.0, 1.0, 1.0) == (0.0, 1.0, 0.0)
    assert "colorsys" in sys.modules


@pytest.mark.parametrize("way", [absent("json"), late("json", "loads")], ids=["absent", "late"])
def test_what_has_been_imported_stays(way: object) -> None:
    import json

    with way:  # type: ignore[attr-defined]
        assert sys.modules["json"] is json
    assert sys.modules["json"] is json


def test_an_absent_module_cannot_be_imported_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with absent("colorsys"), pytest.raises(ImportError):
        import colorsys
    import colorsys

    assert colorsys.rgb_to_hls(1.0, 1.0, 1.0) == (0.0, 1.0, 0.0)


def test_a_function_is_compiled_once_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Mock(side_effect=lambda function, **options: function)
    monkeypatch.setattr("torch.compile", compiler)

    def double(value: int) -> int:
        """Twice it."""
        return 2 * value

    late_double = compiled_at_first_call(double, dynamic=True)
    assert (late_double.__doc__, compiler.called) == ("Twice it.", False)
    assert (late_double(3), late_double(4)) == (6, 8)
    compiler.assert_called_once_with(double, dynamic=True)
