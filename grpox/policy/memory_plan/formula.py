"""The memory of one rank: its parts, and the phases in which each part exists.

Psi is the number of elements of all weights, b the bytes of an element that computes, P the number of ranks; H,
F, Q, K and V are the widths of the model (`ModelShape`), L its layers, N the positions of a micro-batch. ZeRO-3
(arXiv 1910.02054, section 5) stores 1/P of weights, gradients and optimizer states on each rank; the other
parts are temporary memory of DeepSpeed 0.19 and PyTorch. `benchmarks/memory_plan.py` compares the sum with real
runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from grpox.config import RunConfig, SamplingConfig
from grpox.config.inputs import dtype_on
from grpox.config.sampling import sampling_of
from grpox.contracts import GeneratorMemory
from grpox.policy.head_chunks import BYTES_PER_LOGIT, rows_per_chunk

LOAD, GENERATE, UPDATE, REDUCE, STEP = "load", "generate", "update", "reduce", "step"
PHASES = (LOAD, GENERATE, UPDATE, REDUCE, STEP)
"""Phases: loading the model; sampling; forward and backward; summing gradients over ranks; the optimizer."""
TRAINS = (UPDATE, REDUCE, STEP)
ALWAYS = (GENERATE, *TRAINS)

FLOAT32 = 4
MOMENTS = 8
"""Bytes of AdamW's two states."""
LARGE_GPU = 2**40
"""Bytes of a GPU whose memory does not limit the rows of a chunk of logits."""
SYNC = 256 * 2**20
"""Bytes of whole weights at a time during weight sync (`weight_stream.BUCKET_BYTES`)."""
DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "sub_group_size": 1_000_000_000,
    "reduce_scatter": True,
}
"""Defaults of DeepSpeed 0.19: sizes in elements, and a switch."""
PROMPT = 512
"""Assumed number of prompt tokens, if neither the run file nor the user sets a limit."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder model that determine its memory."""

    weights: tuple[int, ...]
    """Number of elements of each weight; tied weights once."""
    hidden: int
    """H"""
    intermediate: int
    """F, of the gated feed-forward layer"""
    layers: int
    queries: int
    """Q, the total width of all query heads"""
    keys: int
    """K, the width of the key heads, which groups of query heads share"""
    vocabulary: int
    """V"""
    linears: tuple[int, ...] = ()
    """Number of elements of each linear layer's weight, without the head."""
    adapters: tuple[int, ...] = ()
    """Number of elements of each weight of LoRA; empty: the model's own weights are trained."""
    merged: int = 0
    """Number of elements of the parameters to which each forward pass adds an adapter of LoRA."""

    @property
    def parameters(self) -> int:
        return sum(self.weights)

    @property
    def head(self) -> int:
        """Number of elements of the head's weight."""
        return self.vocabulary * self.hidden

    @property
    def trained(self) -> tuple[int, ...]:
        return self.adapters or self.weights


@dataclass(frozen=True)
class Setting:
    """The inputs of the formula: a run's settings, and the numbers that depend on its model and components."""

    config: RunConfig
    shape: ModelShape
    ranks: int
    gpu: bool
    """True if ranks have a GPU; else all parts are in host memory, and reserved but unused memory counts as
    0."""
    prompt: int = PROMPT
    """Largest number of tokens of a prompt."""
    budget: int | None = None
    """Number of positions in a micro-batch, instead of a number of sequences."""
    reference: bool = False
    """True if a second model is the reference."""
    generator: GeneratorMemory | None = None
    """Memory of the generator; None if the generator does not report it."""
    sampled: int = 64
    """Number of completions that a rank samples together."""
    zero: Mapping[str, int] = field(default_factory=DEFAULTS.copy)
    """Sizes of DeepSpeed's buffers, in elements."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of the weights that compute."""
        return 2 if dtype_on(self.config.model.dtype, self.gpu) == "bfloat16" else 4

    @property
    def positions(self) -> int:
        """Largest number of positions in a forward pass, without shared prompts."""
        sequences = self.config.train.per_device_train_batch_size
        return self.budget or sequences * (self.prompt + self.config.sampling.max_completion_length)

    def place(self, offload: str) -> str:
        """Return the place of a part that may be offloaded: host, gpu or nvme."""
        return {"none": "gpu" if self.gpu else "host", "cpu": "host"}.get(offload, offload)


