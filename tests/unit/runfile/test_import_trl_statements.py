"""`grpox import-trl` tells each statement of a script that changes what is trained, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from grpox.cli import app as cli
from grpox.runfile.from_trl.fields import TRL_REWARDS
from grpox.runfile.from_trl.script import read_script
from grpox.runfile.load import load_run
from grpox.runfile.yaml_lines import read_yaml

SCRIPTS = dict(
    each.split("\n", 1)
    for each in Path(__file__).with_name("scripts_for_trl.txt").read_text().split("=== ")[1:]
)
RLOO = "advantage rloo"


def command(*arguments: str) -> Result:
    done = CliRunner().invoke(cli.app, ["import-trl", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_changes_the_training_is_told_and_nothing_else(name: str) -> None:
    text = SCRIPTS[name]
    marked = [line for line, part in enumerate(text.splitlines(), 1) if "# lost" in part]
    told = [
        given.line
        for given, _, reason in read_script(text, Path("s.py"), "s.py").statements
        if RLOO not in reason
    ]
    assert sorted(told) == marked


@pytest.mark.parametrize(
    ("name", "statement", "cure"),
    [
        ("frozen layers", "p.requires_grad = False", "model.lora"),
        ("a loss of its own", "def _compute_loss(self, model, inputs):", "docs/own-loss.md"),
        ("a loss of its own", "trainer.add_callback(Stop())", "docs/observers.md"),
        ("a loss of its own", "trainer.train(resume_from_checkpoint=True)", "grpox train --resume"),
        ("patched", "T._compute_loss = my_loss", "docs/own-loss.md"),
        ("patched", "trainer.model.generation_config.top_k = 5", "sampling"),
        ("tokenizer", 'tok.chat_template = open("t.jinja").read()', "model.path"),
        ("tokenizer", "model.resize_token_embeddings(len(tok))", "model.path"),
        ("peft 4 bit", "base = AutoModelForCausalLM.from_pretrained(", "quantisation"),
        ("peft 4 bit", "policy = get_peft_model(base, lora)", "model.lora"),
        ("replay", "GRPOWithReplayBufferTrainer", "no replay buffer"),
        ("async", "AsyncGRPOTrainer", "max_staleness"),
    ],
)
def test_a_statement_is_told_with_its_line_text_and_cure(
    name: str, statement: str, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.py").write_text(SCRIPTS[name])
    done = command("s.py", "--json")
    outcomes = json.loads(done.stdout)
    assert list(outcomes) == ["carried", "differs", "not_carried"]
    [entry] = [each for each in outcomes["not_carried"] if each["text"].startswith(statement)]
    assert list(entry) == ["line", "text", "reason"]
    assert statement in SCRIPTS[name].splitlines()[entry["line"] - 1]
    assert cure in entry["reason"]
    assert "everything was carried over" not in done.stderr
    text = command("s.py", "--out", "run.yaml", "--json").stdout
    assert json.loads(text) == outcomes
    assert f"#   line {entry['line']}: " in Path("run.yaml").read_text()


def test_only_where_all_is_carried_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("trl example", "nothing to tell"):
        Path("s.py").write_text(SCRIPTS[name])
        assert "everything was carried over" in command("s.py").stderr
    Path("s.py").write_text(SCRIPTS["trl example"].replace("train_dataset=", "**more, train_dataset="))
    done = command("s.py", "--json")
    assert "everything was carried over" not in done.stderr
    assert json.loads(done.stdout)["not_carried"][0]["text"].startswith("**more")


def test_rloo_becomes_an_advantage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.py").write_text(SCRIPTS["rloo"])
    command("s.py", "--out", "run.yaml")
    config = load_run("run.yaml", world_size=1).config
    assert (config.advantage.label, config.loss.label) == ("rloo", "dr_grpo")
    assert (config.train.beta, config.train.num_generations) == (0.05, 4)


def test_names_of_open_r1_get_no_advice_that_cannot_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rewards = "reward_funcs: [accuracy, format, tag_count, cosine, no_such]"
    Path("r1.yaml").write_text(
        f"model_name_or_path: org/m\ndataset_name: org/d\ndataset_prompt_column: problem\n{rewards}\n"
    )
    text = command("r1.yaml").stdout
    data = read_yaml(text, "run.yaml").data
    assert data["data"] == {"path": "org/d", "prompt_column": "problem"}
    assert data["rewards"] == [
        {"name": "math", "column": "solution"},
        {"name": "format", "tags": ["think", "answer"]},
    ]
    assert "from trl.rewards import" not in text
    trl = pytest.importorskip("trl.rewards")
    for name, entry in TRL_REWARDS.items():
        assert "from trl.rewards import" not in entry["note"] or hasattr(trl, name)
