"""The runs of the README: held-out rows, then a few real steps on the quickstart's model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import grpox
import pytest

from grpox_reasoning_gym.__main__ import main, source_of
from grpox_reasoning_gym.rows import rows

FEW = "{name: reasoning-gym, size: 400, tasks: {task: chain_sum, settings: {max_terms: 2, max_digits: 1}}}"
README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the README's run files."""
    for name, text in re.findall(r"```yaml\n# (\S+)\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_run_for_a_cpu_trains_and_is_evaluated(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "grpox", "recipes", "copy", "quickstart"], check=True)
    assert main(["sums.yaml", "sums-heldout.jsonl", "--size", "50"]) == 0
    summary = grpox.train("sums.yaml", ["train.max_steps=3", "tracking={}"])
    assert summary["steps"] == 3
    steps = [line["metrics"] for line in lines(folder / "runs" / "sums" / "metrics.jsonl") if "metrics" in line]
    for metrics in steps:
        # The base model is right where nothing carries.
        assert 0.1 < metrics["reasoning-gym/basic_arithmetic"] < 0.9
        assert metrics["reward"] == pytest.approx(metrics["reasoning-gym/basic_arithmetic"])
        assert metrics["grad_norm"] > 0


def test_heldout_rows_share_no_prompt_with_training(folder: Path) -> None:
    assert main(["gym.yaml", "heldout.jsonl", "--size", "30"]) == 0
    trained = {json.dumps(row["prompt"]) for row in rows(source_of(folder / "gym.yaml"))}
    heldout = lines(folder / "heldout.jsonl")
    assert len(heldout) == 30
    assert {row["task"] for row in heldout} == {"chain_sum", "letter_counting", "lcm"}
    assert not {json.dumps(row["prompt"]) for row in heldout} & trained


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("data: {path: train.jsonl}", [], "data.source: cannot be found"),
        ("data: {source: {name: sums}}", [], "is another source"),
        ("data: {source: {name: reasoning-gym, tasks: lmc}}", [], "did you mean 'lcm'"),
        ("data: {source: {name: reasoning-gym, tasks: lcm}}", ["--seed", "0"], "is the seed of training"),
        ("data: {source: {name: reasoning-gym, tasks: lcm}}", ["--size", "0"], "--size"),
        (f"data: {{source: {FEW}}}", [], "prompts were found that training does not have"),
        (None, [], "wrong.yaml"),
    ],
)
def test_a_wrong_request_is_one_line_of_error(
    text: str | None, arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (folder / "wrong.yaml").write_text(text)
    assert main(["wrong.yaml", "out.jsonl", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "out.jsonl").exists()
