"""The memory of one rank, part by part, and which parts are there at a time.

Psi are the elements of all weights, b the bytes of one that computes, P the ranks; H, F, Q, K and V the widths
of the model (`ModelShape`), L its layers, N the positions of a micro-batch. ZeRO-3 (arXiv 1910.02054, section
5) keeps on each rank the P-th part of weights, gradients and optimizer states; the rest is what DeepSpeed 0.19
and PyTorch need besides to compute with them. `benchmarks/memory_plan.py` compares the sum with what runs take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from grpox.policy.memory_plan.setting import Setting

LOAD, GENERATE, UPDATE, REDUCE, STEP = "load", "generate", "update", "reduce", "step"
PHASES = (LOAD, GENERATE, UPDATE, REDUCE, STEP)
"""Loading the model; sampling; forward and backward; summing gradients over ranks; the optimizer."""
TRAINS = (UPDATE, REDUCE, STEP)
ALWAYS = (GENERATE, *TRAINS)

FLOAT32 = 4
MOMENTS = 8
"""Bytes of AdamW's two states."""
CHUNK = 2**23
"""Logits that the head holds at once (`grpox.policy.logprobs.LOGITS_PER_CHUNK`)."""
SYNC = 256 * 2**20
"""Bytes of weights that are whole at a time when a generator takes them (`weight_stream.BUCKET_BYTES`)."""


@dataclass(frozen=True)
class Part:
    """Something that takes memory on a rank."""

    name: str
    size: int
    """Bytes."""
    phases: Sequence[str]
    """When it is there."""
    on_host: bool
    """Whether in the host's memory; else in the device's."""
    why: str
    """The arithmetic, for people."""


@dataclass(frozen=True)
class Peak:
    """The phase that takes most, and how much, in bytes."""

    phase: str
    size: int


def parts_of(setting: Setting) -> list[Part]:
    """All parts that take anything."""
    made = [*_sharded(setting), *_moving(setting), *_computed(setting), *_generator(setting), *_host(setting)]
    return [part for part in made if part.size > 0]


def size_in(parts: Sequence[Part], phase: str, on_host: bool) -> int:
    """Bytes of a rank in a phase."""
    return sum(part.size for part in parts if phase in part.phases and part.on_host == on_host)


def peak_of(parts: Sequence[Part], on_host: bool) -> Peak:
    """The most that a rank takes there."""
    return max((Peak(phase, size_in(parts, phase, on_host)) for phase in PHASES), key=lambda peak: peak.size)


def _sharded(s: Setting) -> Iterator[Part]:
    """What ZeRO-3 divides by the ranks, each weight rounded up."""
    weights, trained = _shard(s.shape.weights, s.ranks), _shard(s.trained_weights, s.ranks)
    frozen = _shard(s.trained, s.ranks) if s.trained else 0
    host = not s.gpu
    if s.offload_param != "nvme":
        where = host or s.offload_param == "cpu"
        yield Part("weights", s.weight_bytes * (weights + frozen), ALWAYS, where, "b Psi / P")
    if s.reference:
        where = host or s.offload_param == "cpu"
        size = 0 if s.offload_param == "nvme" else s.weight_bytes * weights
        # It is sharded before the policy is.
        phases = ALWAYS if where else (LOAD, *ALWAYS)
        yield Part("reference weights", size, phases, where, "b Psi / P")
    offloaded = s.offload_optimizer != "none"
    where = host or offloaded
    if s.offload_optimizer != "nvme":
        yield Part("master weights", FLOAT32 * trained, ALWAYS, where, "4 Psi / P")
        yield Part(
            "optimizer states", MOMENTS * trained, ALWAYS, where, "8 Psi / P, AdamW's moments in float32"
        )
    yield Part("gradients", FLOAT32 * trained, ALWAYS, where, "4 Psi / P")
    if offloaded and s.offload_optimizer != "nvme":
        yield Part("gradients for the optimizer", FLOAT32 * trained, ALWAYS, True, "4 Psi / P, where offloaded")
    elif not offloaded:
        size = FLOAT32 * min(trained, s.sub_group)
        yield Part("gradients in one piece", size, (STEP,), host, "4 Psi / P, at most sub_group_size")
    if not s.fused:
        yield Part("AdamW without its fused kernel", MOMENTS * trained, (STEP,), where, "8 Psi / P")


def _moving(s: Setting) -> Iterator[Part]:
    """What is whole on a rank for a while."""
    host, trained = not s.gpu, sum(s.trained_weights)
    if s.gpu:
        # deepspeed.initialize moves a model to its device before it divides it, whatever is offloaded later.
        whole = s.weight_bytes * (s.shape.parameters + sum(s.trained))
        yield Part("whole model, before it is sharded", whole, (LOAD,), host, "b Psi, however many ranks")
    bucket = FLOAT32 * min(trained, s.reduce_bucket)
    # torch.empty takes the GPU's memory at once; the host's where it is written to.
    held = FLOAT32 * s.reduce_bucket if s.gpu else bucket
    yield Part("gradient bucket", held, ALWAYS, host, "4 reduce_bucket_size")
    yield Part("bucket, sorted by rank", bucket, (REDUCE,), host, "4 Psi, at most reduce_bucket_size")
    if not s.gpu:
        yield Part("bucket, within gloo", bucket, (REDUCE,), host, "4 Psi, at most reduce_bucket_size")
    if s.ranks > 1 or (s.gpu and s.offload_param != "none"):
        small = sum(size for size in s.shape.weights if size <= s.persistent)
        # A layer's weights stay from its forward to its backward if that is near enough in elements passed.
        near = s.reuse // 2 + s.prefetch + max(s.shape.weights)
        live = min(s.shape.parameters, near)
        # What is fetched ahead comes in one piece, which is there until each weight has been cut out of it.
        ahead = s.weight_bytes * min(s.prefetch, s.shape.parameters) * (s.ranks > 1)
        yield Part("weights fetched ahead", ahead, (UPDATE,), host, "b Psi, at most b prefetch_bucket_size")
        yield Part(
            "gathered weights", s.weight_bytes * live, (UPDATE,), host, "b Psi, at most max_reuse_distance / 2"
        )
        yield Part(
            "small weights", s.weight_bytes * small, (GENERATE, REDUCE, STEP), host, "kept whole: b each"
        )
        sync = min(SYNC, s.weight_bytes * s.shape.parameters) if _holds(s) != "shards" else 0
        yield Part("weights on the way to the generator", sync, (GENERATE,), host, "b Psi, at most 256 MiB")


