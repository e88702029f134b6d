"""`grpox import-trl`: scripts and YAML files for TRL's GRPO become run files of the same algorithm."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.golden import Golden
from typer.testing import CliRunner, Result

from grpox.cli import app as cli
from grpox.cli.import_trl import import_trl
from grpox.config import AdaptiveEntropyConfig
from grpox.errors import ConfigError, Problem
from grpox.runfile.from_trl.convert import our_default
from grpox.runfile.from_trl.fields import FIELDS, GRPO_FIELDS, TRAINER_FIELDS, TRL_REWARDS, Verdict
from grpox.runfile.from_trl.script import read_script
from grpox.runfile.load import ResolvedRun, load_run
from grpox.runfile.yaml_lines import read_yaml

ROOT = Path(__file__).parents[3]
YAML = """\
model_name_or_path: org/model
dataset_name: org/data
reward_funcs: [think_format_reward]
"""
SCRIPT = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


def main():
    dataset = load_dataset("org/data", split="train[:100]")
    args = GRPOConfig({arguments})
    trainer = GRPOTrainer(
        model="org/model",
        reward_funcs=reward_len,
        args=args,
        train_dataset=dataset,
    )
    trainer.train()


if __name__ == "__main__":
    main()
"""
"""As TRL's documentation has it, but that importing it does not train."""

Import = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def imported(folder: Path) -> Import:
    """Imports a text and returns the data of the run file, and its text."""

    def run(text: str, name: str = "grpo.yaml") -> tuple[dict[str, Any], str]:
        Path(name).write_text(text)
        import_trl(Path(name), Path("run.yaml"), force=True)
        written = Path("run.yaml").read_text()
        return read_yaml(written, "run.yaml").data, written

    return run


def script(arguments: str = "") -> str:
    return SCRIPT.replace("{arguments}", arguments)


