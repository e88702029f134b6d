"""`grpox import-trl` of set-ups that train adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpox.runfile.from_trl.convert import convert
from grpox.runfile.from_trl.draft import Draft, run_file_text
from grpox.runfile.from_trl.fields import Verdict
from grpox.runfile.from_trl.script import read_script
from grpox.runfile.from_trl.setup import read_trl_yaml
from grpox.runfile.yaml_lines import read_yaml

SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

RANK = 8
{before}
trainer = GRPOTrainer(
    model="org/model", reward_funcs=[], args=GRPOConfig(),
    train_dataset=load_dataset("org/data", split="train"),
    peft_config={config},
)
"""
HERE = Path("train.py")


def of_script(config: str, before: str = "") -> Draft:
    text = SCRIPT.format(config=config, before=before)
    return convert(read_script(text, HERE, "train.py"), Path())


def of_yaml(*lines: str) -> Draft:
    text = "\n".join(["model_name_or_path: org/model", "dataset_name: org/data", *lines])
    return convert(read_trl_yaml(text, "grpo.yaml"), Path())


def lora_of(draft: Draft) -> Any:
    return read_yaml(run_file_text(draft), "run.yaml").data["model"].get("lora")


def verdicts(draft: Draft) -> dict[str, Verdict]:
    return {row.name: row.verdict for row in draft.rows}


def test_a_lora_config_of_literals_becomes_the_section() -> None:
    draft = of_script(
        "LoraConfig(r=RANK, lora_alpha=16, target_modules=['q_proj', 'v_proj'], lora_dropout=0.1)"
    )
    assert lora_of(draft) == {"r": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    told = verdicts(draft)
    assert told["peft_config.r"] == told["peft_config.target_modules"] == Verdict.SAME
    assert told["peft_config.lora_dropout"] == Verdict.DIFFERS


def test_one_that_is_named_and_has_pefts_defaults() -> None:
    draft = of_script("peft_config", "peft_config = LoraConfig(task_type='CAUSAL_LM', use_rslora=True)")
    assert lora_of(draft) == {"r": 8, "alpha": 8, "target_modules": "all-linear", "use_rslora": True}
    assert verdicts(draft)["peft_config.task_type"] == Verdict.NOT_NEEDED


@pytest.mark.parametrize("given", ["modules_to_save=['lm_head']", "use_dora=True", "layers_to_transform=[1]"])
def test_unsupported_adapter_settings_are_reported(given: str) -> None:
    draft = of_script(f"LoraConfig({given})")
    assert verdicts(draft)[f"peft_config.{given.partition('=')[0]}"] == Verdict.UNSUPPORTED
    assert "Not carried over" in run_file_text(draft)


def test_parameters_are_carried_over_and_are_alone_without_named_layers() -> None:
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    expected = {"r": 8, "alpha": 8, "target_modules": [], "target_parameters": names}
    draft = of_script(f"LoraConfig(target_parameters={names})")
    assert lora_of(draft) == expected
    assert verdicts(draft)["peft_config.target_parameters"] == Verdict.SAME
    assert lora_of(of_script(f"LoraConfig(target_modules=[], target_parameters={names})")) == expected
    beside = of_script(f"LoraConfig(target_modules='all-linear', target_parameters={names})")
    assert lora_of(beside) == expected | {"target_modules": "all-linear"}
    of_file = of_yaml("use_peft: true", f"lora_target_parameters: [{', '.join(names)}]")
    assert lora_of(of_file) == expected | {"r": 16, "alpha": 32}
    assert verdicts(of_file)["lora_target_parameters"] == Verdict.SAME


def test_a_regular_expression_of_layers_is_not_taken_for_a_name() -> None:
    draft = of_script("LoraConfig(target_modules=r'.*\\.q_proj')")
    assert lora_of(draft)["target_modules"] == "all-linear"
    assert verdicts(draft)["peft_config.target_modules"] == Verdict.DIFFERS
    assert lora_of(of_script("LoraConfig(target_modules='q_proj')"))["target_modules"] == ["q_proj"]


def test_settings_that_are_not_literals_are_blanks() -> None:
    draft = of_script("get_peft_config(args)")
    assert verdicts(draft)["peft_config"] == Verdict.UNREAD
    assert "# lora: {r: 16, alpha: 32}" in run_file_text(draft)
    assert verdicts(of_script("LoraConfig(r=rank())"))["peft_config.r"] == Verdict.UNREAD
    assert lora_of(of_script("None")) is None


def test_the_fields_of_a_yaml_file() -> None:
    draft = of_yaml("use_peft: true", "lora_r: 4", "lora_target_modules: [q_proj, v_proj]", "lora_dropout: 0.1")
    assert lora_of(draft) == {"r": 4, "alpha": 32, "target_modules": ["q_proj", "v_proj"]}
    assert verdicts(draft)["use_peft"] == verdicts(draft)["lora_r"] == Verdict.SAME
    assert verdicts(draft)["lora_dropout"] == Verdict.DIFFERS
    assert lora_of(of_yaml("use_peft: yes")) == {"r": 16, "alpha": 32, "target_modules": "all-linear"}
    assert (
        lora_of(of_yaml("use_peft: true", "lora_target_modules: all-linear"))["target_modules"] == "all-linear"
    )


def test_without_use_peft_the_fields_do_nothing() -> None:
    draft = of_yaml("lora_r: 4")
    assert lora_of(draft) is None
    assert verdicts(draft)["lora_r"] == Verdict.NOT_NEEDED