class Part(NamedTuple):
    """One part of a rank's memory."""

    name: str
    size: int
    """Size in bytes."""
    why: str
    """Formula of the size, for people."""
    phases: Sequence[str] = ALWAYS
    """Phases in which the part exists."""
    on_host: bool = False
    """True if the part is in host memory; False if it is in device memory."""


class Peak(NamedTuple):
    """Phase with the most memory, and its size in bytes."""

    phase: str
    size: int


def parts_of(setting: Setting) -> list[Part]:
    """List all parts; without a GPU all are in host memory."""
    parts = [*_sharded(setting), *_moving(setting), *_computed(setting), *_generator(setting), *_host(setting)]
    return [part._replace(on_host=part.on_host or not setting.gpu) for part in parts if part.size > 0]


def size_in(parts: Sequence[Part], phase: str, on_host: bool) -> int:
    """Sum the bytes of a rank in a phase."""
    return sum(part.size for part in parts if phase in part.phases and part.on_host == on_host)


def peak_of(parts: Sequence[Part], on_host: bool) -> Peak:
    """Find the phase in which a rank needs the most memory."""
    return max((Peak(phase, size_in(parts, phase, on_host)) for phase in PHASES), key=lambda peak: peak.size)


def _sharded(s: Setting) -> Iterator[Part]:
    """Yield the parts that ZeRO-3 divides by the ranks, each weight rounded up."""
    b, offload = s.weight_bytes, s.config.deepspeed
    weights, trained = _shard(s.shape.weights, s.ranks), _shard(s.shape.trained, s.ranks)
    away = offload.offload_param == "cpu"
    if offload.offload_param != "nvme":
        yield Part("weights", b * (weights + _shard(s.shape.adapters, s.ranks)), "b Psi / P", on_host=away)
        if s.reference:
            # The reference is sharded before the policy.
            phases = (LOAD, *ALWAYS) if s.gpu and not away else ALWAYS
            yield Part("reference weights", b * weights, "b Psi / P", phases, away)
    place, away, master = (
        s.place(offload.offload_optimizer),
        offload.offload_optimizer != "none",
        FLOAT32 * trained,
    )
    if place != "nvme":
        # Float32 weights in the place of the optimizer are their own master weights.
        own = 0 if b == FLOAT32 and place == s.place(offload.offload_param) else master
        yield Part("master weights", own, "4 Psi / P, unless weights are float32", on_host=away)
        why = "8 Psi / P, AdamW's moments in float32"
        yield Part("optimizer states", MOMENTS * trained, why, on_host=away)
    yield Part("gradients", master, "4 Psi / P", on_host=away)
    if offload.offload_optimizer == "cpu":
        yield Part("gradients for the optimizer", master, "4 Psi / P, if offloaded", on_host=True)
    if not away:
        size = FLOAT32 * _largest_part(s.shape.trained, s.ranks, s.zero["sub_group_size"])
        yield Part("gradients in one piece", size, "4 Psi / P, at most sub_group_size and a weight", (STEP,))
    if s.config.train.optim != "adamw_torch_fused":
        yield Part("AdamW without its fused kernel", MOMENTS * trained, "8 Psi / P", (STEP,), away)


def _largest_part(weights: Iterable[int], ranks: int, size: int) -> int:
    """Return the elements of the largest part that DeepSpeed gives to a rank's optimizer at a time.

    A part ends with the first weight at which it reaches `size`.
    """
    largest = part = 0
    for weight in weights:
        part += ceil(weight / ranks)
        largest = max(largest, part)
        part = 0 if part >= size else part
    return largest


