"""`grpox validate` refuses rows, rewards and folders that a run refuses at its start, and loads no weights."""

import importlib.resources
import json
from pathlib import Path

import pytest
from support.chat_templates import QWEN2_5, byte_tokenizer
from typer.testing import CliRunner

from grpox.cli.app import app
from grpox.errors import ConfigError
from grpox.runfile.load import load_run
from grpox.training.inputs import check_rows, open_prompts, open_tokenizer

MODEL = Path(str(importlib.resources.files("grpox.runfile.recipes"))) / "quickstart" / "model"
USER = {"role": "user", "content": "a"}
RUN = """\
model: {path: model}
data: {path: rows.jsonl}
rewards: [{path: "rewards.py:right"}]
train: {num_generations: 4, per_device_train_batch_size: 8, max_steps: 1}
sampling: {max_completion_length: 4}
output_dir: out
"""


@pytest.fixture
def validate(tmp_path, monkeypatch):
    """``validate(rows, *options)``: exit code and output; the model is one without weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "rewards.py").write_text(
        "def right(completions, **columns): return [1.0] * len(completions)\n"
        "def nothing(): return [1.0]\n"
        "def places(*completions): return [1.0]\n"
    )
    byte_tokenizer(QWEN2_5).save_pretrained(tmp_path / "model")
    config = json.loads((MODEL / "config.json").read_text()) | {"vocab_size": 300}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))

    def run(rows, *options):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
        result = CliRunner().invoke(app, ["validate", "run.yaml", *options])
        return result.exit_code, str(result.exception or "") + result.output

    return run


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (3, "several types"),
        ([{"content": "a"}], "row 2 (from 0)"),
        ([USER, {"role": "assistant", "content": "b"}], "data.continue_final_message"),
        ([{"role": "user", "content": "x" * 5000}], "row 2 (from 0) of the data is too long"),
    ],
)
def test_a_row_that_a_run_refuses_is_refused(validate, row, what):
    code, output = validate([[USER], [USER], row])
    assert (code != 0, what in output) == (True, True), output
    if row != 3:
        assert validate([[USER], [USER], row], "--rows", "2")[0] == 0


@pytest.mark.parametrize(
    ("config", "override", "what"),
    [
        ({"vision_config": {"depth": 2}}, "train.beta=0", "vision_config"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "train.beta=0", "quantised (gptq)"),
        ({"vocab_size": 100}, "train.beta=0", "tokens beyond the model's embeddings"),
        ({}, "train.router_aux_loss_coef=0.1", "has no routers"),
    ],
)
def test_a_model_that_a_run_refuses_is_refused(validate, tmp_path, config, override, what):
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    code, output = validate([[USER], [USER]], override)
    assert (code != 0, what in output) == (True, True), output


def test_integers_and_messages_without_a_template_are_refused(validate, tmp_path):
    assert "no prompt" in validate([3, 4])[1]
    byte_tokenizer(None).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    assert "no chat template" in validate([[USER], [USER]])[1]


def test_rows_of_a_stream_and_of_an_evaluation_are_checked(validate, tmp_path):
    (tmp_path / "held-out.jsonl").write_text(json.dumps({"prompt": [USER | {"role": "User"}]}) + "\n")
    assert "the role user instead of User" in validate([[USER]] * 2, "evaluation.path=held-out.jsonl")[1]
    rows = [[USER], [USER | {"role": "User"}]]
    assert "the role user instead of User" in validate(rows, "data.streaming=true")[1]
    assert validate(rows, "data.streaming=true", "--rows", "1")[0] == 0


def test_what_is_not_in_the_cache_of_the_hub_is_said_to_be_unchecked(validate):
    for override in ("model.path=org/none", "data.path=org/none"):
        code, output = validate([[USER]] * 2, override)
        assert (code, "org/none is not in the hub's cache" in output) == (0, True)


def test_a_reward_that_takes_nothing_is_refused(validate):
    for name in ("nothing", "places"):
        code, output = validate([[USER]] * 2, f"rewards=[{{path: 'rewards.py:{name}'}}]")
        assert (code != 0, "takes no argument by name" in output) == (True, True)


@pytest.mark.parametrize("folder", ["/proc/runs/mine", "new/" + "x" * 300, "out/model.json/x"])
def test_a_folder_that_cannot_be_made_is_refused(validate, tmp_path, folder):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.json").touch()
    code, output = validate([[USER]] * 2, f"output_dir={folder}")
    assert (code != 0, "cannot be created" in output) == (True, True), output
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["model.json"]
    assert not (tmp_path / "new").exists()


def test_a_run_refuses_the_same_rows(validate, tmp_path):
    validate([[USER], [{"role": "User", "content": "a"}]])
    run = load_run("run.yaml")
    with pytest.raises(ConfigError) as checked:
        check_rows(run)
    with pytest.raises(ConfigError) as opened:
        open_prompts(run, open_tokenizer(run))
    assert str(checked.value) == str(opened.value)
