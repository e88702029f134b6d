"""The tables of docs/scaling.md: memory of published models on some numbers of GPUs, by the formula.

python docs/hooks/memory_tables.py prints the tables, to copy into the page
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from grpox.contracts import GeneratorMemory
from grpox.errors.formatting import pluralize
from grpox.policy.memory_plan.formula import ALWAYS, DEFAULTS, LOAD, Setting, parts_of, peak_of, size_in
from grpox.policy.memory_plan.shape import ModelShape, shape_of
from grpox_generators.configs import VllmServerConfig

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


def setting(shape: ModelShape, ranks: int) -> Setting:
    """Describe the run of the tables: bfloat16, one sequence of 512 + 1024 tokens, sampled elsewhere."""
    return Setting(
        shape=shape,
        ranks=ranks,
        gpu=True,
        weight_bytes=2,
        sequences=1,
        prompt=512,
        completion=1024,
        checkpointing=True,
        generator=VllmServerConfig().memory(gpu=True),
    )


def tables() -> str:
    """Write both tables in Markdown."""
    return "\n".join([*_by_ranks(), "", *_by_setting()])


def _by_ranks() -> Iterator[str]:
    numbers = " | ".join(pluralize(ranks, "GPU") for ranks in RANKS)
    yield f"| model | parameters | {numbers} | host, loading |"
    yield "|---" * (len(RANKS) + 3) + "|"
    for name, config in MODELS.items():
        shape = _shape(config)
        peaks = [_gib(peak_of(parts_of(setting(shape, ranks)), on_host=False).size) for ranks in RANKS]
        loading = size_in(parts_of(setting(shape, RANKS_PER_HOST)), LOAD, on_host=True) * RANKS_PER_HOST
        yield f"| {name} | {shape.parameters / 1e9:.2f} B | {' | '.join(peaks)} | {_gib(loading)} |"


def _by_setting() -> Iterator[str]:
    shape = _shape(MODELS["Llama-3.1-8B"])
    base = setting(shape, 8)
    bucket = DEFAULTS | {"reduce_bucket_size": 50_000_000}
    offloaded = replace(base, offload_optimizer="cpu")
    no_reuse = bucket | {"stage3_max_reuse_distance": 0}
    settings = {
        "as in the table above": base,
        "without `train.gradient_checkpointing`": replace(base, checkpointing=False),
        "without `train.chunked_logprobs`": replace(base, chunked=False),
        "`deepspeed.offload_optimizer: cpu`": offloaded,
        "the same with `deepspeed.offload_param: cpu`": replace(offloaded, offload_param="cpu"),
        "`reduce_bucket_size: 5e7`": replace(base, zero=bucket),
        "the same with `stage3_max_reuse_distance: 0`": replace(base, zero=no_reuse),
        "`train.beta` above 0": replace(base, reference=True),
        "`model.dtype: float32`": replace(base, weight_bytes=4),
        "`generator: hf`, 64 completions": replace(base, generator=GeneratorMemory("whole"), sampled=64),
        "`model.lora: {r: 16}`": replace(base, trained=shape.adapters(16, "all-linear", [])),
    }
    host = "host memory of the 8 ranks during training, GiB"
    yield f"| Llama-3.1-8B on 8 GPUs | GPU memory of a rank, GiB | highest in phase | {host} |"
    yield "|---|---|---|---|"
    for name, changed in settings.items():
        parts = parts_of(changed)
        peak = peak_of(parts, on_host=False)
        size = max(size_in(parts, phase, on_host=True) for phase in ALWAYS)
        yield f"| {name} | {_gib(peak.size)} | {peak.phase} | {_gib(size * RANKS_PER_HOST)} |"


def _shape(config: dict[str, object]) -> ModelShape:
    shape = shape_of(config)
    assert shape is not None
    return shape


def _gib(size: float) -> str:
    gib = size / GIB
    return f"{gib:.1f}" if gib < 10 else f"{gib:,.0f}"


if __name__ == "__main__":
    print(tables())