def _moving(s: Setting) -> Iterator[Part]:
    """Yield the parts that are temporarily whole on a rank."""
    b, weights, whole, trained = s.weight_bytes, s.shape.weights, s.shape.parameters, s.shape.trained
    reduced = s.zero["reduce_bucket_size"]
    bucket = FLOAT32 * min(sum(trained), reduced)
    if s.gpu:
        # deepspeed.initialize moves a model to its device before it divides it, whatever is offloaded later.
        size = b * (whole + sum(s.shape.adapters))
        yield Part("whole model, before sharding", size, "b Psi, for any number of ranks", (LOAD,))
    # torch.empty takes a GPU's memory at once, but host memory only where it is written.
    yield Part("gradient bucket", FLOAT32 * reduced if s.gpu else bucket, "4 reduce_bucket_size")
    scattered = bucket if s.zero["reduce_scatter"] else 0
    why = "4 Psi, at most reduce_bucket_size, with reduce_scatter"
    yield Part("bucket, sorted by rank", scattered, why, (REDUCE,))
    if not s.gpu:  # a gradient larger than the bucket is always scattered by itself
        largest = FLOAT32 * max(trained)
        sent = max(scattered, bucket if s.ranks > 1 else 0, largest if largest > bucket else 0)
        yield Part("bucket, within gloo", sent, f"{why} or ranks, or one larger weight", (REDUCE,))
    if _gathers(s):
        prefetch = s.zero["stage3_prefetch_bucket_size"]
        # Weights are fetched ahead in one piece, which stays until each weight has been cut out of it.
        ahead = b * min(prefetch, whole) * (s.ranks > 1)
        yield Part("weights fetched ahead", ahead, "b Psi, at most b prefetch_bucket_size", (UPDATE,))
        # A layer's weights stay from its forward to its backward if few enough elements pass in between.
        live = min(whole, s.zero["stage3_max_reuse_distance"] // 2 + prefetch + max(weights))
        yield Part("gathered weights", b * live, "b Psi, at most max_reuse_distance / 2", (UPDATE,))
        small = sum(size for size in weights if size <= s.zero["stage3_param_persistence_threshold"])
        yield Part("small weights", b * small, "kept whole: b each", (GENERATE, REDUCE, STEP))
        yield Part("weights sent to the generator", _sent(s), "b Psi, at most 256 MiB", (GENERATE,))


def _computed(s: Setting) -> Iterator[Part]:
    """Yield the memory of a micro-batch in forward and backward."""
    shape, train, b, n = s.shape, s.config.train, s.weight_bytes, s.positions
    # For its backward pass a layer saves for each of two norms the input, the normalised input and the output,
    # the first two in float32 for any b; then queries, keys, values and the output of attention; gate, its
    # activation, up, and their product.
    norms = 2 * shape.hidden * (3 * FLOAT32 if b == FLOAT32 else 2 * b + 6)
    layer = n * (norms + b * (2 * shape.queries + 2 * shape.keys + 4 * shape.intermediate))
    if train.gradient_checkpointing:
        saved, why = shape.layers * n * b * shape.hidden + layer, "N (b L H + one layer)"
    else:
        saved, why = shape.layers * layer, "N L (6 H + 2 Q + 2 K + 4 F) b"
    yield Part("activations", saved, why, (UPDATE,))
    # Each sum of a parameter and its adapter stays until its backward pass, which begins with its gradient.
    of_layer = shape.merged // shape.layers
    sums = b * ((of_layer if train.gradient_checkpointing else shape.merged) + of_layer)
    yield Part("parameters with their adapters", sums, "b each, with checkpoints 2 b of a layer", (UPDATE,))
    # Gradients of one layer, in addition to its saved tensors.
    passing = n * b * (4 * shape.hidden + 3 * max(shape.intermediate, shape.queries))
    yield Part("gradients of activations", passing, "N b (4 H + 3 F)", (UPDATE,))
    # A micro-batch of this many positions may contain only short prompts.
    tokens = n if s.budget else train.per_device_train_batch_size * s.config.sampling.max_completion_length
    logits = tokens * shape.vocabulary
    if train.chunked_logprobs:
        rows = rows_per_chunk(shape.vocabulary, LARGE_GPU if s.gpu else None)
        size, why = BYTES_PER_LOGIT * min(rows * shape.vocabulary, logits), "8 V for each row of a chunk"
    else:
        size, why = (b + 3 * FLOAT32) * logits, "(b + 12) V for each token of a completion"
    yield Part("logits", size, why, (UPDATE,))
    if not shape.adapters:
        yield Part("gradient of the head", FLOAT32 * shape.head, "4 V H", (UPDATE,))


def _generator(s: Setting) -> Iterator[Part]:
    shape, b, generator = s.shape, s.weight_bytes, s.generator
    if generator is None:
        return
    weights = b * shape.parameters
    # The policy's own memory serves as the copy if it is whole and on the same device.
    is_there = s.place(s.config.deepspeed.offload_param) == s.place("none")
    shares = generator.shares and s.ranks == 1 and is_there and not shape.adapters
    if generator.holds == "whole" and not shares:
        yield Part("copy of the policy that generates", weights, "b Psi")
    if generator.holds in ("whole", "shards"):
        length = s.prompt + s.config.sampling.max_completion_length
        cache = 2 * b * shape.keys * (shape.layers + 1) * s.sampled * length
        yield Part("keys and values", cache, "2 b K L for each position", (GENERATE,))
        samplings, evaluation = [s.config.sampling], s.config.evaluation
        if evaluation is not None:
            samplings.append(sampling_of(evaluation, s.config.sampling))
        each = max(map(score_bytes, samplings))
        size = each * shape.vocabulary * s.sampled
        yield Part("scores of the next token", size, f"{each} V each", (GENERATE,))
    if generator.blocks_from and not s.gpu and b == FLOAT32:
        blocks = FLOAT32 * sum(size for size in (*shape.linears, shape.head) if size >= generator.blocks_from)
        # Sampling begins after all weights have arrived.
        beyond = max(0, blocks - _sent(s))
        yield Part("linear layers in blocks", beyond, "4 for each weight, beyond those sent", (GENERATE,))
    if generator.holds == "engine":
        phases = (GENERATE,) if s.gpu else ALWAYS  # it sleeps while the policy is updated, on CUDA
        name, size = generator.engine, weights // generator.engine_ranks
        yield Part(f"{name}'s weights", size, "b Psi over the ranks of an engine", phases)
        yield Part(f"{name}'s keys and values", generator.cache or 0, generator.cache_key, phases)
    if s.gpu and generator.sends:
        # vLLM packs one bucket while another is being sent; it packs copies of gathered weights.
        bucket = max(generator.sends, b * max(shape.weights))
        size, why = (2 if s.ranks == 1 else 3) * bucket, "3 buckets, on a single rank 2"
        yield Part("weights packed for the servers", size, why, (GENERATE,))


def score_bytes(sampling: SamplingConfig) -> int:
    """Count the bytes of a score of the next token at its peak: its logit, and the results of the filters.

    `top_p` sorts: scores and indices of 64 bits, softmax, cumulated sums, and on CUDA a workspace.
    """
    if sampling.generation_kwargs:  # typical_p needs the most
        return 56
    if sampling.top_p < 1:
        return 40
    is_plain = not (sampling.top_k or sampling.min_p or sampling.min_completion_length)
    return 12 if is_plain and sampling.repetition_penalty == 1 else 24


def _gathers(s: Setting) -> bool:
    """Return True if weights must be gathered before they compute."""
    return s.ranks > 1 or (s.gpu and s.config.deepspeed.offload_param != "none")


def _sent(s: Setting) -> int:
    """Count the bytes of weights that are sent to the generator at a time."""
    has_shards = s.generator is not None and s.generator.holds == "shards"
    return min(SYNC, s.weight_bytes * s.shape.parameters) if _gathers(s) and not has_shards else 0


def _host(s: Setting) -> Iterator[Part]:
    """Yield the parts that are in host memory on any device."""
    weights, trained = s.weight_bytes * s.shape.parameters, _shard(s.shape.trained, s.ranks)
    yield Part("model, as it is loaded", weights, "b Psi: every rank loads it whole", (LOAD,), True)
    # DeepSpeed joins a rank's parts into one piece on the host.
    pieces = s.weight_bytes * _shard(s.shape.weights, s.ranks) * (1 if s.gpu else 2)
    yield Part("weights, while they are sharded", pieces, "b Psi / P, on a CPU twice", (LOAD,), True)
    if s.config.deepspeed.offload_optimizer == "cpu":
        # They are converted, and then cloned.
        yield Part("master weights, while they are created", FLOAT32 * trained, "4 Psi / P", (LOAD,), True)
    if s.reference:
        yield Part("reference, as it is loaded", weights, "b Psi", (LOAD,), True)
    if s.config.checkpoint.background:
        size = (s.weight_bytes + FLOAT32 + MOMENTS) * trained
        yield Part("checkpoint being written", size, "(b + 12) Psi / P", TRAINS, True)


def _shard(weights: Sequence[int], ranks: int) -> int:
    """Count the elements of a rank's shard."""
    return sum(ceil(size / ranks) for size in weights)
