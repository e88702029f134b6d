"""Losses, corrections, adapters and samples of an earlier policy, and the rest of a run file."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from support.run_checks import refused_quickstart
from typer.testing import CliRunner

from grpox.cli.app import app
from grpox.config import LoraConfig, ModelConfig
from grpox.policy.memory_plan.of_run import run_setting
from grpox.runfile import model_options
from grpox.runfile.load import load_run
from grpox.runfile.model_options import weight_names

LOSSES = """
from grpox.contracts import Reduction

class Sampled:
    reduction = Reduction.TOKEN_MEAN
    needs = ("sampler_logprobs",)
    def per_token(self, inputs): ...

class Referred(Sampled):
    needs = ("reference_logprobs",)

class OfGroups(Sampled):
    scope = "group"
    needs = ("group_ids",)

class Nameless(OfGroups):
    needs = ()

class OfRows(OfGroups):
    scope = "rows"

class Silent(Sampled):
    needs = ()

class OfTokens(Silent):
    level = "token"

class OfWords(Silent):
    level = "word"

class Everything(OfGroups):
    needs = ("entropy_gradient", "reference_logprobs", "sampler_logprobs", "rewards", "group_ids",
             "sequence_ids", "columns")
"""
NEAR = "train.off_policy_mask_threshold=0.5"
ROUNDS = "train.dynamic_sampling_rounds=2"
SERVER = "generator=vllm-server"
AHEAD = "train.max_staleness=1"
LORA = "model.lora={}"
MUTE = "class Mute:\n    start = generate = sync = sleep = wake = close = lambda *_: None\n"


@pytest.fixture(autouse=True)
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("losses.py").write_text(LOSSES)
    Path("mute.py").write_text(MUTE)


def loss(name: str) -> str:
    return f"loss={{path: losses.py:{name}}}"


def test_a_loss_may_need_all_of_them_and_the_plan_counts_its_reference() -> None:
    run = load_run("quickstart", [loss("Everything")])
    assert run.needs_reference
    assert not load_run("quickstart", [loss("OfGroups")]).needs_reference
    assert load_run("quickstart", ["train.beta=0.1"]).needs_reference
    # The memory plan counts the reference.
    for name, has_reference in (("OfGroups", False), ("Referred", True)):
        assert run_setting(load_run("quickstart", [loss(name)]), False).reference is has_reference
    # A reference may follow without a penalty if the loss needs it.
    load_run("quickstart", [loss("Referred"), "train.sync_ref_model=true"])
    (problem,) = refused_quickstart(loss("Sampled"), "train.sync_ref_model=true")
    assert (problem.key, problem.given) == ("train.sync_ref_model", "true")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (loss("Sampled"), "loss"),
        (NEAR, "train.off_policy_mask_threshold"),
        ("train.old_logprobs=generator", "train.old_logprobs"),
    ],
)
def test_what_reads_the_generators_log_probabilities_needs_them_unchanged(override: str, key: str) -> None:
    (problem,) = refused_quickstart(override, "generator={path: mute.py:Mute}")
    assert problem.key == key
    assert "does not say that it reports log-probabilities" in problem.what
    (problem,) = refused_quickstart(override, "sampling.top_p=0.9")
    assert (problem.key, problem.given) == (key, "sampling with top_p 0.9")


@pytest.mark.parametrize(("size", "nearest"), [(8, "16"), (24, "16 or 32"), (40, "32 or 48")])
def test_a_batch_size_that_parts_groups_of_16_is_refused(size: int, nearest: str) -> None:
    sizes = (f"train.per_device_train_batch_size={size}", "train.gradient_accumulation_steps=2")
    (problem,) = refused_quickstart(loss("OfGroups"), *sizes)
    assert (problem.key, problem.given) == ("train.per_device_train_batch_size", str(size))
    assert problem.nearest == nearest
    load_run("quickstart", [loss("Sampled"), *sizes])


@pytest.mark.parametrize(
    ("prompt", "least"),
    [("data.max_prompt_length=10", 16 * (10 + 4)), ("data.max_prompt_length=null", 16 * (1 + 4))],
)
def test_a_budget_less_than_a_group_can_need_is_refused(prompt: str, least: int) -> None:
    budget = "train.max_tokens_per_micro_batch={}"
    load_run("quickstart", [loss("OfGroups"), prompt, budget.format(least)])
    (problem,) = refused_quickstart(loss("OfGroups"), prompt, budget.format(least - 1))
    assert (problem.key, problem.given) == ("train.max_tokens_per_micro_batch", str(least - 1))
    load_run("quickstart", [loss("Sampled"), prompt, budget.format(least - 1)])


def test_settings_that_go_together() -> None:
    load_run("quickstart", [NEAR, ROUNDS, "train.entropy_coef=0.01", "train.top_entropy_quantile=0.2"])
    load_run("quickstart", ["train.entropy_coef=0.02", "train.adaptive_entropy={min: 0.01, max: 0.02}"])
    # A generator that samples ahead, and a correction.
    assert load_run("quickstart", [SERVER, AHEAD]).config.correction.name == "token-truncate"
    given = load_run("quickstart", [SERVER, AHEAD, "correction=token-mask"])
    assert given.config.correction.name == "token-mask"
    of_generator = load_run("quickstart", [SERVER, AHEAD, "train.old_logprobs=generator"])
    assert of_generator.config.correction.name == "none"


COEF, ADAPTIVE = "train.entropy_coef={}", "train.adaptive_entropy={{{}}}"
ADAPTER = "generator={name: vllm-colocate, lora_sync: adapter}"
SYNC, KWARGS = "train.sync_ref_model=true", "train.gradient_checkpointing_kwargs"


@pytest.mark.parametrize(
    ("overrides", "key", "given", "cure"),
    [
        (["train.old_logprobs=generator", "correction=token-truncate"], "correction", "", "none"),
        ([loss("Nameless")], "loss", "needs ()", "needs = ('group_ids',)"),
        ([loss("OfRows")], "loss", "'rows'", ""),
        (["advantage={path: scaler.py:Mine}"], "advantage", "needs ('rewards',)", "that does without it"),
        ([COEF.format(0), ADAPTIVE.format("min: 0.5, max: 0.2")], "train.adaptive_entropy.min", "0.5", "0.2"),
        ([COEF.format(0), ADAPTIVE.format("min: 0.01")], "train.entropy_coef", "0", "0.01"),
        ([COEF.format(2), ADAPTIVE.format("")], "train.entropy_coef", "2", "1"),
        ([ROUNDS, "train.max_steps=-1"], "train.max_steps", "-1", "at least 0"),
        ([ROUNDS, AHEAD, SERVER], "train.dynamic_sampling_rounds", "2", "null, or train.max_staleness: 0"),
        ([AHEAD, "generator=hf"], "train.max_staleness", "1", "0 or with generator vllm-server"),
        ([AHEAD, "generator=vllm-colocate"], "train.max_staleness", "1", "0 or with generator vllm-server"),
        ([AHEAD, SERVER, "correction=none"], "train.max_staleness", "1", "0, or a correction such as"),
        ([AHEAD, SERVER, "correction=none"], "train.max_staleness", "1", "or train.old_logprobs: generator"),
        ([AHEAD, SERVER, "sampling.top_p=0.9"], "train.max_staleness", "1, sampling with top_p 0.9, ", "0"),
        (["loss={path: losses.py:OfWords}"], "loss", "'word'", ""),
        (["model.lora={dropout: 0.05}"], "model.lora.dropout", "uses no dropout", ""),
        (["model.lora={target_modules: []}"], "model.lora.target_modules", "is empty", ""),
        (["model.lora={target_parameters: ['']}"], "model.lora.target_parameters", "an empty name", ""),
        ([ADAPTER], "generator.lora_sync", "there is no adapter", ""),
        ([ADAPTER, "model.lora={target_parameters: [a.b]}"], "generator.lora_sync", "adapter", "merged"),
        ([ADAPTER, "model.lora={target_parameters: [a.b]}"], "generator.lora_sync", "target_parameters", ""),
        ([LORA, "train.beta=0.1", SYNC], "train.sync_ref_model", "does not work with adapters", ""),
        (
            [LORA, "train.gradient_checkpointing=true", f"{KWARGS}={{use_reentrant: true}}"],
            f"{KWARGS}.use_reentrant", "give no gradient", "",
        ),
        (["model.lora={target_modules: [q_proj, v_prj]}"], "model.lora.target_modules", "v_prj", "v_proj"),
        (["model.lora={target_modules: [q_proj, v_prj]}"], "model.lora.target_modules", "", "down_proj"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(overrides: list[str], key: str, given: str, cure: str) -> None:
    Path("scaler.py").write_text("class Mine:\n    needs = ('rewards',)\n    def scale(self, *_): ...\n")
    problem = next(problem for problem in refused_quickstart(*overrides) if problem.key == key)
    assert given in f"{problem.given} {problem.what}"
    assert cure in f"{problem.nearest} {problem.allowed}"


def test_the_plan_says_that_it_replaces_nothing() -> None:
    arguments = ["plan", "quickstart", "--generations", "1"]
    plain, dynamic = (CliRunner().invoke(app, [*arguments, *more]).output for more in ([], [ROUNDS]))
    assert "dynamic sampling" not in plain
    told = " ".join(dynamic.split())
    assert "shown without dynamic sampling" in told
    assert "at most; fewer if dynamic sampling replaces groups" in told


CORRECTIONS = {
    "none": None,
    **dict.fromkeys(("token-truncate", "token-mask", "geometric-mask"), "token"),
    **dict.fromkeys(("sequence-truncate", "sequence-mask"), "sequence"),
}
LEVELS = {
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "dppo"), "token"),
    **dict.fromkeys(("luspo", "gspo-token", "topr"), "sequence"),
}


def warnings(loss: str, correction: str) -> tuple[str, ...]:
    return load_run("quickstart", [f"loss={loss}", f"correction={correction}"]).warnings


@pytest.mark.parametrize(
    ("loss", "correction"),
    [*((loss, "sequence-mask") for loss in LEVELS), *(("dapo", each) for each in CORRECTIONS)],
)
def test_a_correction_of_sequences_in_a_loss_of_tokens_is_told(loss: str, correction: str) -> None:
    told = warnings(loss, correction)
    is_mixed = (LEVELS[loss], CORRECTIONS[correction]) == ("token", "sequence")
    assert len(told) == is_mixed
    if is_mixed:
        facts = (f"correction: {correction} ", f"loss: {loss} ", "token-truncate", "level: sequence")
        assert [fact for fact in facts if fact not in told[0]] == []
        assert "\n" not in told[0]


@pytest.mark.parametrize(("loss", "told"), [("grpo", 0), ("dr_grpo", 1), ("dapo", 1), ("bnpo", 1)])
def test_a_ratio_of_sequences_in_a_sum_over_tokens_is_told_as_in_trl(loss: str, told: int) -> None:
    lines = warnings(f"{{name: {loss}, level: sequence}}", "none")
    assert len(lines) == told
    assert all(f"loss: {loss} with level: sequence" in line for line in lines)


def test_a_loss_has_its_level_also_from_a_parameter_or_a_file_and_silence_is_no_warning() -> None:
    assert warnings("{name: grpo, level: sequence}", "sequence-mask") == ()
    assert len(warnings("{path: losses.py:OfTokens}", "sequence-mask")) == 1
    assert warnings("{path: losses.py:Silent}", "sequence-mask") == ()


def test_validate_prints_it_once_and_is_content() -> None:
    arguments = ["validate", "quickstart", "loss=dapo", "correction=sequence-mask"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    assert done.stderr.count("warning: correction: sequence-mask") == 1
    assert CliRunner().invoke(app, ["validate", "quickstart"]).stderr == ""


MODEL = Path(str(resources.files("grpox.runfile.recipes") / "quickstart" / "model"))


def test_adapters_that_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_run("quickstart", ["model.lora={target_modules: [], target_parameters: [a.b]}"]).config.model
    assert config.lora is not None
    assert (config.lora.target_modules, config.lora.target_parameters) == ([], ["a.b"])
    load_run("quickstart", ["model.lora={target_parameters: [a.b]}", "generator={name: vllm-colocate}"])
    # What is like no name of the checkpoint may be one of the model's: those are told when it is loaded.
    load_run("quickstart", ["model.lora={target_modules: [self_attn.q_proj, experts]}"])
    # An empty section is all linear layers, with the numbers of TRL.
    config = load_run("quickstart", [LORA]).config.model.lora
    assert config == LoraConfig(r=16, alpha=32, dropout=0, target_modules="all-linear")
    assert ModelConfig(path="x").lora is None

    # Without peft, the line that installs it is told.
    def missing(name: str) -> Any:
        return None if name == "peft" else object()

    monkeypatch.setattr(model_options, "find_spec", missing)
    (problem,) = refused_quickstart(LORA)
    assert problem.key == "model.lora"
    assert "pip install 'grpox[lora]'" in problem.what
    load_run("quickstart")


def test_names_are_read_from_one_file_or_from_the_index_of_several(tmp_path: Path) -> None:
    assert "model.layers.0.self_attn.q_proj.weight" in weight_names(MODEL)
    index = {"weight_map": {"a.weight": "model-00001.safetensors", "b.weight": "model-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_names(tmp_path) == ["a.weight", "b.weight"]


@pytest.mark.parametrize(
    "content", [b"", b"12345678", b"\x04\0\0\0\0\0\0\0[1,2", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]"]
)
def test_files_that_are_damaged_are_left_to_whoever_loads_the_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert weight_names(tmp_path) == []
    assert weight_names(tmp_path / "nowhere") == []