def refused(text: str, name: str) -> list[Problem]:
    Path(name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        import_trl(Path(name), Path("run.yaml"))
    assert not Path("run.yaml").exists()
    return caught.value.problems


def command(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["import-trl", *arguments], env={"COLUMNS": "200"})


def told(result: Result, name: str) -> str:
    """Return the table's text on a field, its verdict first."""
    [line] = [line for line in result.stderr.splitlines() if f" {name} " in line]
    return " ".join(line.split()).partition(f"{name} ")[2]


def loaded() -> ResolvedRun:
    return load_run("run.yaml", world_size=1)


# -- What is read ----------------------------------------------------------------------------------------


def test_a_script_as_trl_documents_it_becomes_a_run_that_validates(
    imported: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The script is executed for its reward; TRL itself takes seconds to import, and need not be there.
    trl = types.ModuleType("trl")
    vars(trl).update(GRPOConfig=None, GRPOTrainer=None)
    monkeypatch.setitem(sys.modules, "trl", trl)
    arguments = 'output_dir="runs/b", use_vllm=True, vllm_mode="server", num_train_epochs=2, bf16=False'
    imported(script(arguments), "train.py")
    run = loaded()
    assert run.num_prompts is None
    assert run.config.data.split == "train[:100]"
    assert run.config.generator.label == "vllm-server"
    assert (run.config.correction.label, run.config.correction.params) == (
        "sequence-mask",
        {"low": 0.0, "high": 3.0},
    )
    assert run.config.rewards[0].label == "reward_len"
    assert (run.config.train.num_train_epochs, run.config.model.dtype) == (2, "float32")


def test_the_run_file_and_the_table_as_they_are_written(folder: Path, golden: Golden, imported: Import) -> None:
    Path("train.py").write_text(script("beta=0.04, seed=seeds[0], fp16=False, report_to='wandb'"))
    golden(command("train.py").stderr)
    golden(imported(YAML)[1], "yaml")
    arguments = 'output_dir="b", learning_rate=LR, beta=0.04, use_vllm=True, vllm_mode="server", seed=seeds[0]'
    golden(imported(script(arguments), "train.py")[1], "script")


def test_only_literals_that_are_never_changed_are_read(folder: Path, imported: Import) -> None:
    text = script("learning_rate=LR, beta=beta, epsilon=eps, num_iterations=n, seed=SEED, **OPTIONS")
    before = 'LR = -(-1e-5)\nSEED = int("3")\nOPTIONS = {"temperature": 0.9, "top_p": P}\nP = 1.0\n'
    inside = "\n    beta = 0.1\n    eps = 0.1\n    eps = 0.3\n    n = 1\n    if LR:\n        n = 2\n"
    text = before + text.replace("def main():\n", f"def main():{inside}")
    Path("train.py").write_text(text)
    done = command("train.py")
    data = read_yaml(done.stdout, "stdout").data
    assert (data["train"]["learning_rate"], data["train"]["beta"]) == (1e-5, 0.1)
    assert (data["sampling"]["temperature"], data["sampling"]["top_p"]) == (0.9, 1.0)
    assert "seed" not in data["train"]
    line = text[: text.index("seed=SEED")].count("\n") + 1
    assert f"  # line {line}: seed=SEED\n  # seed: ?\n" in done.stdout
    assert "# loss.clip_low: ?" in done.stdout
    assert "  # num_iterations: ?" in done.stdout
    assert told(done, "seed") == "SEED not a literal fill in train.seed"
    assert "3 to fill in" in done.stderr
    # A value that is set again or changed in place is left.
    changes = '    args.beta = 0.2\n    kwargs = {"stop": ["x"]}\n    kwargs["stop"] = []\n    trainer = '
    text = script("beta=0.1, generation_kwargs=kwargs").replace("    trainer = ", changes)
    data, written = imported(text, "train.py")
    assert "beta" not in data["train"]
    assert "generation_kwargs" not in data["sampling"]
    assert "set again: args.beta" in written
    assert "  # generation_kwargs: ?" in written


def test_a_script_that_would_train_is_not_named_for_its_reward(folder: Path) -> None:
    text = script().replace('if __name__ == "__main__":\n    main()', "open('ran', 'w')\nmain()")
    Path("train.py").write_text(text)
    done = command("train.py")
    assert not Path("ran").exists()  # nothing of it is run
    assert "rewards" not in read_yaml(done.stdout, "stdout").data
    assert "# - {path: 'rewards.py:name'}" in done.stdout
    for fact in ("move it to rewards.py", "train.py", "would train (line 22)"):
        assert fact in done.stdout


def test_rewards_of_every_kind(imported: Import) -> None:
    Path("mine.py").write_text("def short(completions): return [0.0] * len(completions)\n")
    functions = '[accuracy_reward, "org/judge", short, punish, lambda completions: [0.0]]'
    text = script("reward_weights=[1, 0.5, 2, 0.1, 3]").replace(
        "reward_funcs=reward_len", f"reward_funcs={functions}"
    )
    text = (
        "from mine import short\nfrom trl.rewards import accuracy_reward, get_soft_overlong_punishment\n"
        f"punish = get_soft_overlong_punishment(max_completion_len=512, soft_punish_cache=128)\n{text}"
    )
    data, written = imported(text, "train.py")
    assert data["rewards"] == [
        {"name": "math", "column": "solution"},
        {"name": "reward_model", "model": "org/judge", "weight": 0.5},
        {"path": "mine.py:short", "weight": 2},
        {"name": "soft_overlong", "max_length": 512, "buffer": 128, "weight": 0.1},
    ]
    assert "  # - {path: 'rewards.py:name', weight: 3}" in written
    # Those that lie elsewhere, and a list that is appended to.
    text = script().replace("reward_funcs=reward_len", "reward_funcs=[here, pkg.near, far, far.away]")
    _, written = imported(f"from . import here, pkg\nimport far\n{text}", "train.py")
    assert written.count("# - {path: 'rewards.py:name'}") == 4
    assert "from ..pkg import near" in written
    text = script().replace("reward_funcs=reward_len", "reward_funcs=functions")
    _, written = imported(f"functions = []\nfunctions.append(len)\n{text}", "train.py")
    lines = [line.strip() for line in written.splitlines()]
    assert lines[lines.index("# - {path: 'rewards.py:name'}") - 1].endswith("line 16: functions")


CORRECT_BY_MATH = {"correct_by": "math", "column": "solution"}


@pytest.mark.parametrize(
    ("call", "entry"),
    [
        (
            "trl.rewards.get_cosine_scaled_reward(100, -2.0, min_value_correct=0.25)",
            {"name": "cosine", "max_length": 100, "min_value_wrong": -2.0, "min_value_correct": 0.25}
            | CORRECT_BY_MATH,
        ),
        ("get_repetition_penalty_reward()", {"name": "repetition", "size": 3, "unit": "tokens"}),
        (
            "get_repetition_penalty_reward(4, max_penalty=-0.5)",
            {"name": "repetition", "size": 4, "unit": "tokens", "weight": 0.5},
        ),
    ],
)
@pytest.mark.parametrize("factor", [None, 3])
def test_rewards_that_a_function_of_trl_returns(
    imported: Import, call: str, entry: dict[str, Any], factor: int | None
) -> None:
    weights = "" if factor is None else f"reward_weights=[{factor}]"
    text = script(weights).replace("reward_funcs=reward_len", f"reward_funcs=[{call}]")
    text = f"import trl.rewards\nfrom trl.rewards import get_repetition_penalty_reward\n{text}"
    weight = {} if factor is None else {"weight": factor * entry.get("weight", 1)}
    assert imported(text, "train.py")[0]["rewards"] == [entry | weight]


@pytest.mark.parametrize(
    ("module", "call", "why"),
    [
        ("open_r1.rewards", "get_cosine_scaled_reward(100)", "write it as a function"),  # counts characters
        ("trl.rewards", "get_cosine_scaled_reward(longest())", "not literals"),
        ("trl.rewards", "get_cosine_scaled_reward()", "not literals"),
        ("trl.rewards", "get_cosine_scaled_reward(100, max_words=3)", "not literals"),
    ],
)
def test_a_reward_that_no_entry_stands_for_is_left_to_the_user(
    imported: Import, module: str, call: str, why: str
) -> None:
    text = script().replace("reward_funcs=reward_len", f"reward_funcs=[{call}]")
    data, written = imported(f"from {module} import get_cosine_scaled_reward\n{text}", "train.py")
    assert "rewards" not in data
    assert why in written


@pytest.mark.parametrize(
    ("call", "data"),
    [
        (
            'load_dataset("org/data", "main", split="test")',
            {"path": "org/data", "subset": "main", "split": "test"},
        ),
        (
            'load_dataset("org/data", streaming=True)["valid"]',
            {"path": "org/data", "split": "valid", "streaming": True},
        ),
        ('load_dataset("json", data_files="a.jsonl")["train"].shuffle()', {"path": "a.jsonl"}),
        ('load_dataset("csv", data_files={"train": ["b.csv"]}, split="train")', {"path": "b.csv"}),
        ('load_dataset("org/data").map(prepare)', None),
        ('load_dataset("org/data", data_dir="x")', None),
        ("load_dataset(NAME)", None),
        ('load_dataset("gsm8k")', None),
        ("Dataset.from_list([])", None),
    ],
)
def test_datasets(imported: Import, call: str, data: dict[str, Any] | None) -> None:
    written, text = imported(
        script().replace('load_dataset("org/data", split="train[:100]")', call), "train.py"
    )
    assert written["data"] == data
    assert ("  # path: " in text) == (data is None)


def test_paths_start_beside_the_run_file_and_a_model_may_be_loaded(folder: Path, imported: Import) -> None:
    Path("my-model").mkdir()
    Path("scripts").mkdir()
    Path("scripts/train.py").write_text(script().replace("org/model", "./my-model"))
    import_trl(Path("scripts/train.py"), Path("runs/run.yaml"))
    data = read_yaml(Path("runs/run.yaml").read_text(), "").data
    assert data["model"]["path"] == "../my-model"
    assert data["rewards"] == [{"path": "../scripts/train.py:reward_len"}]
    loads = 'AutoModelForCausalLM.from_pretrained("org/model", attn_implementation="sdpa", dtype=torch.float32)'
    data, _ = imported(script("bf16=False").replace('model="org/model"', f"model={loads}"), "train.py")
    assert data["model"] == {"path": "org/model", "init": {"attn_implementation": "sdpa"}, "dtype": "float32"}


def test_a_config_that_comes_from_the_command_line_is_told(folder: Path) -> None:
    parsed = "    [args] = TrlParser(GRPOConfig).parse_args_and_config()\n"
    Path("train.py").write_text(script().replace("    args = GRPOConfig()\n", parsed))
    done = command("train.py")
    assert done.exit_code == 0
    for fact in ("not a literal", "GRPOConfig(...)", "import the YAML"):
        assert fact in told(done, "args")


@pytest.mark.parametrize(
    ("config", "given", "weight"),
    [
        ({"router_aux_loss_coef": 0.01}, "", 0.01),
        ({"text_config": {"router_aux_loss_coef": 0.02}}, "router_aux_loss_coef: null\n", 0.02),
        ({"router_aux_loss_coef": 0.01}, "router_aux_loss_coef: 0.5\n", 0.5),
        ({"router_aux_loss_coef": 0.01}, "router_aux_loss_coef: 0.0\n", 0.0),
        # Defaults of the architecture, which the file may leave out; one without a loss for its routers.
        ({"model_type": "mixtral"}, "", 0.001),
        ({"model_type": "mixtral", "router_aux_loss_coef": 0.0}, "", None),
        ({"model_type": "qwen3_moe", "output_router_logits": False}, "router_aux_loss_coef: null\n", 0.001),
        ({"model_type": "mixtral", "router_aux_loss_coef": 0.02}, "", 0.02),
        ({"model_type": "llama", "router_aux_loss_coef": 0.02}, "", None),
        ({"model_type": "mixtral", "num_hidden_layers": "two"}, "", None),
        ({"model_type": "nobodys"}, "", None),
    ],
)
def test_the_models_own_weight_of_balance_is_that_of_trl(
    imported: Import, config: dict[str, Any], given: str, weight: float | None
) -> None:
    Path("experts").mkdir()
    Path("experts/config.json").write_text(json.dumps(config))
    data, _ = imported(YAML.replace("org/model", "./experts") + given)
    assert data["train"].get("router_aux_loss_coef") == weight
    data, _ = imported(YAML + given)  # a model of the hub, whose configuration is not here
    assert data["train"].get("router_aux_loss_coef") == (weight if "0." in given else None)


# -- The algorithm ---------------------------------------------------------------------------------------

VLLM = "use_vllm: true\nvllm_gpu_memory_utilization: 0.5\n"
MODE = f"{VLLM}vllm_importance_sampling_mode: "
CLIP = "vllm_importance_sampling_clip_min: 0.5"
SEQUENCE = "importance_sampling_level: sequence"
SUM = "multi_objective_aggregation: normalize_then_sum"
ONE = """
beta: 0.1
use_bias_correction_kl: false
warmup_steps: 0.1
top_k: -1
generation_kwargs: {suppress_tokens: [1]}
max_prompt_length: 128
max_grad_norm: null
ref_model_mixup_alpha: 0.5
save_strategy: no
report_to: none
model_revision: v1
trust_remote_code: true
cast_lm_head_to_fp32: true
use_transformers_paged: false
learning_rate: 1e-5
"""
OTHER = """
warmup_steps: 10
lr_scheduler_type: cosine
lr_scheduler_kwargs: '{"num_cycles": 1.5}'
generation_kwargs: {max_new_tokens: 64, stop: END, do_sample: true}
fp16: true
save_steps: 20
save_total_limit: 3
report_to: [mlflow]
run_name: mine
push_to_hub: true
hub_model_id: me/model
hub_private_repo: yes
dataset_train_split: test
"""
SERVER = """
use_vllm: true
vllm_mode: server
vllm_server_host: box
vllm_server_port: 9
vllm_structured_outputs_regex: a+
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("loss_type: grpo\nepsilon: 0.1", {"loss": {"name": "grpo", "clip_low": 0.1}}),
        ("loss_type: dr_grpo\ndelta: 4.0", {"loss": {"name": "dr_grpo", "delta": 4.0}}),
        ("loss_type: dapo\nepsilon_high: 0.28", {"loss": {"name": "dapo", "clip_high": 0.28}}),
        (f"loss_type: bnpo\n{SEQUENCE}", {"loss": {"name": "bnpo", "level": "sequence"}}),
        (f"loss_type: luspo\n{SEQUENCE}\nepsilon: 0.1", {"loss": {"name": "luspo", "clip_low": 0.1}}),
        ("loss_type: cispo\nepsilon_high: 6.0", {"loss": {"name": "cispo", "cap": 6.0}}),
        ("loss_type: cispo\nepsilon: 0.2", {"loss": {"name": "cispo", "cap": 5.0}}),
        ("loss_type: sapo\nsapo_temperature_neg: 1.2", {"loss": {"name": "sapo", "tau_neg": 1.2}}),
        (VLLM, {"generator": {"name": "vllm-colocate", "gpu_memory_utilization": 0.5}}),
        (VLLM, {"correction": {"name": "sequence-mask", "low": 0.0, "high": 3.0}}),
        (f"{VLLM}vllm_importance_sampling_correction: false", {"correction": "none"}),
        (f"{VLLM}top_p: 0.9", {"correction": "none"}),
        (f"{MODE}token_truncate", {"correction": {"name": "token-truncate", "cap": 3.0}}),
        (f"{MODE}sequence_truncate", {"correction": {"name": "sequence-truncate", "cap": 3.0}}),
        (f"{MODE}token_mask\n{CLIP}", {"correction": {"name": "token-mask", "low": 0.5, "high": 3.0}}),
        ("scale_rewards: true", {"advantage": "group"}),
        ("scale_rewards: batch", {"advantage": "batch"}),
        ("scale_rewards: 'False'", {"advantage": "none"}),
        (SUM, {"advantage": {"name": "group", "aggregation": "normalize_then_sum"}}),
        ("max_steps: 5", {"train": {"max_steps": 5, "gradient_checkpointing": True, "seed": 42}}),
        ("use_transformers_paged: true", {"generator": {"name": "hf", "continuous_batching": True}}),
        (
            ONE,
            {
                "train.kl": "k3",
                "train.warmup_ratio": 0.1,
                "train.max_grad_norm": 0.0,
                "train.ref_sync_alpha": 0.5,
                "train.learning_rate": 1e-5,
                "sampling.top_k": 0,
                "sampling.generation_kwargs": {"suppress_tokens": [1]},
                "data.long_prompts": "cut",
                "checkpoint.every": 0,
                "tracking": {},
                "model.init": {"revision": "v1", "trust_remote_code": True},
                "model.cast_lm_head_to_fp32": True,
            },
        ),
        (
            OTHER,
            {
                "train.warmup_steps": 10,
                "train.lr_scheduler_kwargs": {"num_cycles": 1.5},
                "sampling": {"max_completion_length": 64, "stop": ["END"]},
                "model.dtype": "float32",
                "checkpoint": {"every": 20, "keep": 3},
                "tracking": {"mlflow": {"run_name": "mine"}},
                "hub.repo": "me/model",
                "data": {"path": "org/data", "split": "test"},
            },
        ),
        (
            SERVER,
            {
                "generator": {"name": "vllm-server", "urls": ["http://box:9"]},
                "sampling.generation_kwargs": {"structured_outputs": {"regex": "a+"}},
            },
        ),
    ],
)
def test_fields_that_are_written_in_another_way(imported: Import, given: str, expected: dict[str, Any]) -> None:
    data, _ = imported(f"{YAML}{given}\n")
    for key, value in expected.items():
        section, _, name = key.partition(".")
        assert (data[section][name] if name else data[section]) == value
    loaded()


def test_adaptive_entropy_keeps_its_bounds_and_vespo_brings_its_correction(imported: Import) -> None:
    text = "entropy_coef: 0.01\nuse_adaptive_entropy: true\nentropy_target: 0.3\nentropy_coef_max: 0.05\n"
    data, _ = imported(f"{YAML}{text}top_entropy_quantile: 0.2\n")
    assert data["train"]["adaptive_entropy"] == {"target": 0.3, "max": 0.05}
    adaptive = loaded().config.train.adaptive_entropy
    assert adaptive == AdaptiveEntropyConfig(target=0.3, delta=0.005, min=0.0, max=0.05)
    done = command("grpo.yaml")
    assert told(done, "use_adaptive_entropy").startswith("True differs train.adaptive_entropy")
    assert told(done, "entropy_target") == "0.3 same train.adaptive_entropy.target"
    assert imported(f"{YAML}use_adaptive_entropy: true\n")[0]["train"]["adaptive_entropy"] == {}
    assert "adaptive_entropy" not in imported(f"{YAML}entropy_target: 0.3\n")[0]["train"]
    data, _ = imported(f"{YAML}loss_type: vespo\nvespo_k_pos: 1.5\n")
    assert (data["loss"], data["correction"]) == ({"name": "vespo", "k_pos": 1.5}, "vespo")


# -- What is told ----------------------------------------------------------------------------------------


def test_each_given_field_is_reported(folder: Path) -> None:
    text = (
        "learning_rte: 1\nbeta: 0.1\nuse_bias_correction_kl: true\nentropy_coef: 0.01\n"
        "log_completions_hub_repo: me/x\noff_policy_mask_threshold: 0.5\n"
        "top_entropy_quantile: 1.0\nentropy_coef_min: 0.0\nlogging_steps: 5\nvllm_mode: server\n"
        "importance_sampling_level: sequence\ndisable_dropout: false\n"
        # Names of earlier versions.
        "vllm_device: cuda:1\nadafactor: true\nper_gpu_train_batch_size: 2\n"
    )
    Path("grpo.yaml").write_text(YAML + text)
    done = command("grpo.yaml")
    assert done.exit_code == 0
    assert told(done, "vllm_device").startswith("'cuda:1' not needed grpox places the generator")
    assert told(done, "adafactor").startswith("True not supported an optimizer is a component")
    assert told(done, "per_gpu_train_batch_size") == "2 differs train.per_device_train_batch_size: its old name"
    assert told(done, "learning_rte") == "1 unknown did you mean learning_rate?"
    assert told(done, "beta") == "0.1 same train.beta"
    assert told(done, "use_bias_correction_kl").startswith("True differs train.kl: true is `unbiased`")
    assert told(done, "entropy_coef").startswith("0.01 differs train.entropy_coef: the same, times the mean")
    assert told(done, "off_policy_mask_threshold") == "0.5 same train.off_policy_mask_threshold"
    assert told(done, "top_entropy_quantile") == "1.0 not needed has no effect at this value"
    assert told(done, "entropy_coef_min") == "0.0 not needed use_adaptive_entropy is false"
    assert told(done, "logging_steps").startswith("5 not needed every step is a line")
    assert told(done, "vllm_mode") == "'server' not needed use_vllm is false"
    assert told(done, "disable_dropout").startswith("False differs dropout is always off")
    Path("luspo.yaml").write_text(f"{YAML}loss_type: luspo\n")
    assert told(command("luspo.yaml"), "loss_type").startswith("'luspo' differs loss: luspo, with one ratio")
    assert "3 fields not carried over" in done.stderr
    assert "#   learning_rte 1: did you mean learning_rate?" in done.stdout


def test_what_is_missing_or_breaks_its_comment_is_a_commented_line(imported: Import) -> None:
    _, text = imported(
        "learning_rate: 1e-6\neval_strategy: steps\neval_steps: 7\npush_to_hub: true\noptim: adafactor\n"
    )
    for line in (
        "  # path: org/name",
        "  # path: train.jsonl",
        "  # - {path: 'rewards.py:name'}",
        "# evaluation: {path: held-out.jsonl, every: 7}",
        "# hub: {repo: user/name}",
        "  # optimizer: {path: my_optimizer.py:Mine}",
    ):
        assert f"\n{line}\n" in text
    with pytest.raises(ConfigError) as caught:
        loaded()
    assert {problem.key for problem in caught.value.problems} >= {"model.path", "rewards"}
    # No text that was given leaves its comment.
    data, _ = imported(
        "model_name_or_path: 'a\\nb'\nreward_funcs: ['.b', '..', 'a..b']\npush_to_hub: true\n"
        'hub_model_id: "x\\nseed: 1"\nentropy_coef: "0\\nloss: mine"\nlearning_rte: 1\n'
    )
    assert data.keys() == {"model", "data", "loss", "advantage", "train", "sampling"}


def test_every_field_that_is_not_a_literal_is_a_blank(imported: Import) -> None:
    fields = [name for name in (*GRPO_FIELDS, *TRAINER_FIELDS) if FIELDS[name].key]
    _, text = imported(script(", ".join(f"{name}=f()" for name in fields)), "train.py")
    lines = text.splitlines()
    for name in fields:
        [at] = [number for number, line in enumerate(lines) if line.endswith(f": {name}=f()")]
        assert lines[at + 1].strip().startswith("# ")
        assert lines[at + 1].endswith(": ?")


# -- Mistakes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "what"),
    [
        ("import torch\n", "a.py", "has no call of GRPOConfig or GRPOTrainer"),
        ("def broken(:\n", "a.py", "not valid Python: invalid syntax"),
        ("a = '\0'\n", "a.py", "not valid Python: source code string cannot contain null bytes"),
        ("(" * 5000, "a.py", "not valid Python: too many nested parentheses"),
        ("GRPOConfig()\nGRPOConfig()\n", "a.py", "calls GRPOConfig 2 times, on lines 1, 2: keep one call"),
        ("- 1\n", "a.yaml", "is not a mapping of fields such as model_name_or_path"),
        ("learning_rte: 1\n", "a.yaml", "has no field of GRPOConfig or `trl grpo`"),
        ("a: [\n", "a.yaml", "not valid YAML: while parsing"),
        ("model: {}\ndata: {}\nrewards: []\n", "a.yaml", "is already a run file of grpox"),
        ("", "a.json", "is neither a Python script nor a YAML file"),
        ("loss_type: gpro\n", "a.yaml", "no such loss_type"),
        ("scale_rewards: [1]\n", "a.yaml", "no such scaling"),
        ("reward_funcs: [a.b]\nreward_weights: [1, 2]\n", "a.yaml", "does not fit 1 reward functions"),
    ],
)
def test_bad_input_is_told_in_a_line(folder: Path, text: str, name: str, what: str) -> None:
    [problem] = refused(text, name)
    assert problem.what.startswith(what)


def test_mistakes_are_placed_and_nothing_is_overwritten(folder: Path) -> None:
    assert refused("x = 1\ny = = 2\n", "a.py")[0].where == "a.py:2"
    [problem] = refused("a: 1\nloss_type: gpro\n", "a.yaml")
    assert (problem.where, problem.key, problem.given) == ("a.yaml:2", "loss_type", "'gpro'")
    assert problem.nearest == "grpo"
    assert refused("learning_rte: 1\n", "b.yaml")[0].nearest == "learning_rate"
    # `gspo` differs from `grpo` by a letter, and is another loss.
    for given, near in (("gspo", ""), ("dpo", ""), ("dr-grpo", "dr_grpo")):
        [problem] = refused(f"{YAML}loss_type: {given}\n", "grpo.yaml")
        assert (problem.key, problem.nearest) == ("loss_type", near)
    Path("grpo.yaml").write_text(YAML)
    Path("run.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        import_trl(Path("grpo.yaml"), Path("run.yaml"))
    assert Path("run.yaml").read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        import_trl(Path("none.py"))


@pytest.mark.parametrize(
    "change",
    ["args.beta = 0.1", 'setattr(args, "beta", 0.1)', "args = dataclasses.replace(args, beta=0.1)"],
)
@pytest.mark.parametrize("config", ["GRPOConfig(max_steps=3)", "TrlParser((GRPOConfig,)).parse()[0]"])
def test_fields_set_after_the_config_was_made_are_told(folder: Path, config: str, change: str) -> None:
    made = (
        f"import dataclasses\nfrom trl import GRPOConfig, GRPOTrainer, TrlParser\nargs = {config}\n{change}\n"
    )
    Path("train.py").write_text(f'{made}GRPOTrainer("org/name", reward_funcs="org/judge", args=args)\n')
    assert "not a literal fill in train.beta" in told(command("train.py"), "beta")


@pytest.mark.parametrize(
    ("use", "is_told"),
    [
        ('row["image"]', True),
        ('{"images": [row], "prompt": "a"}', True),
        ('rows.cast_column("image", kind)', True),
        ('rows.remove_columns("image")', False),
    ],
)
def test_a_column_of_images_is_told(folder: Path, use: str, is_told: bool) -> None:
    Path("train.py").write_text(f"{script('beta=0.1')}\n\ndef with_image(row, rows, kind):\n    return {use}\n")
    assert ("grpox trains on text" in command("train.py").stderr) is is_told


# -- Statements of a script that change the training -----------------------------------------------------

SCRIPTS = dict(
    each.split("\n", 1)
    for each in Path(__file__).with_name("scripts_for_trl.txt").read_text().split("=== ")[1:]
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_changes_the_training_is_told_and_nothing_else(name: str) -> None:
    text = SCRIPTS[name]
    marked = [line for line, part in enumerate(text.splitlines(), 1) if "# lost" in part]
    told = [
        given.line
        for given, _, reason in read_script(text, Path("s.py"), "s.py").statements
        if "advantage rloo" not in reason
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
    folder: Path, name: str, statement: str, cure: str
) -> None:
    Path("s.py").write_text(SCRIPTS[name])
    done = command("s.py", "--json")
    assert done.exit_code == 0
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


def test_only_where_all_is_carried_it_is_said_as_rloo_is(folder: Path) -> None:
    for name in ("trl example", "nothing to tell"):
        Path("s.py").write_text(SCRIPTS[name])
        assert "everything was carried over" in command("s.py").stderr
    Path("s.py").write_text(SCRIPTS["trl example"].replace("train_dataset=", "**more, train_dataset="))
    done = command("s.py", "--json")
    assert "everything was carried over" not in done.stderr
    assert json.loads(done.stdout)["not_carried"][0]["text"].startswith("**more")
    # RLOO becomes an advantage.
    Path("s.py").write_text(SCRIPTS["rloo"])
    command("s.py", "--out", "run.yaml")
    config = loaded().config
    assert (config.advantage.label, config.loss.label) == ("rloo", "dr_grpo")
    assert (config.train.beta, config.train.num_generations) == (0.05, 4)


def test_names_of_open_r1_get_no_advice_that_cannot_work(folder: Path) -> None:
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


# -- The tables ------------------------------------------------------------------------------------------


def docs_table() -> str:
    """The table of docs/from-trl.md as the code has it."""
    lines = ["| field | TRL's default | in a run file | what differs |", "|---|---|---|---|"]
    for name, field in GRPO_FIELDS.items():
        key = f"`{field.key}`" if field.key else ""
        about = {Verdict.SAME: field.note or "the same", Verdict.DIFFERS: field.note}
        differs = about.get(field.verdict, f"{field.verdict.value}: {field.note}")
        line = f"| `{name}` | `{json.dumps(field.default)}` | {key} | {differs} |"
        lines.append(line.replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def test_the_tables_are_those_of_the_page_and_of_run_files() -> None:
    assert docs_table() in (ROOT / "docs" / "from-trl.md").read_text(encoding="utf-8")
    components = ("generator", "loss", "advantage", "correction", "rewards[0]", "tracking")
    for name, field in FIELDS.items():
        section = field.key.partition(".")[0]
        if field.key and section not in components and section not in ("evaluation", "hub", "rewards"):
            assert our_default(field.key) is not ..., name


def test_the_tables_cover_trl() -> None:
    trl = pytest.importorskip("trl", reason="TRL comes with `make dev`")
    from transformers import TrainingArguments

    inherited = TrainingArguments.__dataclass_fields__
    fields = trl.GRPOConfig.__dataclass_fields__
    own = {name: field.default for name, field in fields.items() if name not in inherited}
    assert {name: field.default for name, field in GRPO_FIELDS.items()} == own
    assert list(GRPO_FIELDS) == list(own)
    assert inherited.keys() <= FIELDS.keys()
    peft = pytest.importorskip("peft")
    assert {f"peft_config.{name}" for name in peft.LoraConfig.__dataclass_fields__} <= FIELDS.keys()
    copied = {name: field.default for name, field in FIELDS.items() if field.copied and name in fields}
    assert copied == {name: fields[name].default for name in copied}
