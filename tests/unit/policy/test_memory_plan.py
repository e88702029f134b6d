"""The arithmetic of memory, by hand; the page that shows it; and whether a run fits a machine."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.problems import problem_of
from support.small_models import model_of
from typer.testing import CliRunner, Result

from grpox.cli import app as cli
from grpox.config import LoraConfig, ModelConfig, RunConfig
from grpox.contracts import GeneratorMemory
from grpox.policy import weight_stream
from grpox.policy.memory_plan import fit, formula
from grpox.policy.memory_plan.fit import Line, Memory, gpus_here, host_here, verdict_lines, worst_of
from grpox.policy.memory_plan.formula import (
    DEFAULTS,
    PHASES,
    ModelShape,
    Part,
    Setting,
    parts_of,
    peak_of,
    size_in,
)
from grpox.policy.memory_plan.of_run import check_load, model_shape, run_setting
from grpox.runfile.load import load_run
from grpox.runfile.objects import RunObjects

ROOT = Path(__file__).parents[3]
OF_PAGE = runpy.run_path(str(ROOT / "docs" / "hooks" / "memory_tables.py"))
GIB, tables, setting_of_table = (OF_PAGE[name] for name in ("GIB", "tables", "setting"))
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 32}
SHAPE = ModelShape((1000, 70, 10), hidden=10, intermediate=30, layers=2, queries=12, keys=6, vocabulary=100)
ZERO = {
    "reduce_bucket_size": 500,
    "stage3_prefetch_bucket_size": 100,
    "stage3_max_reuse_distance": 600,
    "stage3_param_persistence_threshold": 50,
    "sub_group_size": 200,
    "reduce_scatter": True,
}
KEYS = (
    "model.dtype=float32",
    "sampling.max_completion_length=5",
    *("train.per_device_train_batch_size=2", "train.num_generations=2"),
    "train.max_tokens_per_micro_batch=null",
)
HALF, BOTH_AWAY = "model.dtype=bfloat16", ("deepspeed.offload_optimizer=cpu", "deepspeed.offload_param=cpu")


@cache
def config_of(*overrides: str) -> RunConfig:
    return load_run("quickstart", [*KEYS, *overrides]).config


def setting(*overrides: str, **own: Any) -> Setting:
    """A model of three weights, 1000 + 70 + 10 elements, on four ranks with GPUs, and sequences of 3 + 5."""
    numbers = {"shape": SHAPE, "ranks": 4, "gpu": True, "prompt": 3, "sampled": 8, "zero": ZERO}
    return Setting(config_of(*overrides), **{"generator": GeneratorMemory("whole"), **numbers, **own})


def sizes(of: Setting) -> dict[str, int]:
    """Bytes of each part by name."""
    return {part.name: part.size for part in parts_of(of)}


def planned(*arguments: str, width: str = "120") -> Result:
    """Run `grpox plan quickstart --memory` in a terminal of a width."""
    return CliRunner().invoke(cli.app, ["plan", "quickstart", "--memory", *arguments], env={"COLUMNS": width})


def shape_of(folder: Path, lora: dict[str, Any] | None = None, **config: Any) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(config))
    return model_shape(ModelConfig(path=str(folder), lora=None if lora is None else LoraConfig(r=2, **lora)))


def test_sizes_of_models(tmp_path: Path) -> None:
    gpt2 = {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 16}
    shape = shape_of(tmp_path, model_type="gpt2", **gpt2)
    # Per layer 12 H^2 + 13 H; embeddings of tokens and positions, tied; a norm.
    assert shape.parameters == 2 * (12 * 48**2 + 13 * 48) + 48 * (40 + 16) + 2 * 48
    assert (shape.hidden, shape.intermediate, shape.layers, shape.vocabulary) == (48, 4 * 48, 2, 40)
    assert (shape.queries, shape.keys) == (48, 48)
    shape = shape_of(tmp_path, model_type="qwen3", **SMALL | {"head_dim": 32})
    assert (shape.queries, shape.keys, shape.intermediate) == (4 * 32, 2 * 32, 96)
    of_layer = [64 * 128, 64 * 64, 64 * 64, 128 * 64, *[64 * 96] * 3]
    assert sorted(shape.linears) == sorted(3 * of_layer)
    assert shape.parameters == 3 * (sum(of_layer) + 2 * 64 + 2 * 32) + 2 * 50 * 64 + 64


@pytest.mark.parametrize("text", [None, json.dumps({"model_type": "llama", "hidden_size": None})])
def test_a_model_that_cannot_be_built_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert problem_of(model_shape, ModelConfig(path=str(tmp_path))).key == "model.path"


def test_parts_on_four_ranks() -> None:
    found, half = sizes(setting()), sizes(setting(HALF))
    shard = 250 + 18 + 3  # each weight rounded up
    assert (found["weights"], half["weights"]) == (4 * shard, 2 * shard)
    assert "master weights" not in found  # the weights are float32 themselves
    assert half["master weights"] == 4 * shard
    assert found["optimizer states"] == 8 * shard
    assert found["gradients"] == 4 * shard
    assert found["gradients in one piece"] == 4 * 250  # the weight that reaches sub_group_size
    assert sizes(setting(zero=ZERO | {"sub_group_size": 260}))["gradients in one piece"] == 4 * 268
    # Parts that are temporarily whole.
    assert found["gradient bucket"] == found["bucket, sorted by rank"] == 4 * 500
    assert "bucket, within gloo" not in found
    assert found["gathered weights"] == 4 * 1080  # less than 600 / 2 + 100 + 1000
    assert found["small weights"] == 4 * 10
    at_once = ZERO | {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    assert sizes(setting(zero=at_once))["gathered weights"] == 4 * 1000
    # Of a position and layer in float32: 6 H + 2 Q + 2 K + 4 F numbers; two sequences of 8, two layers.
    layer = 4 * (6 * 10 + 2 * 12 + 2 * 6 + 4 * 30)
    assert found["activations"] == 2 * 16 * layer
    checkpointed = sizes(setting("train.gradient_checkpointing=true"))
    assert checkpointed["activations"] == 2 * 16 * 4 * 10 + 16 * layer
    assert sizes(setting(budget=10))["activations"] == 2 * 10 * layer


@pytest.mark.parametrize(
    ("zero", "sorted_by_rank", "gloo"),
    [
        ({"reduce_bucket_size": 10_000}, 1080, 1080),
        ({}, 500, 1000),  # the largest weight, by itself
        ({"reduce_scatter": False}, None, 1000),
        ({"reduce_scatter": False, "reduce_bucket_size": 10_000}, None, None),
    ],
)
def test_a_single_rank_on_a_cpu_gathers_nothing_and_takes_what_it_touches(
    zero: dict[str, int], sorted_by_rank: int | None, gloo: int | None
) -> None:
    alone = setting(ranks=1, gpu=False, zero=ZERO | zero)
    found = sizes(alone)
    assert "gathered weights" not in found
    assert found["gradient bucket"] == 4 * min(1080, (ZERO | zero)["reduce_bucket_size"])
    assert found.get("bucket, sorted by rank") == (sorted_by_rank and 4 * sorted_by_rank)
    assert found.get("bucket, within gloo") == (gloo and 4 * gloo)
    assert all(part.on_host for part in parts_of(alone))


def test_offload_moves_the_named_parts_to_the_host() -> None:
    def on_host(*overrides: str) -> set[str]:
        return {part.name for part in parts_of(setting(*overrides)) if part.on_host}

    host = on_host("deepspeed.offload_optimizer=cpu")
    assert host == {
        "master weights",
        "optimizer states",
        "gradients",
        "gradients for the optimizer",
        "model, as it is loaded",
        "weights, while they are sharded",
        "master weights, while they are created",
    }
    assert on_host(*BOTH_AWAY) == host - {"master weights"} | {"weights"}  # which are their own masters
    nvme = ("deepspeed.offload_optimizer=nvme", "deepspeed.nvme_path=there")
    assert "optimizer states" not in sizes(setting(*nvme))


def test_every_rank_loads_the_model_whole_and_every_gpu_holds_it_before_it_is_sharded() -> None:
    def loading(on_host: bool, *overrides: str, **own: Any) -> int:
        return size_in(parts_of(setting(*overrides, **own)), "load", on_host)

    for ranks in (4, 64):
        assert sizes(setting(ranks=ranks))["model, as it is loaded"] == 4 * 1080
        assert loading(False, *BOTH_AWAY, ranks=ranks) == 4 * 1080
    assert loading(True, reference=True) == loading(True) + 4 * 1080
    assert loading(False, reference=True) == 4 * (1080 + 250 + 18 + 3)  # sharded by then
    assert "whole model, before sharding" not in sizes(setting(gpu=False))
    # No number of GPUs of 80 GiB loads 72B, and the example of 32B fits its sixteen.
    large, fits = (
        peak_of(parts_of(setting_of_table(name, ranks)), on_host=False).size
        for name, ranks in (("Qwen2.5-72B", 64), ("Qwen2.5-32B", 16))
    )
    assert large > 80 * GIB
    assert fits < 0.9 * 80 * GIB - 2 * GIB


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
    problem = problem_of(check_load, run, needed - 1)
    assert problem.key == "model.path"
    assert "the model does not fit: while it loads" in problem.what
    assert ("model.dtype: bfloat16" in problem.allowed) == ("model.dtype=bfloat16" not in overrides)
    assert "more ranks" in problem.allowed


def test_a_model_from_python_is_measured_itself() -> None:
    model = model_of("llama", torch.bfloat16)
    weights = sum(weight.numel() for weight in model.parameters())
    run = replace(load_run("quickstart", world_size=1), given=RunObjects(model=model))
    check_load(run, 2 * weights)
    problem_of(check_load, run, 2 * weights - 1)


def test_adapters_alone_have_gradients_and_states(tmp_path: Path) -> None:
    llama = SMALL | {"model_type": "llama"}
    two = shape_of(tmp_path, {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj"]}, **llama)
    assert two.adapters == (2 * 64, 2 * 64) * 3
    shape = shape_of(tmp_path, {}, **llama)
    assert sum(shape.adapters) == 3 * 2 * (4 * 64 + 2 * 32 + 2 * 64 + 3 * (64 + 96))
    found = sizes(setting(shape=shape, ranks=1, gpu=False))
    assert found["optimizer states"] == 8 * sum(shape.adapters)
    assert found["weights"] == 4 * (shape.parameters + sum(shape.adapters))
    assert "gradient of the head" not in found


def test_adapters_of_stacked_experts_and_the_sums_of_each_forward_pass(tmp_path: Path) -> None:
    lora: dict[str, Any] = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "down_proj"]}
    shape = shape_of(tmp_path, lora, model_type="qwen3_moe", **SMALL | MOE)
    # Of each layer: [4, 32, 64] and [4, 64, 16].
    assert sorted(shape.adapters) == sorted((2 * 4 * 32, 2 * 4 * 64, 2 * 4 * 64, 2 * 4 * 16) * 3)
    of_layer = 4 * (32 * 64 + 64 * 16)
    assert shape.merged == 3 * of_layer
    name, checkpointing = "parameters with their adapters", "train.gradient_checkpointing=true"
    assert sizes(setting(HALF, shape=shape))[name] == 2 * 4 * of_layer
    assert sizes(setting(HALF, checkpointing, shape=shape))[name] == 2 * 2 * of_layer
    assert name not in sizes(setting())
    matrix = shape_of(
        tmp_path, lora | {"target_parameters": ["gate.weight"]}, model_type="qwen3_moe", **SMALL | MOE
    )
    assert len(matrix.adapters) == 2 * 3


def test_float32_weights_are_their_own_masters_where_both_are_in_one_place() -> None:
    for gpu, parameters, optimizer, own in (
        (True, "none", "none", True),
        (True, "none", "cpu", False),
        (True, "cpu", "none", False),
        (True, "cpu", "cpu", True),
        (False, "none", "cpu", True),
    ):
        keys = (f"deepspeed.offload_param={parameters}", f"deepspeed.offload_optimizer={optimizer}")
        assert ("master weights" not in sizes(setting(*keys, gpu=gpu))) == own
        assert "master weights" in sizes(setting(HALF, *keys, gpu=gpu))


def test_a_single_rank_may_sample_from_the_policys_own_memory() -> None:
    name, away = "copy of the policy that generates", "deepspeed.offload_param=cpu"
    alone: dict[str, Any] = {"ranks": 1, "generator": GeneratorMemory("whole", shares=True)}
    assert name not in sizes(setting(**alone))
    assert name not in sizes(setting(away, **alone, gpu=False))
    others = [
        setting(**alone | {"generator": GeneratorMemory("whole")}),
        setting(**alone | {"ranks": 2}),
        setting(**alone, shape=replace(SHAPE, adapters=(4,))),
        setting(away, **alone),
    ]
    assert [sizes(each)[name] for each in others] == [4 * 1080] * 4


def test_what_generates() -> None:
    found = sizes(setting())
    assert found["copy of the policy that generates"] == 4 * 1080
    assert found["keys and values"] == 2 * 4 * 6 * (2 + 1) * 8 * (3 + 5)
    for overrides, score in (([], 12), (["sampling.top_p=0.9"], 40)):
        assert sizes(setting(*overrides))["scores of the next token"] == score * 100 * 8
    assert sizes(setting("evaluation.sampling.top_p=0.9"))["scores of the next token"] == 40 * 100 * 8
    assert "copy of the policy that generates" not in sizes(setting(generator=GeneratorMemory("shards")))
    held = GeneratorMemory("engine", engine="vLLM", engine_ranks=2, cache=77)
    assert sizes(setting(generator=held))["vLLM's weights"] == 2 * 1080
    assert sizes(setting(generator=held))["vLLM's keys and values"] == 77


def test_linear_layers_in_blocks_on_a_cpu() -> None:
    """A layer of 20 x 40 and the head of 100 x 10, not one of 3 x 4; two ranks sent 4 * 1080 bytes before."""
    name = "linear layers in blocks"
    held = GeneratorMemory("whole", shares=True, blocks_from=13)
    alone: dict[str, Any] = {"ranks": 1, "gpu": False, "shape": replace(SHAPE, linears=(800, 12))}
    alone["generator"] = held
    assert sizes(setting(**alone))[name] == 4 * (800 + 1000)
    assert sizes(setting(**alone | {"ranks": 2}))[name] == 4 * (800 + 1000 - 1080)
    plain = setting(**alone | {"generator": GeneratorMemory("whole")})
    for other in (setting(**alone | {"gpu": True}), setting(HALF, **alone), plain):
        assert name not in sizes(other)
    told = [run_setting(load_run("quickstart", []), gpu=gpu).generator for gpu in (False, True)]
    assert [each.blocks_from for each in told if each] == [2**16, 0]


def test_weights_packed_for_servers_on_other_gpus() -> None:
    """Buckets of 3000 bytes, or of the largest weight, 4 * 1000: two are packed, and one was gathered."""
    name = "weights packed for the servers"
    small, large = ({"generator": GeneratorMemory("none", sends=size)} for size in (3000, 5000))
    assert [sizes(setting(**each))[name] for each in (small, large)] == [3 * 4000, 3 * 5000]
    # Its own weights, of which none is copied before.
    assert sizes(setting(**large, ranks=1))[name] == 2 * 5000
    phases = [part.phases for part in parts_of(setting(**large)) if part.name == name]
    assert phases == [(formula.GENERATE,)]
    assert name not in sizes(setting(**large, gpu=False))
    run = load_run("quickstart", ["generator={name: vllm-server, bucket_mib: 3}"])
    assert sizes(run_setting(run, gpu=True))[name] == 2 * 3 * 2**20


@pytest.mark.parametrize("on_host", [False, True])
def test_the_peak_is_that_of_its_phase(on_host: bool) -> None:
    parts = [Part("a", 5, "", ("load", "step"), on_host), Part("b", 3, "", ("step",), on_host)]
    other = Part("c", 100, "", PHASES, not on_host)
    assert peak_of([*parts, other], on_host) == ("step", 8)


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
    of_run = run_setting(run, gpu=True)
    assert of_run.zero["reduce_bucket_size"] == 5_000_000
    assert of_run.zero["sub_group_size"] == DEFAULTS["sub_group_size"]
    assert of_run.zero["stage3_param_persistence_threshold"] == 7
    assert of_run.reference
    assert (of_run.prompt, of_run.ranks, of_run.sampled) == (9, 2, 32)
    assert of_run.shape.parameters == 527_104
    assert run_setting(run, gpu=True, prompt_tokens=50).prompt == 50


def test_auto_counts_as_bfloat16_on_gpus_alone() -> None:
    run = load_run("quickstart", ["model.dtype=auto"])
    assert run_setting(run, gpu=True).weight_bytes == 2
    assert run_setting(run, gpu=False).weight_bytes == 4
    auto, float32 = (planned(f"model.dtype={dtype}").output for dtype in ("auto", "float32"))
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
    run = load_run("quickstart", ["data.max_prompt_length=9", "train.chunked_logprobs=false", *overrides])
    of_run = run_setting(run, gpu)
    assert of_run.positions == positions
    of_completions = positions if of_run.budget else 256 * 4
    assert sizes(of_run)["logits"] == (of_run.weight_bytes + 12) * of_completions * of_run.shape.vocabulary


@pytest.mark.parametrize("width", ["80", "120"])
def test_the_command_prints_both_tables_and_what_it_leaves_out(width: str) -> None:
    done = planned("--world-size", "2", width=width)
    assert done.exit_code == 0
    phases = [f"{phase}: " for phase in PHASES]
    assumed, load = "(assumed; --prompt-tokens sets the length)", "every GPU holds all of it, 2.0 MiB"
    for text in ("Memory of each of 2 ranks", *phases, load, "Without GPUs:", assumed, "fragmentation"):
        assert text in done.output
    assert "Prompts: 9 tokens;" in planned("--prompt-tokens", "9", width=width).output


def test_the_page_has_the_formulas_tables_and_explains_every_part() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    for table in tables().split("\n\n"):
        assert table in page, "python docs/hooks/memory_tables.py prints what belongs there"
    offloaded = ("deepspeed.offload_optimizer=cpu", "train.optim=adamw_torch", "checkpoint.background=true")
    ways = [
        setting(gpu=False),
        setting(*offloaded, gpu=False, reference=True),
        setting(gpu=False, generator=GeneratorMemory("engine", engine="vLLM")),
        setting(generator=GeneratorMemory("none", sends=1)),
    ]
    names = {part.name for way in ways for part in parts_of(way)}
    listed = set(re.findall(r"^\| ([^|`]+?) \|", page, flags=re.MULTILINE))
    assert names <= listed


@pytest.mark.parametrize(
    ("free", "answer"), [(12, "fits"), (11, "tight"), (7, "tight"), (6, "does not fit"), (0, "does not fit")]
)
def test_an_answer_by_the_free_memory(free: int, answer: str) -> None:
    memory = Memory(free * GIB, 20 * GIB)
    assert Line("host", 1, 7 * GIB, "update", 12 * GIB, memory).answer == answer


def on_two_ranks(gpu: bool) -> Setting:
    return run_setting(load_run("quickstart", world_size=2), gpu=gpu)


def lines(host: Memory | None, *gpus: Memory) -> Sequence[Line]:
    return list(verdict_lines(on_two_ranks(gpu=True), on_two_ranks(gpu=False), host, gpus))


def test_without_gpus_all_ranks_share_the_host() -> None:
    peak = peak_of(parts_of(on_two_ranks(gpu=False)), on_host=True)
    (line,) = lines(Memory(2 * peak.size, 100 * GIB))
    assert (line.where, line.ranks, line.phase) == ("host", 2, peak.phase)
    assert line.counted == 2 * peak.size
    assert line.needed == 2 * peak.size + 2 * GIB
    assert line.answer == "tight"


def test_with_gpus_the_fullest_one_of_the_run_and_the_host_are_judged() -> None:
    peak = peak_of(parts_of(on_two_ranks(gpu=True)), on_host=False)
    gpus = [Memory(free * GIB, 80 * GIB) for free in (3, 70, 1)]
    on_gpu, host = lines(Memory(100 * GIB, 100 * GIB), *gpus)
    assert (on_gpu.counted, on_gpu.needed) == (peak.size, int(peak.size * 1.1) + 2 * GIB)
    assert (on_gpu.memory.free, on_gpu.answer) == (3 * GIB, "tight")
    assert (host.ranks, host.answer) == (2, "fits")
    assert worst_of([on_gpu, host]) == "tight"
    one_gpu = lines(Memory(100 * GIB, 100 * GIB), gpus[0])
    assert [line.ranks for line in one_gpu] == [1, 1]  # the other rank runs elsewhere
    (alone,) = lines(None, Memory(40 * GIB, 40 * GIB))
    assert (alone.where, alone.answer) == ("each GPU", "fits")


@pytest.mark.parametrize(
    ("visible", "free"),
    [
        *((None, [100, 300]), ("", []), ("1", [300]), ("1,0", [300, 100]), ("GPU-ab", [100])),
        *(("-1", []), ("7", []), ("1,-1,0", [300])),
    ],
)
def test_the_driver_is_asked_for_the_visible_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, free: list[int]
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho '100, 1000'\necho '300, 1000'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_here() == [Memory(mib * 2**20, 1000 * 2**20) for mib in free]
    driver.write_text("#!/bin/sh\nexit 9\n")
    assert gpus_here() == []


def test_a_container_has_what_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\n")
    monkeypatch.setattr(fit, "CGROUP", tmp_path)
    assert host_here() == Memory(600_000, 1_000_000)
    (tmp_path / "memory.stat").write_text("anon 100000\ninactive_file 250000\nactive_file 50000\n")
    assert host_here() == Memory(850_000, 1_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_here().total > 1_000_000


@pytest.mark.parametrize(
    ("size", "code", "last"),
    [("80", 0, "fits on GPUs of 80 GiB"), ("3", 0, "tight on GPUs of 3 GiB"), ("1", 1, "does not fit on GPUs")],
)
def test_the_command_ends_with_the_verdict(size: str, code: int, last: str) -> None:
    done = planned("--gpu-gib", size, "sampling.max_completion_length=50", width="80")
    assert done.exit_code == code, done.output
    assert done.output.splitlines()[-1].startswith(last)
    assert max(map(len, done.output.splitlines())) <= 80


def test_a_size_that_says_nothing_is_refused() -> None:
    assert "is no size of a GPU" in str(planned("--gpu-gib", "inf").exception)
    done = CliRunner().invoke(cli.app, ["plan", "quickstart", "--gpu-gib", "8"])
    assert "has no effect without --memory" in str(done.exception)
