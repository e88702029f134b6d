"""The tables of docs/scaling.md: memory of published models on some numbers of GPUs, by the formula.

python docs/hooks/memory_tables.py prints the tables, to copy into the page
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from grpox.errors.formatting import pluralize
from grpox.policy.memory_plan.formula import ALWAYS, LOAD, Setting, parts_of, peak_of, size_in
from grpox.policy.memory_plan.of_run import run_setting
from grpox.runfile.load import load_run

GIB = 2**30
RANKS = (1, 8, 16, 32, 64)
RANKS_PER_HOST = 8
_SIZES = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings"),
)
"""The fields of a config.json that count."""
MODELS = {
    name: dict(zip(_SIZES, values, strict=True))
    for name, values in {
        "SmolLM2-135M": ("llama", 576, 1536, 30, 9, 3, 64, 49152, True),
        "Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True),
        "Qwen2.5-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True),
        "Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
        "Qwen2.5-32B": ("qwen2", 5120, 27648, 64, 40, 8, 128, 152064, False),
        "Qwen2.5-72B": ("qwen2", 8192, 29568, 80, 64, 8, 128, 152064, False),
    }.items()
}
"""Fields of their config.json."""
KEYS = (
    *("model.dtype=bfloat16", "data.max_prompt_length=512", "sampling.max_completion_length=1024"),
    *("train.per_device_train_batch_size=1", "train.gradient_accumulation_steps=64", "train.num_generations=8"),
    *("train.max_tokens_per_micro_batch=null", "train.gradient_checkpointing=true", "evaluation=null"),
    "generator=vllm-server",
)
"""Keys of the run of the tables, on the quickstart."""


def setting(model: str, ranks: int, *overrides: str) -> Setting:
    """Describe the run of the tables: bfloat16, one sequence of 512 + 1024 tokens, sampled elsewhere."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[model]))
        run = load_run("quickstart", [*KEYS, f"model.path={folder}", *overrides], world_size=ranks)
        return run_setting(run, gpu=True)


def tables() -> str:
    """Write both tables in Markdown."""
    return "\n".join([*_by_ranks(), "", *_by_setting()])


def _by_ranks() -> Iterator[str]:
    numbers = " | ".join(pluralize(ranks, "GPU") for ranks in RANKS)
    yield f"| model | parameters | {numbers} | host, loading |"
    yield "|---" * (len(RANKS) + 3) + "|"
    for name in MODELS:
        base = setting(name, RANKS_PER_HOST)
        peaks = [_gib(peak_of(parts_of(replace(base, ranks=ranks)), on_host=False).size) for ranks in RANKS]
        loading = size_in(parts_of(base), LOAD, on_host=True) * RANKS_PER_HOST
        yield f"| {name} | {base.shape.parameters / 1e9:.2f} B | {' | '.join(peaks)} | {_gib(loading)} |"


def _by_setting() -> Iterator[str]:
    bucket = "deepspeed.settings.zero_optimization.reduce_bucket_size=5e7"
    offload = "deepspeed.offload_optimizer=cpu"
    settings: dict[str, list[str]] = {
        "as in the table above": [],
        "without `train.gradient_checkpointing`": ["train.gradient_checkpointing=false"],
        "without `train.chunked_logprobs`": ["train.chunked_logprobs=false"],
        "`deepspeed.offload_optimizer: cpu`": [offload],
        "the same with `deepspeed.offload_param: cpu`": [offload, "deepspeed.offload_param=cpu"],
        "`reduce_bucket_size: 5e7`": [bucket],
        "the same with `stage3_max_reuse_distance: 0`": [
            bucket,
            "deepspeed.settings.zero_optimization.stage3_max_reuse_distance=0",
        ],
        "`train.beta` above 0": ["train.beta=0.1"],
        "`model.dtype: float32`": ["model.dtype=float32"],
        "`generator: hf`, 64 completions": ["generator=hf"],
        "`model.lora: {r: 16}`": ["model.lora={r: 16}"],
    }
    host = "host memory of the 8 ranks during training, GiB"
    yield f"| Llama-3.1-8B on 8 GPUs | GPU memory of a rank, GiB | highest in phase | {host} |"
    yield "|---|---|---|---|"
    for name, overrides in settings.items():
        parts = parts_of(setting("Llama-3.1-8B", RANKS_PER_HOST, *overrides))
        peak = peak_of(parts, on_host=False)
        size = max(size_in(parts, phase, on_host=True) for phase in ALWAYS)
        yield f"| {name} | {_gib(peak.size)} | {peak.phase} | {_gib(size * RANKS_PER_HOST)} |"


def _gib(size: float) -> str:
    gib = size / GIB
    return f"{gib:.1f}" if gib < 10 else f"{gib:,.0f}"


if __name__ == "__main__":
    print(tables())
