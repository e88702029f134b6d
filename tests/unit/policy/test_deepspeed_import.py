"""Importing DeepSpeed by way of grpox: no probes of compilers."""

from __future__ import annotations

from importlib import import_module

import pytest


def test_deepspeed_asks_no_compiler_which_of_its_ops_it_could_build(monkeypatch: pytest.MonkeyPatch) -> None:
    from grpox.policy.deepspeed_import import deepspeed

    def probe() -> None:
        raise AssertionError("every op is probed, which starts compilers in each rank")

    monkeypatch.setattr(deepspeed.ops, "_probe_compatible_ops", probe)
    assert deepspeed.ops.__compatible_ops__ == {}
    assert import_module("deepspeed.comm.torch").build_shm_op() is None
