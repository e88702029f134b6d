"""Values that a run chooses by its device: precision, and positions of a micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpox.config.training import TOKENS_ON_GPU, tokens_on
from grpox.runfile.checks import divides_steps
from grpox.runfile.load import load_run
from grpox.runtime.world import World
from grpox.training.run import _decide_automatic

GPU, CPU = (World(0, 1, torch.device(kind)) for kind in ("cuda", "cpu"))
LOSSES = """
from grpox.contracts import Reduction

class Whole:
    reduction = Reduction.TOKEN_MEAN
    def per_token(self, inputs): ...

class OfGroups(Whole):
    scope = "group"
    needs = ("group_ids",)

class AsBuilt(Whole):
    reduction = property(lambda self: Reduction.LOCAL_TOKEN_MEAN)
"""
DIVIDES = {
    "grpo": True,
    "bnpo": False,
    "{path: losses.py:Whole}": True,
    "{path: losses.py:OfGroups}": False,
    "{path: losses.py:AsBuilt}": False,
}


def test_auto_is_a_number_of_tokens_on_gpus_where_the_loss_allows_it() -> None:
    assert tokens_on("auto", gpu=True, divides=True) == TOKENS_ON_GPU == 16_384
    others = [(False, True), (True, False), (False, False)]
    assert [tokens_on("auto", *each) for each in others] == [None] * 3
    assert tokens_on(None, gpu=True, divides=True) is None
    assert tokens_on(7, gpu=True, divides=False) == 7


@pytest.mark.parametrize("loss", DIVIDES)
def test_only_a_loss_over_the_whole_step_divides_it(
    loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("losses.py").write_text(LOSSES)
    run = load_run("quickstart", [f"loss={loss}"])
    assert divides_steps(run.components["loss"]) == DIVIDES[loss]
    _decide_automatic(run, GPU, resume=False)
    assert run.config.train.max_tokens_per_micro_batch == (TOKENS_ON_GPU if DIVIDES[loss] else None)


@pytest.mark.parametrize(("world", "tokens"), [(GPU, 16_384), (CPU, None)])
def test_a_run_records_what_it_chose_and_goes_on_with_it(
    world: World, tokens: int | None, tmp_path: Path
) -> None:
    folder = f"output_dir={tmp_path}"
    run = load_run("quickstart", ["model.dtype=auto", folder])
    assert run.config.train.max_tokens_per_micro_batch == "auto"
    _decide_automatic(run, world, resume=False)
    assert run.config.train.max_tokens_per_micro_batch == tokens
    (tmp_path / "config.yaml").write_text(f"train: {{max_tokens_per_micro_batch: {tokens or 'null'}}}")
    for elsewhere in (GPU, CPU):
        again = load_run("quickstart", [folder])
        _decide_automatic(again, elsewhere, resume=True)
        assert again.config.train.max_tokens_per_micro_batch == tokens
    new = load_run("quickstart", [folder])
    _decide_automatic(new, CPU, resume=False)
    assert new.config.train.max_tokens_per_micro_batch is None


def test_a_number_in_the_run_file_stays() -> None:
    run = load_run("quickstart", ["train.max_tokens_per_micro_batch=100", "model.dtype=bfloat16"])
    _decide_automatic(run, GPU, resume=False)
    assert (run.config.train.max_tokens_per_micro_batch, run.config.model.dtype) == (100, "bfloat16")
