"""The tables of docs/scaling.md: published models on some numbers of GPUs, by the formula.

python -m grpox.policy.memory_plan.table              prints them, to be put into the page
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from grpox.contracts import GeneratorMemory
from grpox.policy.memory_plan.formula import LOAD, parts_of, peak_of, size_in
from grpox.policy.memory_plan.setting import Setting
from grpox.policy.memory_plan.shape import ModelShape, shape_of

GIB = 2**30
RANKS = (1, 8, 16, 32, 64)
RANKS_PER_HOST = 8


def _config(
    kind: str, hidden: int, intermediate: int, layers: int, heads: tuple[int, int, int], vocabulary: int
) -> dict[str, object]:
    """The fields of a config.json that count."""
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": vocabulary,
    }


MODELS = {
    "SmolLM2-135M": _config("llama", 576, 1536, 30, (9, 3, 64), 49152) | {"tie_word_embeddings": True},
    "Qwen2.5-0.5B": _config("qwen2", 896, 4864, 24, (14, 2, 64), 151936) | {"tie_word_embeddings": True},
    "Qwen2.5-1.5B": _config("qwen2", 1536, 8960, 28, (12, 2, 128), 151936) | {"tie_word_embeddings": True},
    "Llama-3.1-8B": _config("llama", 4096, 14336, 32, (32, 8, 128), 128256),
    "Qwen2.5-32B": _config("qwen2", 5120, 27648, 64, (40, 8, 128), 152064),
    "Qwen2.5-72B": _config("qwen2", 8192, 29568, 80, (64, 8, 128), 152064),
}
"""As their config.json has them."""


def setting(shape: ModelShape, ranks: int) -> Setting:
    """The run of the tables: bfloat16, one sequence of 512 + 1024 tokens at a time, sampled elsewhere."""
    return Setting(
        shape=shape,
        ranks=ranks,
        gpu=True,
        weight_bytes=2,
        sequences=1,
        prompt=512,
        completion=1024,
        checkpointing=True,
        generator=GeneratorMemory("none"),
    )


def tables() -> str:
    """Both, in Markdown."""
    return "\n".join([*_by_ranks(), "", *_by_setting()])


def _by_ranks() -> Iterator[str]:
    yield (
        "| model | parameters | "
        + " | ".join(f"{ranks} GPU{'s' if ranks > 1 else ''}" for ranks in RANKS)
        + " | host, loading |"
    )
    yield "|---" * (len(RANKS) + 3) + "|"
    for name, config in MODELS.items():
        shape = _shape(config)
        peaks = [_gib(peak_of(parts_of(setting(shape, ranks)), on_host=False).size) for ranks in RANKS]
        loading = size_in(parts_of(setting(shape, RANKS_PER_HOST)), LOAD, on_host=True) * RANKS_PER_HOST
        yield f"| {name} | {shape.parameters / 1e9:.2f} B | {' | '.join(peaks)} | {_gib(loading)} |"


def _by_setting() -> Iterator[str]:
    shape = _shape(MODELS["Llama-3.1-8B"])
    base = setting(shape, 8)
    smaller = 50_000_000
    ways = {
        "as above": base,
        "without `train.gradient_checkpointing`": replace(base, checkpointing=False),
        "without `train.chunked_logprobs`": replace(base, chunked=False),
        "`deepspeed.offload_optimizer: cpu`": replace(base, offload_optimizer="cpu"),
        "and `deepspeed.offload_param: cpu`": replace(base, offload_optimizer="cpu", offload_param="cpu"),
        "`reduce_bucket_size: 5e7`": replace(base, reduce_bucket=smaller),
        "and `stage3_max_reuse_distance: 0`": replace(base, reduce_bucket=smaller, reuse=0),
        "`train.beta` above 0": replace(base, reference=True),
        "`model.dtype: float32`": replace(base, weight_bytes=4),
        "`generator: hf`, 64 completions": replace(base, generator=GeneratorMemory("whole"), sampled=64),
        "`model.lora: {r: 16}`": replace(base, trained=shape.adapters(16, "all-linear", [])),
    }
    yield "| Llama-3.1-8B on 8 GPUs | GPU | while | host of the 8, while training |"
    yield "|---|---|---|---|"
    for name, way in ways.items():
        parts = parts_of(way)
        peak = peak_of(parts, on_host=False)
        host = max(size_in(parts, phase, on_host=True) for phase in ("generate", "update", "reduce", "step"))
        yield f"| {name} | {_gib(peak.size)} | {peak.phase} | {_gib(host * RANKS_PER_HOST)} |"


def _shape(config: dict[str, object]) -> ModelShape:
    shape = shape_of(config)
    assert shape is not None
    return shape


def _gib(size: float) -> str:
    gib = size / GIB
    return f"{gib:.1f}" if gib < 10 else f"{gib:,.0f}"


if __name__ == "__main__":
    print(tables())
