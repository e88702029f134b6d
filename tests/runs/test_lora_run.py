"""A run that trains adapters: what it leaves, how much a checkpoint holds, and that it resumes bit by bit."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path

import pytest
import torch
from support import processes
from support.fixtures import GrpoxCommand
from support.killing import assert_same, finish, kill_and_resume
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from grpox.checkpoint.export import export_checkpoint
from grpox.cli.app import app
from grpox.training.replay import open_dump, replay

peft = pytest.importorskip("peft")

QUICKSTART = Path(str(importlib.resources.files("grpox.runfile.recipes") / "quickstart" / "model"))
SETTINGS = (
    "model.lora={r: 4, alpha: 8}",
    "train.learning_rate=0.002",
    "train.beta=0.04",
    "train.per_device_train_batch_size=32",
    "train.steps_per_generation=2",
    "evaluation=null",
    "tracking={}",
)


SAVING = ("train.max_steps=6", "checkpoint.every=3")


@pytest.fixture(scope="module")
def finished(grpox: GrpoxCommand, folder: Path) -> Path:
    done = grpox("train", "quickstart", *SETTINGS, *SAVING, "output_dir=runs/lora")
    assert done.returncode == 0, done.stderr
    assert "training 23,552 of" in done.stderr
    return folder / "runs" / "lora"


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    ids = AutoTokenizer.from_pretrained(str(QUICKSTART))("37+48=", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits
    return logits


def base() -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(str(QUICKSTART), dtype=torch.float32)
    return model


def model_in(path: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    return model


def test_adapter_and_merged_model_are_the_same_policy_and_another_one_than_the_base(finished: Path) -> None:
    merged = logits_of(model_in(finished / "model"))
    beside = logits_of(peft.PeftModel.from_pretrained(base(), str(finished / "adapter")))
    torch.testing.assert_close(merged, beside, rtol=0, atol=1e-4)
    assert (merged - logits_of(base())).abs().max() > 0.01
    config = json.loads((finished / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(QUICKSTART))


def test_what_was_not_adapted_is_bit_by_bit_what_it_was(finished: Path) -> None:
    merged, plain = model_in(finished / "model").state_dict(), base().state_dict()
    assert merged.keys() == plain.keys()
    changed = {name for name in plain if not torch.equal(merged[name], plain[name])}
    assert {name.split(".")[-2] for name in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


def test_the_summary_and_the_report_tell_what_was_trained(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["trained_parameters"] == 23_552
    whole = sum(parameter.numel() for parameter in base().parameters())
    assert summary["parameters"] == whole + 23_552
    assert Path(summary["adapter"]) == Path("runs/lora/adapter")  # in the run's working directory
    assert "23,552 of" in (finished / "report.html").read_text(encoding="utf-8")


def test_a_checkpoint_holds_no_frozen_weights(finished: Path) -> None:
    [first, last] = sorted((finished / "checkpoints").iterdir())
    size = sum(path.stat().st_size for path in (last / "engine").iterdir())
    whole = (QUICKSTART / "model.safetensors").stat().st_size
    assert size < 0.3 * whole  # of full training: more than three times
    assert first.name == "step-00000003"


def test_an_exported_checkpoint_is_the_model_that_the_run_saved(finished: Path, tmp_path: Path) -> None:
    export_checkpoint(finished, tmp_path / "out")
    saved, exported = model_in(finished / "model").state_dict(), model_in(tmp_path / "out").state_dict()
    assert [name for name in saved if not torch.equal(saved[name], exported[name])] == []
    name = "adapter_model.safetensors"
    assert (tmp_path / "out" / "adapter" / name).read_bytes() == (finished / "adapter" / name).read_bytes()


OBJECT = """
import torch
from transformers import AutoModelForCausalLM

from grpox import train

model = AutoModelForCausalLM.from_pretrained({base!r}, dtype=torch.float32)
before = {{name: parameter.detach().clone() for name, parameter in model.named_parameters()}}
# Sampled through the shards, adapters and all.
settings = ["model.lora={{r: 4}}", "train.max_steps=1", "train.warmup_steps=0", "train.learning_rate=0.01"]
settings += ["generator={{name: hf, gather_weights: false}}", "evaluation=null", "tracking={{}}"]
done = train("quickstart", settings, model=model)
after = dict(model.named_parameters())
saved = AutoModelForCausalLM.from_pretrained(done["model"], dtype=torch.float32)
assert after.keys() == before.keys()
assert all(torch.equal(parameter, after[name]) for name, parameter in saved.named_parameters())
print(sum(not torch.equal(after[name], before[name]) for name in before), "changed")
"""


def test_a_model_object_is_a_plain_model_afterwards(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OBJECT.format(base=str(QUICKSTART)))
    done = processes.run("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "14 changed"


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


def test_a_step_that_is_not_finite_is_replayed_with_the_adapters_merged_in(
    grpox: GrpoxCommand, folder: Path
) -> None:
    (folder / "mine.py").write_text(FAULTY)
    of_mine = ("rewards=[{path: mine.py:marks}]", "loss={path: mine.py:Root}", "train.warmup_steps=0")
    done = grpox("train", "quickstart", *SETTINGS, *of_mine, "train.max_steps=4", "output_dir=runs/faulty")
    assert done.returncode == 1, done.stderr
    assert "the loss is nan in step 3: policy loss nan" in done.stderr
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_was_killed_is_resumed_bit_by_bit(finished: Path, tmp_path: Path, ranks: int) -> None:
    overrides = [*SETTINGS, f"train.per_device_train_batch_size={32 // ranks}", *SAVING]
    whole = finished if ranks == 1 else tmp_path / "runs" / "whole"
    if ranks > 1:
        finish(tmp_path, "quickstart", *overrides, "output_dir=runs/whole", ranks=ranks)
    killed = kill_and_resume(tmp_path, "quickstart", *overrides, steps=4, ranks=ranks)
    assert (killed / "metrics.undone.jsonl").exists()  # it did go on
    assert_same(whole, killed)