def _computed(s: Setting) -> Iterator[Part]:
    """What forward and backward hold of a micro-batch."""
    shape, b, n, host = s.shape, s.weight_bytes, s.positions, not s.gpu
    whole = n * _layer(s)
    kept = shape.layers * n * b * shape.hidden + whole if s.checkpointing else shape.layers * whole
    why = "N (b L H + one layer)" if s.checkpointing else "N L (6 H + 2 Q + 2 K + 4 F) b"
    yield Part("activations", kept, (UPDATE,), host, why)
    ends = n * b * 4 * shape.hidden
    # Gradients of one layer, beside what it saved.
    passing = n * b * 3 * max(shape.intermediate, shape.queries)
    yield Part("gradients of activations", ends + passing, (UPDATE,), host, "N b (4 H + 3 F)")
    scored = min(n, s.sequences * s.completion)
    if s.chunked:
        yield Part(
            "logits", FLOAT32 * 2 * min(CHUNK, scored * shape.vocabulary), (UPDATE,), host, "64 MiB, in parts"
        )
    else:
        size = (b + 3 * FLOAT32) * scored * shape.vocabulary
        yield Part("logits", size, (UPDATE,), host, "(b + 12) V for each token of a completion")
    trains = not s.trained
    yield Part("gradient of the head", FLOAT32 * shape.head * trains, (UPDATE,), host, "4 V H")


def _layer(s: Setting) -> int:
    """Bytes that a layer saves of one position for its backward pass."""
    shape = s.shape
    # Each of two norms: its input, the normalised input, its output; in float32 whatever b is but the last.
    norms = 2 * shape.hidden * (3 * FLOAT32 if s.weight_bytes == FLOAT32 else 2 * s.weight_bytes + 6)
    # Queries, keys, values and the output of attention; gate, its activation, up, and their product.
    rest = 2 * shape.queries + 2 * shape.keys + 4 * shape.intermediate
    return norms + s.weight_bytes * rest


def _generator(s: Setting) -> Iterator[Part]:
    shape, b, host = s.shape, s.weight_bytes, not s.gpu
    weights = b * shape.parameters
    if _holds(s) == "whole":
        yield Part("copy of the policy that generates", weights, ALWAYS, host, "b Psi")
    if _holds(s) in ("whole", "shards"):
        cache = 2 * b * shape.keys * (shape.layers + 1) * s.sampled * (s.prompt + s.completion)
        yield Part("keys and values", cache, (GENERATE,), host, "2 b K L for each position")
        yield Part(
            "scores of the next token",
            3 * FLOAT32 * shape.vocabulary * s.sampled,
            (GENERATE,),
            host,
            "12 V each",
        )
    if s.generator is not None and s.generator.holds == "engine":
        phases = (GENERATE,) if s.gpu else ALWAYS  # it sleeps while the policy is updated, on CUDA
        name, size = s.generator.engine, weights // s.generator.engine_ranks
        yield Part(f"{name}'s weights", size, phases, host, "b Psi over the ranks of an engine")
        yield Part(f"{name}'s keys and values", s.generator.cache or 0, phases, host, s.generator.cache_key)


def _holds(s: Setting) -> str:
    return "unknown" if s.generator is None else s.generator.holds


def _host(s: Setting) -> Iterator[Part]:
    """What is in the host's memory whatever the device."""
    weights = s.weight_bytes * s.shape.parameters
    yield Part("model, as it is loaded", weights, (LOAD,), True, "b Psi: every rank loads it whole")
    # DeepSpeed puts a rank's parts into one piece by way of the host.
    pieces = s.weight_bytes * _shard(s.shape.weights, s.ranks) * (1 if s.gpu else 2)
    yield Part("weights, while they are sharded", pieces, (LOAD,), True, "b Psi / P, on a CPU twice")
    if s.offload_optimizer == "cpu":
        # They are converted, and then cloned.
        masters = FLOAT32 * _shard(s.trained_weights, s.ranks)
        yield Part("master weights, as they are made", masters, (LOAD,), True, "4 Psi / P")
    if s.reference:
        yield Part("reference, as it is loaded", weights, (LOAD,), True, "b Psi")
    if s.background:
        size = (s.weight_bytes + FLOAT32 + MOMENTS) * _shard(s.trained_weights, s.ranks)
        yield Part("checkpoint that is being written", size, TRAINS, True, "(b + 12) Psi / P")


def _shard(weights: Sequence[int], ranks: int) -> int:
    """Elements of a rank's part."""
    return sum(ceil(size / ranks) for size in weights)
