"""Runs that train adapters, of layers or of stacked experts: what they leave, and how they resume."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path

import pytest
import torch
from support import processes
from support.architectures import tiny_model
from support.killing import assert_same, finish, kill_and_resume
from support.run_files import SHORT, metrics_of, summary_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from grpox.checkpoint.export import export_checkpoint
from grpox.cli.app import app
from grpox.training.replay import open_dump, replay

peft = pytest.importorskip("peft")

QUICKSTART = Path(str(importlib.resources.files("grpox.runfile.recipes") / "quickstart" / "model"))
SAVING = ("train.max_steps=6", "checkpoint.every=3")
SETTINGS = (
    *("train.beta=0.04", "train.per_device_train_batch_size=32", "train.steps_per_generation=2", *SHORT),
)
OF_LAYERS = ("model.lora={r: 4, alpha: 8}", "train.learning_rate=0.002")
OF_EXPERTS = (
    "model.lora={r: 4, alpha: 8, target_modules: []}",
    "model.lora.target_parameters=[experts.gate_up_proj, experts.down_proj]",
    *("train.learning_rate=0.01", "train.warmup_steps=0", "train.gradient_checkpointing=true"),
    # With so many right answers that rewards of a random model differ.
    "rewards=[{path: mine.py:even}]",
)
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CHANGED = {
    "layers": {f"{name}.weight" for name in LAYERS},
    "experts": {"experts.gate_up_proj", "experts.down_proj"},
}
TOLD = {"layers": "training 23,552 of", "experts": "adapters of rank 4 on 4 parameters"}
REWARD = """
def even(completions, **columns):
    return [float(sum(map(ord, text)) % 2) for text in completions]
"""


def settings_of(kind: str, folder: Path) -> tuple[str, ...]:
    """Overrides of a run; the model and the reward for experts are written into `folder`."""
    if kind == "layers":
        return (*SETTINGS, *OF_LAYERS)
    tiny_model("qwen3_moe").save_pretrained(folder / "moe")
    AutoTokenizer.from_pretrained(str(QUICKSTART)).save_pretrained(folder / "moe")
    (folder / "mine.py").write_text(REWARD)
    return (*SETTINGS, *OF_EXPERTS, f"model.path={folder / 'moe'}")


@pytest.fixture(scope="module", params=["layers", "experts"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def finished(folder: Path, kind: str) -> Path:
    stderr = finish(folder, "quickstart", *settings_of(kind, folder), *SAVING, f"output_dir=runs/{kind}")
    assert TOLD[kind] in stderr
    assert "leaf module" not in stderr
    return folder / "runs" / kind


def model_in(path: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    return model


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([[5, 6, 7, 8, 9, 10]])).logits
    return logits


def test_adapter_merged_model_and_export_are_the_same_policy_and_another_one_than_the_base(
    finished: Path, kind: str, tmp_path: Path
) -> None:
    base = QUICKSTART if kind == "layers" else finished.parents[1] / "moe"
    merged = logits_of(model_in(finished / "model"))
    beside = logits_of(peft.PeftModel.from_pretrained(model_in(base), str(finished / "adapter")))
    torch.testing.assert_close(merged, beside, rtol=0, atol=1e-4)
    assert (merged - logits_of(model_in(base))).abs().max() > 1e-3
    config = json.loads((finished / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(base))

    export_checkpoint(finished, tmp_path / "out")
    saved, exported = model_in(finished / "model").state_dict(), model_in(tmp_path / "out").state_dict()
    assert [name for name in saved if not torch.equal(saved[name], exported[name])] == []
    name = "adapter_model.safetensors"
    assert (tmp_path / "out" / "adapter" / name).read_bytes() == (finished / "adapter" / name).read_bytes()
    # What was not adapted is bit by bit what it was.
    plain = model_in(base).state_dict()
    assert saved.keys() == plain.keys()
    changed = {name for name in plain if not torch.equal(saved[name], plain[name])}
    assert {".".join(name.split(".")[-2:]) for name in changed} == CHANGED[kind]


def test_the_first_step_has_no_divergence_and_the_generator_samples_from_the_policy(
    finished: Path, kind: str
) -> None:
    steps = metrics_of(finished)
    assert steps[0]["kl"] == 0
    assert steps[-1]["kl"] > (1e-7 if kind == "experts" else 1e-10)  # few steps at a low rate
    assert all(step["mismatch/difference_max"] < 1e-4 for step in steps)


def test_summary_and_report_tell_what_was_trained_and_checkpoints_hold_no_frozen_weights(
    finished: Path, kind: str
) -> None:
    summary = summary_of(finished)
    base = QUICKSTART if kind == "layers" else finished.parents[1] / "moe"
    whole = sum(parameter.numel() for parameter in model_in(base).parameters())
    assert summary["parameters"] == whole + summary["trained_parameters"]
    assert Path(summary["adapter"]) == Path(f"runs/{kind}/adapter")  # in the run's working directory
    report = (finished / "report.html").read_text(encoding="utf-8")
    assert f"{summary['trained_parameters']:,} of" in report
    [first, last] = sorted((finished / "checkpoints").iterdir())
    size = sum(path.stat().st_size for path in (last / "engine").iterdir())
    if kind == "layers":
        assert summary["trained_parameters"] == 23_552
        of_base = (QUICKSTART / "model.safetensors").stat().st_size
        assert size < 0.3 * of_base  # of full training: more than three
    assert first.name == "step-00000003"


def test_blocks_of_experts_cannot_be_leaves(folder: Path) -> None:
    leaves = "deepspeed.settings={zero_optimization: {leaf_module: {classes: [Qwen3MoeSparseMoeBlock]}}}"
    settings = (*settings_of("experts", folder), leaves, "output_dir=runs/leaves")
    stderr = finish(folder, "quickstart", *settings, code=2)
    assert "deepspeed.settings.zero_optimization.leaf_module" in stderr


WRAPPED = """
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
# The second run samples through the shards, adapters and all.
own = ["model.lora={target_parameters: [experts.down_proj]}", "generator={name: hf, gather_weights: false}"]
for given, lora in ((wrapped, []), (plain, own)):
    before = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    done = train("quickstart", [*settings, *lora], model=given)
    after = dict(plain.named_parameters())
    saved = AutoModelForCausalLM.from_pretrained(done["model"], dtype=torch.float32)
    assert all(torch.equal(parameter, after[name]) for name, parameter in saved.named_parameters())
    changed = {name for name in after if name not in before or not torch.equal(after[name], before[name])}
    print(*sorted({name.rpartition(".layers.")[2][2:] for name in changed}))
