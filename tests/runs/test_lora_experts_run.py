"""A run that trains adapters of stacked experts: what it leaves, its export, and that it resumes bit by bit."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path

import pytest
import torch
from support import processes
from support.architectures import tiny_model
from support.fixtures import GrpoxCommand
from support.killing import assert_same, finish, kill_and_resume
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpox.checkpoint.export import export_checkpoint

peft = pytest.importorskip("peft")

TOKENIZER = Path(str(importlib.resources.files("grpox.runfile.recipes") / "quickstart" / "model"))
LORA = (
    "{r: 2, alpha: 4, target_modules: [], target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]}"
)
SETTINGS = (
    "quickstart",
    f"model.lora={LORA}",
    "train.learning_rate=0.01",
    "train.warmup_steps=0",
    "train.beta=0.04",
    "train.per_device_train_batch_size=32",
    "train.steps_per_generation=2",
    "train.gradient_checkpointing=true",
    "train.max_steps=6",
    "checkpoint.every=3",
    # With so many right answers that rewards of a random model differ.
    "rewards=[{path: mine.py:even}]",
    "evaluation=null",
    "tracking={}",
)
REWARD = """
def even(completions, **columns):
    return [float(sum(map(ord, text)) % 2) for text in completions]
"""


def prepare(folder: Path) -> str:
    """Write model, tokenizer and reward into `folder`; return the override that names the model."""
    tiny_model("qwen3_moe").save_pretrained(folder / "moe")
    AutoTokenizer.from_pretrained(str(TOKENIZER)).save_pretrained(folder / "moe")
    (folder / "mine.py").write_text(REWARD)
    return f"model.path={folder / 'moe'}"


@pytest.fixture(scope="module")
def finished(grpox: GrpoxCommand, folder: Path) -> Path:
    done = grpox("train", *SETTINGS, prepare(folder), "output_dir=runs/experts")
    assert done.returncode == 0, done.stderr
    assert "adapters of rank 2 on 4 parameters" in done.stderr
    assert "leaf module" not in done.stderr
    return folder / "runs" / "experts"


def model_in(path: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    return model


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([[5, 6, 7, 8, 9, 10]])).logits
    return logits


def test_the_first_step_has_no_divergence_and_the_generator_samples_from_the_policy(finished: Path) -> None:
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["metrics"] for line in lines]
    assert steps[0]["kl"] == 0
    assert steps[-1]["kl"] > 1e-7
    assert all(step["mismatch/difference_max"] < 1e-4 for step in steps)


def test_adapter_merged_model_and_export_are_the_same_policy(finished: Path, tmp_path: Path) -> None:
    base = finished.parents[1] / "moe"
    merged = logits_of(model_in(finished / "model"))
    beside = logits_of(peft.PeftModel.from_pretrained(model_in(base), str(finished / "adapter")))
    torch.testing.assert_close(merged, beside, rtol=0, atol=1e-4)
    assert (merged - logits_of(model_in(base))).abs().max() > 1e-3
    config = json.loads((finished / "adapter" / "adapter_config.json").read_text())
    assert sorted(config["target_parameters"]) == ["experts.down_proj", "experts.gate_up_proj"]

    export_checkpoint(finished, tmp_path / "out")
    saved, exported = model_in(finished / "model").state_dict(), model_in(tmp_path / "out").state_dict()
    assert [name for name in saved if not torch.equal(saved[name], exported[name])] == []
    plain = model_in(base).state_dict()
    changed = {name.rpartition(".")[2] for name in plain if not torch.equal(saved[name], plain[name])}
    assert changed == {"gate_up_proj", "down_proj"}
    name = "adapter_model.safetensors"
    assert (tmp_path / "out" / "adapter" / name).read_bytes() == (finished / "adapter" / name).read_bytes()


def test_blocks_of_experts_cannot_be_leaves(finished: Path, grpox: GrpoxCommand) -> None:
    model = f"model.path={finished.parents[1] / 'moe'}"
    leaves = "deepspeed.settings={zero_optimization: {leaf_module: {classes: [Qwen3MoeSparseMoeBlock]}}}"
    done = grpox("train", *SETTINGS, model, leaves, "output_dir=runs/leaves")
    assert done.returncode == 2, done.stderr
    assert "deepspeed.settings.zero_optimization.leaf_module" in done.stderr


def test_a_run_of_two_ranks_that_was_killed_is_resumed_bit_by_bit(tmp_path: Path) -> None:
    model = prepare(tmp_path)
    overrides = [*SETTINGS, model, "train.per_device_train_batch_size=16"]
    finish(tmp_path, *overrides, "output_dir=runs/whole", ranks=2)
    killed = kill_and_resume(tmp_path, *overrides, steps=4, ranks=2)
    assert (killed / "metrics.undone.jsonl").exists()  # it did go on
    assert_same(tmp_path / "runs" / "whole", killed)


OBJECT = """
import peft
import torch
from transformers import AutoModelForCausalLM

from grpox import train

torch.manual_seed(0)
plain = AutoModelForCausalLM.from_pretrained("moe", dtype=torch.float32)
names = ["experts.gate_up_proj", "experts.down_proj"]
wrapped = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_parameters=names))
for name, parameter in wrapped.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(parameter)
settings = ["model.path=moe", "train.max_steps=1", "train.warmup_steps=0", "train.learning_rate=0.01"]
settings += ["rewards=[{path: mine.py:even}]", "evaluation=null", "tracking={}"]
for given, lora in ((wrapped, []), (plain, ["model.lora={target_parameters: [experts.down_proj]}"])):
    before = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    done = train("quickstart", [*settings, *lora], model=given)
    after = dict(plain.named_parameters())
    saved = AutoModelForCausalLM.from_pretrained(done["model"], dtype=torch.float32)
    assert all(torch.equal(parameter, after[name]) for name, parameter in saved.named_parameters())
    changed = {name for name in after if name not in before or not torch.equal(after[name], before[name])}
    print(*sorted({name.rpartition(".layers.")[2][2:] for name in changed}))
"""


def test_a_peft_model_with_adapted_experts_is_a_plain_model_afterwards(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "script.py").write_text(OBJECT)
    done = processes.run("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    attention = [f"self_attn.{name}_proj.weight" for name in "koqv"]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["mlp.experts.down_proj", *attention] in lines
