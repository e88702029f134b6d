"""The arithmetic of memory, by hand; weights counted as transformers makes them; and the page that tells it."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import replace
from io import StringIO
from math import prod
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from grpox.cli import app as cli
from grpox.cli.plan import memory_report
from grpox.config import ModelConfig
from grpox.contracts import GeneratorMemory
from grpox.errors import ConfigError
from grpox.policy import weight_stream
from grpox.policy.memory_plan import formula
from grpox.policy.memory_plan.formula import DEFAULTS, PHASES, Setting, parts_of, peak_of, size_in
from grpox.policy.memory_plan.of_run import check_load, run_setting
from grpox.policy.memory_plan.shape import Linear, ModelShape, built_shape, model_shape, shape_of
from grpox.runfile.given import Given
from grpox.runfile.load import load_run

ROOT = Path(__file__).parents[3]
OF_PAGE = runpy.run_path(str(ROOT / "docs" / "hooks" / "memory_tables.py"))
GIB, MODELS, tables, setting_of_table = (OF_PAGE[name] for name in ("GIB", "MODELS", "tables", "setting"))
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
CONFIGS = {
    "llama": {"model_type": "llama"},
    "llama, tied, biases": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama, wide heads": {"model_type": "llama", "head_dim": 32},
    "mistral": {"model_type": "mistral"},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
}

ZERO = {
    "reduce_bucket_size": 500,
    "stage3_prefetch_bucket_size": 100,
    "stage3_max_reuse_distance": 600,
    "stage3_param_persistence_threshold": 50,
    "sub_group_size": 200,
    "reduce_scatter": True,
}


def folder_of(folder: Path, config: dict[str, object]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(path=str(folder))


def sizes(setting: Setting) -> dict[str, int]:
    """Bytes of each part by name."""
    return {part.name: part.size for part in parts_of(setting)}


@pytest.fixture
def setting() -> Setting:
    """A model of three weights, 1000 + 70 + 10 elements, on four ranks with GPUs."""
    shape = ModelShape(
        (1000, 70, 10), (), hidden=10, intermediate=30, layers=2, queries=12, keys=6, vocabulary=100
    )
    whole = GeneratorMemory("whole")
    return Setting(
        shape, ranks=4, gpu=True, sequences=2, prompt=3, completion=5, sampled=8, generator=whole, zero=ZERO
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_counted_as_transformers_makes_them(name: str, tmp_path: Path) -> None:
    config = SMALL | CONFIGS[name]
    ours, built = shape_of(config), built_shape(folder_of(tmp_path, config))
    assert ours is not None
    assert sorted(ours.weights) == sorted(built.weights)
    assert sorted(map(str, ours.linears)) == sorted(map(str, built.linears))
    assert replace(ours, weights=(), linears=()) == replace(built, weights=(), linears=())


@pytest.mark.parametrize(
    ("name", "parameters"),
    # As their model cards have them.
    [("SmolLM2-135M", 134_515_008), ("Llama-3.1-8B", 8_030_261_248), ("Qwen2.5-72B", 72_706_203_648)],
)
def test_published_models(name: str, parameters: int) -> None:
    shape = shape_of(MODELS[name])
    assert shape is not None
    assert shape.parameters == parameters


def test_a_kind_of_model_that_is_not_counted_here_is_built_without_data(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 40,
        "n_positions": 16,
    }
    assert shape_of(config) is None
    shape = model_shape(folder_of(tmp_path, config))
    # Per layer 12 H^2 + 13 H; embeddings of tokens and positions, tied; a norm.
    assert shape.parameters == 2 * (12 * 48**2 + 13 * 48) + 48 * (40 + 16) + 2 * 48
    assert (shape.hidden, shape.layers, shape.vocabulary) == (48, 2, 40)


def test_a_model_without_a_configuration_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        model_shape(ModelConfig(path=str(tmp_path)))


def test_what_is_sharded(setting: Setting) -> None:
    found = sizes(setting)
    shard = 250 + 18 + 3  # each weight rounded up
    assert found["weights"] == 4 * shard
    assert "master weights" not in found  # the weights are float32 themselves
    assert sizes(replace(setting, weight_bytes=2))["master weights"] == 4 * shard
    assert found["optimizer states"] == 8 * shard
    assert found["gradients"] == 4 * shard
    assert found["gradients in one piece"] == 4 * 250  # the weight that reaches sub_group_size
    assert sizes(replace(setting, zero=ZERO | {"sub_group_size": 260}))["gradients in one piece"] == 4 * 268
    assert sizes(replace(setting, weight_bytes=2))["weights"] == 2 * shard


def test_parts_that_are_temporarily_whole(setting: Setting) -> None:
    found = sizes(setting)
    assert found["gradient bucket"] == 4 * 500
    assert found["bucket, sorted by rank"] == 4 * 500
    assert "bucket, within gloo" not in found
    assert found["gathered weights"] == 4 * 1080  # less than 600 / 2 + 100 + 1000
    assert found["small weights"] == 4 * 10
    at_once = ZERO | {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    assert sizes(replace(setting, zero=at_once))["gathered weights"] == 4 * 1000


def test_a_single_rank_on_a_cpu_gathers_nothing_and_takes_what_it_touches(setting: Setting) -> None:
    found = sizes(replace(setting, ranks=1, gpu=False, zero=ZERO | {"reduce_bucket_size": 10_000}))
    assert "gathered weights" not in found
    assert found["gradient bucket"] == found["bucket, sorted by rank"] == 4 * 1080
    assert found["bucket, within gloo"] == 4 * 1080
    found = sizes(replace(setting, ranks=1, gpu=False))
    assert found["bucket, sorted by rank"] == 4 * 500
    assert found["bucket, within gloo"] == 4 * 1000  # the largest weight, by itself
    found = sizes(replace(setting, ranks=1, gpu=False, zero=ZERO | {"reduce_scatter": False}))
    assert "bucket, sorted by rank" not in found
    assert found["bucket, within gloo"] == 4 * 1000
    whole = ZERO | {"reduce_scatter": False, "reduce_bucket_size": 10_000}
    assert "bucket, within gloo" not in sizes(replace(setting, ranks=1, gpu=False, zero=whole))
    assert all(part.on_host for part in parts_of(replace(setting, gpu=False)))


def test_activations(setting: Setting) -> None:
    # Of a position and layer in float32: 6 H + 2 Q + 2 K + 4 F numbers; two sequences of 8, two layers.
    layer = 4 * (6 * 10 + 2 * 12 + 2 * 6 + 4 * 30)
    assert sizes(setting)["activations"] == 2 * 16 * layer
    assert sizes(replace(setting, checkpointing=True))["activations"] == 2 * 16 * 4 * 10 + 16 * layer
    assert sizes(replace(setting, budget=10))["activations"] == 2 * 10 * layer


def test_offload_moves_the_named_parts_to_the_host(setting: Setting) -> None:
    host = {part.name for part in parts_of(replace(setting, offload_optimizer="cpu")) if part.on_host}
    assert host == {
        "master weights",
        "optimizer states",
        "gradients",
        "gradients for the optimizer",
        "model, as it is loaded",
        "weights, while they are sharded",
        "master weights, while they are created",
    }
    both = replace(setting, offload_optimizer="cpu", offload_param="cpu")
    with_weights = {part.name for part in parts_of(both) if part.on_host}
    assert with_weights == host - {"master weights"} | {"weights"}  # which are their own masters
    assert "optimizer states" not in sizes(replace(setting, offload_optimizer="nvme"))


def test_every_rank_loads_the_model_whole(setting: Setting) -> None:
    assert sizes(setting)["model, as it is loaded"] == 4 * 1080
    assert sizes(replace(setting, ranks=64))["model, as it is loaded"] == 4 * 1080
    both = size_in(parts_of(replace(setting, reference=True)), "load", on_host=True)
    assert both == size_in(parts_of(setting), "load", on_host=True) + 4 * 1080


def test_every_gpu_holds_the_whole_model_before_it_is_sharded(setting: Setting) -> None:
    found = sizes(setting)
    assert found["whole model, before sharding"] == 4 * 1080
    everything_away = replace(setting, ranks=64, offload_optimizer="cpu", offload_param="cpu")
    assert size_in(parts_of(everything_away), "load", on_host=False) == 4 * 1080
    # The reference has been sharded by then.
    assert size_in(parts_of(replace(setting, reference=True)), "load", on_host=False) == 4 * (
        1080 + 250 + 18 + 3
    )
    assert "whole model, before sharding" not in sizes(replace(setting, gpu=False))


def test_no_number_of_gpus_of_80_gib_loads_72b_and_the_example_of_32b_fits_its_sixteen() -> None:
    large, example = (shape_of(MODELS[name]) for name in ("Qwen2.5-72B", "Qwen2.5-32B"))
    assert large is not None
    assert example is not None
    usable = 0.9 * 80 * GIB - 2 * GIB
    assert peak_of(parts_of(setting_of_table(large, 64)), on_host=False).size > 80 * GIB
    assert peak_of(parts_of(setting_of_table(example, 16)), on_host=False).size < usable


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ([], 4 * 527_104),
        (["model.dtype=bfloat16"], 2 * 527_104),
        (["train.beta=0.1"], 4 * 527_104 * 2),
        (["train.beta=0.1", "deepspeed.offload_param=cpu"], 4 * 527_104),
    ],
)
def test_a_model_that_no_gpu_holds_is_refused_before_it_loads(overrides: list[str], needed: int) -> None:
    run = load_run("quickstart", overrides, world_size=1)
    check_load(run, needed)
    check_load(run, None)
    with pytest.raises(ConfigError, match="the model does not fit: while it loads") as refused:
        check_load(run, needed - 1)
    [problem] = refused.value.problems
    assert problem.key == "model.path"
    assert ("model.dtype: bfloat16" in problem.allowed) == ("model.dtype=bfloat16" not in overrides)
    assert "more ranks" in problem.allowed


def test_a_model_that_is_given_is_measured_itself() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL), dtype=torch.bfloat16)
    weights = sum(weight.numel() for weight in model.parameters())
    run = replace(load_run("quickstart", world_size=1), given=Given(model=model))
    check_load(run, 2 * weights)
    with pytest.raises(ConfigError):
        check_load(run, 2 * weights - 1)


def test_the_plan_says_what_every_gpu_holds_while_the_model_loads() -> None:
    shape = shape_of(MODELS["Qwen2.5-72B"])
    assert shape is not None
    console = Console(width=200, record=True, file=StringIO())
    of_table = setting_of_table(shape, 32)
    console.print(memory_report(of_table, replace(of_table, gpu=False), prompt_assumed=False))
    told = " ".join(console.export_text().split())
    assert "every GPU holds all of it, 135.4 GiB, for any number of ranks" in told


def test_adapters_alone_have_gradients_and_states(setting: Setting) -> None:
    shape = shape_of(SMALL | CONFIGS["llama"])
    assert shape is not None
    trained = shape.adapters(2, ["q_proj", "model.v_proj"], ["v_proj"])
    assert trained == (2 * 64, 2 * 64) * 3
    assert sum(shape.adapters(2, "all-linear", [])) == 3 * 2 * (4 * 64 + 2 * 32 + 2 * 64 + 3 * (64 + 96))
    found = sizes(replace(setting, shape=shape, trained=trained, ranks=1, gpu=False))
    assert found["optimizer states"] == 8 * sum(trained)
    assert found["weights"] == 4 * (shape.parameters + sum(trained))
    assert "gradient of the head" not in found


def test_adapters_of_stacked_experts_and_the_sums_of_each_forward_pass(
    setting: Setting, tmp_path: Path
) -> None:
    config = {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 16,
    }
    shape = model_shape(folder_of(tmp_path, SMALL | config))
    trained = shape.adapters(2, [], [], ["mlp.experts.gate_up_proj", "experts.down_proj"])
    # Of each layer: [4, 32, 64] and [4, 64, 16].
    assert trained == (2 * 4 * 32, 2 * 4 * 64, 2 * 4 * 64, 2 * 4 * 16) * 3
    assert len(shape.adapters(2, [], [], ["gate.weight"])) == 2 * 3
    of_layer = 4 * (32 * 64 + 64 * 16)
    total = sum(prod(one.sizes) for one in shape.stacks_named(["gate_up_proj", "down_proj"]))
    assert total == 3 * of_layer
    whole = replace(setting, shape=shape, trained=trained, merged=total, weight_bytes=2)
    assert sizes(whole)["parameters with their adapters"] == 2 * 4 * of_layer
    assert sizes(replace(whole, checkpointing=True))["parameters with their adapters"] == 2 * 2 * of_layer
    assert "parameters with their adapters" not in sizes(setting)


@pytest.mark.parametrize(
    ("gpu", "parameters", "optimizer", "own"),
    [
        (True, "none", "none", True),
        (True, "none", "cpu", False),
        (True, "cpu", "none", False),
        (True, "cpu", "cpu", True),
        (True, "nvme", "nvme", False),
        (False, "none", "cpu", True),
        (False, "none", "nvme", False),
    ],
)
def test_float32_weights_are_their_own_masters_where_both_are_in_one_place(
    setting: Setting, gpu: bool, parameters: str, optimizer: str, own: bool
) -> None:
    placed = replace(setting, gpu=gpu, offload_param=parameters, offload_optimizer=optimizer)
    assert placed.is_own_master == own
    assert not replace(placed, weight_bytes=2).is_own_master


def test_a_single_rank_may_sample_from_the_policys_own_memory(setting: Setting) -> None:
    name = "copy of the policy that generates"
    shares = GeneratorMemory("whole", shares=True)
    alone = replace(setting, ranks=1, generator=shares)
    assert name not in sizes(alone)
    assert name not in sizes(replace(alone, gpu=False, offload_param="cpu"))
    others = [
        replace(alone, generator=GeneratorMemory("whole")),
        replace(alone, ranks=2),
        replace(alone, trained=(4,)),
        replace(alone, offload_param="cpu"),
    ]
    assert [sizes(each)[name] for each in others] == [4 * 1080] * 4


def test_what_generates(setting: Setting) -> None:
    found = sizes(setting)
    assert found["copy of the policy that generates"] == 4 * 1080
    assert found["keys and values"] == 2 * 4 * 6 * (2 + 1) * 8 * (3 + 5)
    assert sizes(replace(setting, score_bytes=40))["scores of the next token"] == 40 * 100 * 8
    shards = replace(setting, generator=GeneratorMemory("shards"))
    assert "copy of the policy that generates" not in sizes(shards)
    held = GeneratorMemory("engine", engine="vLLM", engine_ranks=2, cache=77)
    engine = replace(setting, generator=held)
    assert sizes(engine)["vLLM's weights"] == 2 * 1080
    assert sizes(engine)["vLLM's keys and values"] == 77


def test_linear_layers_in_blocks_on_a_cpu(setting: Setting) -> None:
    """A layer of 20 x 40 and the head of 100 x 10, not one of 3 x 4; two ranks sent 4 * 1080 bytes before."""
    name = "linear layers in blocks"
    shape = replace(setting.shape, linears=(Linear("up_proj", 20, 40), Linear("down_proj", 3, 4)))
    held = GeneratorMemory("whole", shares=True, blocks_from=13)
    alone = replace(setting, shape=shape, gpu=False, ranks=1, generator=held)
    assert sizes(alone)[name] == 4 * (800 + 1000)
    assert sizes(replace(alone, ranks=2))[name] == 4 * (800 + 1000 - 1080)
    plain = replace(alone, generator=GeneratorMemory("whole"))
    for other in (replace(alone, gpu=True), replace(alone, weight_bytes=2), plain):
        assert name not in sizes(other)
    told = [run_setting(load_run("quickstart", []), gpu=gpu).generator for gpu in (False, True)]
    assert [each.blocks_from for each in told if each] == [2**16, 0]


def test_weights_packed_for_servers_on_other_gpus(setting: Setting) -> None:
    """Buckets of 3000 bytes, or of the largest weight, 4 * 1000: two are packed, and one was gathered."""
    name = "weights packed for the servers"
    small, large = (replace(setting, generator=GeneratorMemory("none", sends=size)) for size in (3000, 5000))
    assert [sizes(each)[name] for each in (small, large)] == [3 * 4000, 3 * 5000]
    assert sizes(replace(large, ranks=1))[name] == 2 * 5000  # its own weights, of which none is copied before
    phases = [part.phases for part in parts_of(large) if part.name == name]
    assert phases == [(formula.GENERATE,)]
    assert name not in sizes(replace(large, gpu=False))
    run = load_run("quickstart", ["generator={name: vllm-server, bucket_mib: 3}"])
    assert sizes(run_setting(run, gpu=True))[name] == 2 * 3 * 2**20
    assert name not in sizes(run_setting(run, gpu=False))


def test_the_peak_is_that_of_its_phase(setting: Setting) -> None:
    parts = parts_of(setting)
    for on_host in (False, True):
        peak = peak_of(parts, on_host)
        assert peak.size == max(size_in(parts, phase, on_host) for phase in PHASES)
        assert peak.size == size_in(parts, peak.phase, on_host)


def test_constants_equal_those_of_other_modules() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert formula.SYNC == weight_stream.BUCKET_BYTES
    zero = DeepSpeedZeroConfig(stage=3)
    assert {name: getattr(zero, name.removeprefix("stage3_")) for name in DEFAULTS} == DEFAULTS


def test_a_run_files_own_settings_count() -> None:
    run = load_run(
        "quickstart",
        [
            "deepspeed.settings={zero_optimization: {reduce_bucket_size: 5e6, sub_group_size: auto}}",
            "deepspeed.stage3_param_persistence_threshold=7",
            "train.beta=0.1",
            "generator={name: hf, batch_size: 32}",
            "data.max_prompt_length=9",
        ],
        world_size=2,
    )
    setting = run_setting(run, gpu=True)
    assert setting.zero["reduce_bucket_size"] == 5_000_000
    assert setting.zero["sub_group_size"] == DEFAULTS["sub_group_size"]
    assert setting.zero["stage3_param_persistence_threshold"] == 7
    assert setting.reference
    assert (setting.prompt, setting.completion, setting.sequences) == (9, 4, 256)
    assert setting.sampled == 32
    assert setting.shape.parameters == 527_104
    assert run_setting(run, gpu=True, prompt_tokens=50).prompt == 50
    assert setting.score_bytes == 12
    assert run_setting(load_run("quickstart", ["sampling.top_p=0.9"]), gpu=True).score_bytes == 40
    evaluated = load_run("quickstart", ["evaluation.sampling.top_p=0.9"])
    assert run_setting(evaluated, gpu=True).score_bytes == 40


def test_auto_counts_as_bfloat16_on_gpus_alone() -> None:
    run = load_run("quickstart", ["model.dtype=auto"])
    assert run_setting(run, gpu=True).weight_bytes == 2
    assert run_setting(run, gpu=False).weight_bytes == 4
    commands = [["plan", "quickstart", "--memory", f"model.dtype={dtype}"] for dtype in ("auto", "float32")]
    auto, float32 = (CliRunner().invoke(cli.app, each, env={"COLUMNS": "120"}).output for each in commands)
    assert "auto in the run file as on GPUs" in auto
    one, other = ([line for line in text.splitlines() if "Without GPUs" in line] for text in (auto, float32))
    assert len(one) == 1
    assert one == other


@pytest.mark.parametrize(
    ("overrides", "gpu", "positions"),
    [
        (["train.gradient_accumulation_steps=4"], True, 4 * 256 * (9 + 4)),  # less than 16,384: a whole step
        (["train.gradient_accumulation_steps=8"], True, 16_384),
        (["train.gradient_accumulation_steps=8"], False, 256 * (9 + 4)),
        (["train.gradient_accumulation_steps=8", "loss=bnpo"], True, 256 * (9 + 4)),
        (["train.max_tokens_per_micro_batch=500"], False, 500),
        (["train.max_tokens_per_micro_batch=5"], False, 9 + 4),  # one sequence
        (["train.max_tokens_per_micro_batch=null"], True, 256 * (9 + 4)),
    ],
)
def test_the_positions_of_a_micro_batch(overrides: list[str], gpu: bool, positions: int) -> None:
    run = load_run("quickstart", ["data.max_prompt_length=9", *overrides])
    setting = run_setting(run, gpu)
    assert setting.positions == positions
    full = replace(setting, chunked=False)
    of_completions = positions if setting.budget else 256 * 4
    assert sizes(full)["logits"] == (setting.weight_bytes + 12) * of_completions * setting.shape.vocabulary


@pytest.mark.parametrize("width", ["80", "120"])
def test_the_command_prints_both_tables_and_what_it_leaves_out(width: str) -> None:
    arguments = ["plan", "quickstart", "--memory", "--world-size", "2"]
    done = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": width})
    assert done.exit_code == 0
    assert "Memory of each of 2 ranks" in done.output
    for phase in PHASES:
        assert f"{phase}: " in done.output
    assert "Without GPUs:" in done.output
    assert "(assumed; --prompt-tokens sets the length)" in done.output
    assert "fragmentation" in done.output
    done = CliRunner().invoke(cli.app, [*arguments, "--prompt-tokens", "9"], env={"COLUMNS": width})
    assert "Prompts: 9 tokens;" in done.output


def test_the_page_has_the_formulas_tables() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    by_ranks, by_setting = tables().split("\n\n")
    assert by_ranks in page, "python docs/hooks/memory_tables.py prints what belongs there"
    assert by_setting in page, "python docs/hooks/memory_tables.py prints what belongs there"


def test_the_page_explains_every_part() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    base = run_setting(load_run("quickstart", world_size=2), gpu=False)
    ways = [
        base,
        replace(base, offload_optimizer="cpu", reference=True, fused=False, background=True),
        replace(base, generator=GeneratorMemory("engine", engine="vLLM")),
        replace(base, gpu=True, generator=GeneratorMemory("none", sends=1)),
    ]
    names = {part.name for way in ways for part in parts_of(way)}
    listed = set(re.findall(r"^\| ([^|`]+?) \|", page, flags=re.MULTILINE))
    assert names <= listed