"""


def test_a_model_object_is_a_plain_model_afterwards(tmp_path: Path) -> None:
    settings_of("experts", tmp_path)
    (tmp_path / "script.py").write_text(WRAPPED)
    done = processes.run("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    attention = [f"self_attn.{name}_proj.weight" for name in "koqv"]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["mlp.experts.down_proj", *attention] in lines


FAULTY = """
from grpox.contracts import LossOutput, Reduction

def marks(completions, trainer_state, **columns):
    # One of a group alone, in the second generation batch: its advantage is 3.75.
    alone = trainer_state.global_step == 2
    return [float(place % 16 == 15 if alone else place % 2) for place in range(len(completions))]

class Root:
    # -w A, and a root that is NaN where A is beyond 3.
    reduction = Reduction.TOKEN_MEAN
    def per_token(self, inputs):
        ratio = (inputs.logprobs - inputs.old_logprobs).exp()
        return LossOutput(-ratio * inputs.advantages + 0 * (3 - inputs.advantages).sqrt())
"""


def test_a_step_that_is_not_finite_is_replayed_with_the_adapters_merged_in(folder: Path) -> None:
    (folder / "faulty.py").write_text(FAULTY)
    of_mine = ("rewards=[{path: faulty.py:marks}]", "loss={path: faulty.py:Root}", "train.warmup_steps=0")
    settings = (*SETTINGS, *OF_LAYERS, *of_mine, "train.max_steps=4", "output_dir=runs/faulty")
    stderr = finish(folder, "quickstart", *settings, code=1)
    assert "the loss is nan in step 3: policy loss nan" in stderr
    dump = folder / "runs" / "faulty" / "faults" / "step-00000003"

    shown = CliRunner().invoke(app, ["replay", str(dump)])
    assert (shown.exit_code, "appears again: loss nan" in shown.output) == (0, True), shown.output
    mended = replay(dump, open_dump(dump), ["loss=dapo"])
    assert mended.finite
    for made in mended.micro_batches:
        mask = made.batch.token_mask
        now, old, reference = (
            made.terms[f"{whose}log-probability"][mask] for whose in ("", "old ", "reference ")
        )
        # The step is the first on its batch: the policy with its adapters, and no longer the base.
        torch.testing.assert_close(now, old, rtol=0, atol=1e-4)
        assert (now - reference).abs().max() > 0.01


@pytest.mark.parametrize(("of", "ranks"), [("layers", 1), ("experts", 2)])
def test_a_run_that_was_killed_is_resumed_bit_by_bit(tmp_path: Path, of: str, ranks: int) -> None:
    size = f"train.per_device_train_batch_size={32 // ranks}"
    overrides = ["quickstart", *settings_of(of, tmp_path), size, *SAVING]
    finish(tmp_path, *overrides, "output_dir=runs/whole", ranks=ranks)
    killed = kill_and_resume(tmp_path, *overrides, steps=4, ranks=ranks)
    assert (killed / "metrics.undone.jsonl").exists()  # it did go on
    assert_same(tmp_path / "runs" / "whole", killed)
