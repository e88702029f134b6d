"""The optimizer and schedule of docs/run-file.md work as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from grpox.runfile.load import load_run
from grpox.runfile.yaml_lines import read_yaml

PAGE = Path(__file__).parents[2] / "docs" / "run-file.md"


def test_a_class_named_by_path_takes_the_place_of_adamw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("#### An optimizer or schedule of your own\n")[2]
    python, yaml = re.findall(r"```(?:python|yaml)\n(.*?)```", section, re.DOTALL)[:2]
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(python, encoding="utf-8")
    train = read_yaml(yaml, "page").data["train"]
    overrides = [f"train.{key}={{path: '{each['path']}'}}" for key, each in train.items()]
    run = load_run("quickstart", [*overrides, f"train.optimizer.momentum={train['optimizer']['momentum']}"])

    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = run.build("train.optimizer").build([weight], 0.1)
    schedule = run.build("train.scheduler").build(optimizer, 3)
    for _ in range(2):
        weight.grad = torch.ones(1)
        optimizer.step()
        schedule.step()
    # 0.1 * 1, then half the rate with momentum 0.5: 0.05 * (0.5 + 1).
    assert weight.item() == pytest.approx(1 - 0.1 - 0.075)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
