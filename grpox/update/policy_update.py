"""One optimizer step: samples -> micro-batches -> objective -> backward -> step, and the metrics of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
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
from grpox.update.mismatch import mismatch_metrics, mismatch_of
from grpox.update.nonfinite import NonFinitePolicy, Row
from grpox.update.objective import MicroBatchInputs, MicroBatchLoss, StepLoss
from grpox.update.packing import MicroBatchPacker, StepTotals, count_step
from grpox.update.step_statistics import StepStatistics
from grpox.update.token_facts import TokenFacts, facts_of, select_facts
from grpox.update.token_masks import choose
from grpox.update.token_metrics import TokenMetrics, read_together

MicroBatches = Sequence[Sequence[Sample]]
"""This rank's samples, by micro-batch of the schedule."""
Scored = tuple[PackedBatch, MicroBatchLoss]
"""A micro-batch as it went through the model, and its share of the step's loss."""


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
            nonfinite: what becomes of a step that is not finite; default: as the config says, keeping no batch.
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
        # The norm of A and B tells nothing: B is 0 at first, and the weights get their product.
        self._measures_growth = is_watched and engine.is_adapted
        coefficient = config.train.router_aux_loss_coef
        self.routers = RouterBalance(engine.module, coefficient) if coefficient else None
        self.packer = MicroBatchPacker.of(config.train, self.step_loss.traits, engine.mode)

    def score_old(self, micro_batches: MicroBatches) -> None:
        """Fix pi_old of samples that only later steps train on, before this step moves the policy.

        So is a reference that follows the policy: all samples of a generation batch have the same one. The
        samples of this step need no forward of their own for it: `step` keeps what it computes anyway.
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

        Where the loss or the gradient is not finite the step is not taken: weights, optimizer states and
        learning-rate schedule stay as they are, on all ranks.

        Returns:
            metrics over the micro-batches of all ranks; of a step that was not taken the finite ones.

        Raises:
            RunFailed: the step was not taken, and the run should end; or the weights are not finite after it.
        """
        if self.entropy_control is not None:
            self.step_loss = replace(self.step_loss, entropy_coef=self.entropy_control.weight)
        masks = ([sample.token_mask for sample in samples] for samples in micro_batches)
        totals = count_step(masks, self.world, self.max_completion_length)
        chosen = self._choose_tokens(micro_batches)
        packed, padding = self.packer.pack(micro_batches, self.world)
        scored = self._gradient(packed, totals)
        selected = self.statistics.select(scored) if self.statistics.wanted else None
        shares = loss_shares(scored)
        # Also of masked samples: an alarm tells if nothing of them is left.
        live = sum(bool(np.any(sample.advantage != 0)) for samples in micro_batches for sample in samples)
        own = torch.cat([*shares.values(), shares["loss"].new_full((1,), live)])
        summed = self.world.reduce(own, dist.ReduceOp.SUM)
        learning_rate = self.engine.learning_rate
        applied = self._apply(summed[0])  # the loss, the first of the shares
        measured = measure(scored, self.step_loss.correction)
        # The host waits for the device here, and nowhere else in a step whose tokens all count.
        summed, applied, of_tokens, facts, of_components = read_together(
            [summed, applied, measured.reduce(self.world), select_facts(scored), selected]
        )
        *losses, live = summed.tolist()
        metrics = dict(zip(shares, losses, strict=True)) | {LIVE: live, "learning_rate": learning_rate}
        loss = metrics["loss"]
        if (weight := self.step_loss.entropy_coef) or self.entropy_control is not None:
            # The policy term is the whole loss where it has no other.
            metrics |= {"entropy_coef": weight, "policy_loss": metrics.get("policy_loss", loss)}
        metrics |= self._applied(loss, applied.tolist())
        grad_norm = metrics["grad_norm"]
        metrics |= _name(measured.named(of_tokens)) | chosen | {"padding_fraction": padding}
        self.token_facts = facts_of(scored, facts)
        if selected is not None:
            self.statistics.record(scored, of_components)
        if math.isfinite(grad_norm):
            for batch, result in scored:
                keep_logprobs(batch, result.inputs.logprobs)
            self.nonfinite.on_step_applied()
            if self.entropy_control is not None and "entropy" in metrics:  # a step without tokens has none
                self.entropy_control.see(metrics["entropy"])
        else:
            what = "the gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
            of_sample: dict[int, Row] = {}
            for batch, result in scored:
                of_batch = zip(batch.samples, batch.rows(result.terms()), strict=True)
                of_sample |= {id(sample): row for sample, row in of_batch}
            rows = [[of_sample[id(sample)] for sample in samples] for samples in micro_batches]
            coefficients = {"beta": self.step_loss.beta, "entropy_coef": self.step_loss.entropy_coef}
            self.nonfinite.on_step_skipped(self.engine.steps, what, micro_batches, rows, coefficients)
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for sample in (sample for samples in micro_batches for sample in samples):
            sample.policy_keep = None
        if self.reference_sync is not None and isinstance(self.reference, FrozenEngine):
            sync_reference(self.engine, self.reference, self.reference_sync)
        if self.entropy_control is not None:
            metrics["adaptive_entropy/coef"] = self.entropy_control.state.coefficient
        return metrics | self.nonfinite.metrics()

    def _choose_tokens(self, micro_batches: MicroBatches) -> dict[str, float]:
        """Mark the tokens that make up the policy loss of a step, where not all do; a collective."""
        if self.top_entropy == 1:
            return {}
        packed, _ = self.packer.pack(micro_batches, self.world, backward=False)
        batches = [self._collate(samples) for samples, _ in packed]
        entropies = [self._score(self.engine, batch)[1] for batch in batches]
        places = [batch.token_places for batch in batches]
        chosen = choose(entropies, places, self.top_entropy, self.world)
        for batch, keep in zip(batches, chosen.keep, strict=True):
            for sample, row in zip(batch.samples, batch.cut(keep), strict=True):
                sample.policy_keep = row
        return chosen.metrics

    def _gradient(self, packed: Sequence[tuple[Sequence[Sample], bool]], totals: StepTotals) -> list[Scored]:
        """Accumulate the step's gradient over micro-batches, each with True if it needs a backward pass."""
        scored = []
        # Of all samples or of none: the reference's forward is a collective, and ranks pack in their own ways.
        lacks_reference = any(s.reference_logprobs is None for samples, _ in packed for s in samples)
        following = self._collate(packed[0][0])
        for place, (_, needs_backward) in enumerate(packed, start=1):
            batch = following
            if needs_backward:
                self.engine.begin_micro_batch(last=place == len(packed))
            if lacks_reference and self.reference is not None:
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
            scored.append((batch, result.detached()))
        return scored

    def _apply(self, loss: Tensor) -> Tensor:
        """Take the step if `loss`, f64[], and the gradient are finite, without reading a value.

        Returns:
            f64[4 or 5]: the gradient's norm, infinite if the step was not taken; what `Engine.measure_weights`
            returns; then with watched adapters that of `Engine.measure_growth`, and else until a step is taken
            the squared norm of the weights before.
        """
        has_first = not self._has_stepped and not self._measures_growth
        first = [self.engine.measure_weights()[:1]] if has_first else []
        before = self.engine.sample_weights()
        norm = self.engine.step(loss)
        growth = [self.engine.measure_growth()] if self._measures_growth else []
        return torch.cat((norm.reshape(1), self.engine.measure_weights(before), *first, *growth))

    def _applied(self, loss: float, numbers: Sequence[float]) -> dict[str, float]:
        """Name the result of `_apply`: the gradient's norm, and of a finite loss the measures of weights.

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
        if model.mode != batch.mode:  # of a reference that is another model
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
    if logprobs.requires_grad:
        logprobs.retain_grad()  # where a loss has no finite derivative, this tells the token
    inputs = MicroBatchInputs(
        logprobs=logprobs,
        token_mask=batch.token_mask,
        token_places=batch.token_places,
        advantages=batch.advantages,
        old_logprobs=batch.pad_known([s.old_logprobs for s in batch.samples], logprobs.detach()),
        sampler_logprobs=batch.sampler_logprobs,
        reference_logprobs=batch.pad_known([s.reference_logprobs for s in batch.samples]),
        entropy=entropy,
        policy_keep=batch.pad_known([s.policy_keep for s in batch.samples]),
        rewards=batch.rewards,
        group_ids=batch.ids("group_id"),
        sequence_ids=batch.ids("sequence_id"),
        columns=batch.columns,
    )
    result = step_loss.micro_batch(inputs, totals)
    if routers is None:
        return result
    return result.with_routers(routers.take(batch), routers.coefficient, totals)


def loss_shares(scored: Sequence[Scored]) -> dict[str, Tensor]:
    """Sum this rank's part of a step's loss: metric -> f64[1].

    A loss of several terms also has that of its policy term, and of its load-balancing loss.
    """
    results = [result for _, result in scored]
    shares = {
        "loss": [result.loss for result in results],
        "policy_loss": [result.policy_share for result in results if result.policy_share is not None],
        "router_aux_loss": [result.router_share for result in results if result.router_share is not None],
    }
    nothing = torch.zeros(1, dtype=torch.float64, device=results[0].loss.device)
    return {name: sum(values, nothing) for name, values in shares.items() if values}


def measure(scored: Sequence[Scored], correction: Correction) -> TokenMetrics:
    """Measure a step's tokens on this rank, without reading a value."""
    metrics = TokenMetrics()
    for batch, result in scored:
        assert result.inputs.entropy is not None
        of_tokens = {n: each for n, each in result.diagnostics.items() if n not in result.of_sequences}
        metrics.add({**of_tokens, "entropy": result.inputs.entropy}, batch.token_places, of_means=True)
        if result.of_sequences:
            metrics.add(result.of_sequences, batch.trained_rows, of_means=True)
        if (near := result.off_policy_keep) is not None:
            left_out = (batch.token_mask & ~near).any(dim=1)
            metrics.add({"off_policy_masked": left_out}, batch.trained_rows)
    metrics.add(mismatch_of([result for _, result in scored], correction))
    return metrics


def _name(reduced: dict[str, tuple[float, float, float]]) -> dict[str, float]:
    """Names as TRL has them: a bare name for means, `_mean`, `_min` and `_max` below a slash."""
    metrics = mismatch_metrics(reduced)
    for name, (mean, low, high) in reduced.items():
        if "/" in name:
            metrics |= {f"{name}_mean": mean, f"{name}_min": low, f"{name}_max": high}
        elif name == "ratio":
            metrics |= {"ratio/mean": mean, "ratio/min": low, "ratio/max": high}
        else:
            metrics[name] = mean
    return metrics
