"""One optimizer step: samples -> micro-batches -> objective -> backward -> step, and the metrics of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpox.config import RunConfig
from grpox.config.alarms import CHANGED, GROWTH, LIVE, NORM_BEFORE
from grpox.contracts import Correction, PolicyLoss
from grpox.errors import RunFailed
from grpox.policy.batch import PackedBatch, Sample, collate
from grpox.policy.engine import Engine, FrozenEngine
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.reference import BaseAsReference, sync_reference
from grpox.policy.routers import RouterBalance
from grpox.runtime.world import World
from grpox.update.entropy_control import EntropyControl
from grpox.update.nonfinite import NonFinitePolicy
from grpox.update.objective import MicroBatchLoss, StepLoss, build_inputs
from grpox.update.packing import MicroBatchPacker, StepTotals, count_step
from grpox.update.step_statistics import StepStatistics
from grpox.update.token_masks import choose
from grpox.update.token_metrics import Passes, TokenFacts, measure, metrics_of, read_together

MicroBatches = Sequence[Sequence[Sample]]
"""This rank's samples, by micro-batch of the schedule."""


class PolicyUpdate:
    """Takes optimizer steps with the run's loss, correction and reference."""

    def __init__(
        self,
        engine: Engine,
        reference: FrozenEngine | BaseAsReference | None,
        policy_loss: PolicyLoss,
        correction: Correction,
        config: RunConfig,
        world: World,
        nonfinite: NonFinitePolicy | None = None,
        needs: Collection[str] = (),
        statistics: StepStatistics | None = None,
    ) -> None:
        """
        Args:
            needs: capabilities that the loss needs.
            nonfinite: handles steps that are not finite; default: as the config says, without saving batches.
            statistics: records the values of tokens that components ask for; default: none.
        """
        self.engine = engine
        self.reference = reference
        self.step_loss = StepLoss.of(policy_loss, correction, config.train, needs)
        adaptive, start = config.train.adaptive_entropy, config.train.entropy_coef
        self.entropy_control = None if adaptive is None else EntropyControl(adaptive, start)
        """Sets the weight of the entropy bonus before each step; None: it is constant."""
        self.top_entropy = config.train.top_entropy_quantile
        self.reference_sync = config.train if config.train.sync_ref_model else None
        """Settings of a reference that follows the policy; None: it does not."""
        self.temperature = config.sampling.temperature
        self.max_completion_length = config.sampling.max_completion_length
        self.world = world
        self.nonfinite = nonfinite or NonFinitePolicy(config.train, world)
        self.statistics = statistics or StepStatistics({})
        self.token_facts: list[TokenFacts] = []
        """Tokens of this rank's samples to record, of the last step."""
        self._has_stepped = False
        is_watched = config.alarms is not None and config.alarms.weights_blown_up is not None
        # The norm of A and B says nothing: B is 0 at first, and the weights get their product.
        self._measures_growth = is_watched and engine.is_adapted
        coefficient = config.train.router_aux_loss_coef
        self.routers = RouterBalance(engine.module, coefficient) if coefficient else None
        self.packer = MicroBatchPacker.of(config.train, self.step_loss.traits, engine.mode)

    def score_old(self, micro_batches: MicroBatches) -> None:
        """Compute pi_old of samples that only later steps train on, before this step changes the policy.

        It also scores a reference that follows the policy, so that a whole generation batch has the same one.
        Samples of this step need no forward of their own: `step` keeps what it computes anyway.
        """
        models: dict[str, Engine | FrozenEngine | BaseAsReference] = {"old_logprobs": self.engine}
        if self.reference_sync is not None and self.reference is not None:
            models["reference_logprobs"] = self.reference
        for name, model in models.items():
            unknown = [rows for rows in micro_batches if any(getattr(row, name) is None for row in rows)]
            packed = self.packer.pack(unknown, self.world, backward=False)[0] if unknown else []
            for samples, _ in packed:
                batch = collate(samples, self.world.device, model.mode)
                keep_logprobs(batch, self._score(model, batch)[0], name)

    def step(self, micro_batches: MicroBatches) -> dict[str, float]:
        """Take one optimizer step on this rank's micro-batches; a collective.

        If the loss or the gradient is not finite, the step is not taken: weights, optimizer states and
        learning-rate schedule stay as they are, on all ranks.

        Returns:
            metrics over the micro-batches of all ranks; only the finite ones if the step was not taken.

        Raises:
            RunFailed: the step was not taken, and the run should end; or the weights are not finite after it.
        """
        if self.entropy_control is not None:
            self.step_loss = replace(self.step_loss, entropy_coef=self.entropy_control.weight)
        masks = ([sample.token_mask for sample in samples] for samples in micro_batches)
        totals = count_step(masks, self.world, self.max_completion_length)
        of_choice = self._choose_tokens(micro_batches)
        packed, padding = self.packer.pack(micro_batches, self.world)
        passes = self._gradient(packed, totals)
        metrics = self._take(passes, micro_batches) | of_choice | {"padding_fraction": padding}
        if math.isfinite(metrics["grad_norm"]):
            for batch, result in passes:
                keep_logprobs(batch, result.inputs.logprobs)
            self.nonfinite.on_step_applied()
            if self.entropy_control is not None and "entropy" in metrics:  # a step without tokens has none
                self.entropy_control.see(metrics["entropy"])
        else:
            coefficients = {"beta": self.step_loss.beta, "entropy_coef": self.step_loss.entropy_coef}
            self.nonfinite.on_step_skipped(
                self.engine.steps, metrics["loss"], micro_batches, passes, coefficients
            )
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        if self.top_entropy != 1:
            for sample in chain.from_iterable(micro_batches):
                sample.policy_keep = None
        if self.reference_sync is not None and isinstance(self.reference, FrozenEngine):
            sync_reference(self.engine, self.reference, self.reference_sync)
        if self.entropy_control is not None:
            metrics["adaptive_entropy/coef"] = self.entropy_control.state.coefficient
        return metrics | self.nonfinite.metrics()

    def _choose_tokens(self, micro_batches: MicroBatches) -> dict[str, float]:
        """Choose the tokens of a step's policy loss, unless all of them count; a collective."""
        if self.top_entropy == 1:
            return {}
        packed, _ = self.packer.pack(micro_batches, self.world, backward=False)
        batches = [self._collate(samples) for samples, _ in packed]
        entropies = [self._score(self.engine, batch)[1] for batch in batches]
        places = [batch.token_places for batch in batches]
        chosen, metrics = choose(entropies, places, self.top_entropy, self.world)
        for batch, keep in zip(batches, chosen, strict=True):
            for sample, row in zip(batch.samples, batch.cut(keep), strict=True):
                sample.policy_keep = row
        return metrics

    def _gradient(self, packed: Sequence[tuple[Sequence[Sample], bool]], totals: StepTotals) -> Passes:
        """Accumulate the step's gradient over micro-batches, each with True if it needs a backward pass."""
        passes = []
        # For all samples or for none: the reference's forward is a collective, and ranks pack differently.
        lacks_reference = self.reference is not None and any(
            sample.reference_logprobs is None for samples, _ in packed for sample in samples
        )
        following = self._collate(packed[0][0])
        for place, (_, needs_backward) in enumerate(packed, start=1):
            batch = following
            if needs_backward:
                self.engine.begin_micro_batch(last=place == len(packed))
            if self.reference is not None and lacks_reference:
                keep_logprobs(batch, self._score(self.reference, batch)[0], "reference_logprobs")
            with torch.set_grad_enabled(needs_backward):
                result = forward_pass(
                    self.engine, batch, self.step_loss, totals, self.temperature, self.routers
                )
            if place < len(packed):
                # While the device computes this pass: DeepSpeed has the host wait at the end of each backward.
                following = self._collate(packed[place][0])
            if needs_backward:
                self.engine.backward(result.loss)
            passes.append((batch, result.detached()))
        return passes

    def _take(self, passes: Passes, micro_batches: MicroBatches) -> dict[str, float]:
        """Take the step whose gradient `passes` made, and measure it; a collective."""
        requested = self.statistics.names(passes) if self.statistics.wanted else ()
        shares = loss_shares(passes)
        # Masked samples count too: an alarm reports if nothing of them is left.
        live = sum([bool(np.any(sample.advantage != 0)) for sample in chain.from_iterable(micro_batches)])
        own = torch.cat([*shares.values(), shares["loss"].new_full((1,), live)])
        sums = self.world.reduce(own, dist.ReduceOp.SUM)
        learning_rate = self.engine.learning_rate
        applied = self._apply(sums[0])  # the loss, the first of the shares
        measures = measure(passes, self.step_loss.correction, requested)
        # The host waits for the device here, and nowhere else in a step whose tokens all count.
        sums, applied, of_tokens, facts, of_statistics = read_together(
            [sums, applied, measures.metrics.reduce(self.world), measures.facts, measures.requested]
        )
        metrics = dict(zip((*shares, LIVE), sums.tolist(), strict=True)) | {"learning_rate": learning_rate}
        loss, weight = metrics["loss"], self.step_loss.entropy_coef
        if weight or self.entropy_control is not None:
            # The policy term is the whole loss where it has no other.
            metrics |= {"entropy_coef": weight, "policy_loss": metrics.get("policy_loss", loss)}
        self.token_facts = measures.facts_of(facts)
        if requested:
            self.statistics.record(requested, passes, of_statistics)
        return metrics | self._applied(loss, applied.tolist()) | metrics_of(measures.metrics.named(of_tokens))

    def _apply(self, loss: Tensor) -> Tensor:
        """Take the step if `loss`, f64[], and the gradient are finite, without reading a value.

        Returns:
            f64[4 or 5]: the gradient's norm, infinite if the step was not taken; the result of
            `Engine.measure_weights`; then, with watched adapters, that of `Engine.measure_growth`, or else,
            until a step is taken, the squared norm of the weights before it.
        """
        has_first = not self._has_stepped and not self._measures_growth
        first = [self.engine.measure_weights()[:1]] if has_first else []
        before = self.engine.sample_weights()
        norm = self.engine.step(loss)
        growth = [self.engine.measure_growth()] if self._measures_growth else []
        return torch.cat((norm.reshape(1), self.engine.measure_weights(before), *first, *growth))

    def _applied(self, loss: float, numbers: Sequence[float]) -> dict[str, float]:
        """Name the result of `_apply`: the gradient's norm and, for a finite loss, the measures of the weights.

        `grpox.config.alarms.OF_UPDATE` are among these.
        """
        if not math.isfinite(loss):
            return {"grad_norm": math.inf}
        grad_norm, square, sampled, changed, *further = numbers
        self._has_stepped = True
        name = GROWTH if self._measures_growth else NORM_BEFORE
        measured = dict(zip([name], map(math.sqrt, further), strict=False))
        if not math.isfinite(square):
            raise RunFailed(
                f"the optimizer made weights that are not finite in step {self.engine.steps}, of a "
                f"gradient of norm {grad_norm:.4g}; they are not saved. Is train.learning_rate too large?"
            )
        measured |= {"grad_norm": grad_norm, "weights/norm": math.sqrt(square)}
        if sampled:
            measured[CHANGED] = changed
        return measured

    def _collate(self, samples: Sequence[Sample]) -> PackedBatch:
        return collate(samples, self.world.device, self.engine.mode)

    @torch.no_grad()
    def _score(
        self, model: Engine | FrozenEngine | BaseAsReference, batch: PackedBatch
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities and entropies, f32[B, T] each."""
        if model.mode != batch.mode:  # the reference is another model
            batch = collate(batch.samples, self.world.device, model.mode)
        return completion_logprobs(model, batch, self.temperature)


def keep_logprobs(batch: PackedBatch, logprobs: Tensor, name: str = "old_logprobs") -> None:
    """Keep `logprobs`, f32[B, T], as the attribute `name` of the samples that have none."""
    for sample, row in zip(batch.samples, batch.cut(logprobs), strict=True):
        if getattr(sample, name) is None:
            setattr(sample, name, row)


def forward_pass(
    model: Callable[..., Any],
    batch: PackedBatch,
    step_loss: StepLoss,
    totals: StepTotals,
    temperature: float,
    routers: RouterBalance | None = None,
) -> MicroBatchLoss:
    """Run `model` on a micro-batch and compute its share of the step's loss.

    Args:
        routers: adds the load-balancing loss of the model.
    """
    with nullcontext() if routers is None else routers.recording():
        logprobs, entropy = completion_logprobs(model, batch, temperature, step_loss.entropy_gradient)
    known = map(attrgetter("old_logprobs", "reference_logprobs", "policy_keep"), batch.samples)
    old, reference, policy_keep = zip(*known, strict=True)
    inputs = build_inputs(
        logprobs,
        batch.token_mask,
        batch.advantages,
        batch.pad_known(old, logprobs.detach()),
        batch.sampler_logprobs,
        batch.pad_known(reference),
        entropy,
        rewards=batch.rewards,
        group_ids=batch.ids("group_id"),
        sequence_ids=batch.ids("sequence_id"),
        columns=batch.columns,
    )
    if logprobs.requires_grad:
        inputs.logprobs.retain_grad()  # shows the token at which the derivative is not finite
    result = step_loss.micro_batch(inputs, totals, batch.sampler_logprobs, batch.pad_known(policy_keep))
    if routers is None:
        return result
    return result.with_routers(routers.take(batch), routers.coefficient, totals)


def loss_shares(passes: Passes) -> dict[str, Tensor]:
    """Sum this rank's part of a step's loss: metric -> f64[1], the loss first.

    A loss with several terms also has the parts of its policy term and of its load-balancing loss.
    """
    nothing = torch.zeros(1, dtype=torch.float64, device=passes[0][1].loss.device)
    shares: dict[str, Tensor] = {}
    for _, result in passes:
        own = {
            "loss": result.loss,
            "policy_loss": result.policy_share,
            "router_aux_loss": result.router_share,
        }
        for name, share in own.items():
            if share is not None:
                shares[name] = shares.get(name, nothing) + share
    return shares
