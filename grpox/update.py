"""One optimizer step: micro-batches -> objective -> backward -> step, and the metrics of all three."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from grpox.config import RunConfig
from grpox.contracts import Correction, PolicyLoss
from grpox.engine import Engine, FrozenEngine
from grpox.errors import RunFailed
from grpox.logprobs import completion_logprobs
from grpox.metrics import TokenMetrics
from grpox.mismatch import add_mismatch, mismatch_metrics
from grpox.reduction import StepTotals, count_step
from grpox.reference_sync import ReferenceSync
from grpox.rollout import RolloutBatch
from grpox.step_loss import MicroBatchInputs, StepLoss
from grpox.world import World


@dataclass(eq=False)
class Slice:
    """This rank's rows of one micro-batch, with log-probabilities kept for the later passes over it."""

    batch: RolloutBatch
    old_logprobs: Tensor | None = None
    """f32[B, T] under the policy that began this generation batch's updates; None while no update was made."""
    reference_logprobs: Tensor | None = None
    """f32[B, T] under the reference; None while not needed."""


class PolicyUpdate:
    """Takes optimizer steps with the run's loss, correction and reference."""

    def __init__(
        self,
        engine: Engine,
        reference: FrozenEngine | None,
        policy_loss: PolicyLoss,
        correction: Correction,
        config: RunConfig,
        world: World,
    ) -> None:
        self.engine = engine
        self.reference = reference
        self.step_loss = StepLoss(policy_loss, correction, config.train.beta, config.train.kl)
        self.reference_sync = ReferenceSync(config.train) if config.train.sync_ref_model else None
        self.temperature = config.sampling.temperature
        self.max_completion_length = config.sampling.max_completion_length
        self.world = world

    def score_old(self, slices: Iterable[Slice]) -> None:
        """Fix pi_old of slices that only later steps train on, before this step moves the policy.

        The slices of this step need no forward of their own for it: `step` keeps what it computes anyway.
        """
        for slice_ in slices:
            if slice_.old_logprobs is None:
                slice_.old_logprobs = self._logprobs(self.engine, slice_.batch)

    def step(self, slices: Sequence[Slice]) -> dict[str, float]:
        """Take one optimizer step on this rank's micro-batches; a collective.

        Returns:
            metrics over the micro-batches of all ranks.

        Raises:
            RunFailed: the loss is not finite (the weights are then still good), or the gradient's norm.
        """
        totals = count_step((s.batch.token_mask for s in slices), self.world, self.max_completion_length)
        metrics = TokenMetrics()
        loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for place, slice_ in enumerate(slices, start=1):
            self.engine.begin_micro_batch(last=place == len(slices))
            micro_loss = self._micro_batch(slice_, totals, metrics)
            self.engine.backward(micro_loss)
            loss += micro_loss.detach()
        total_loss = float(self.world.reduce(loss, dist.ReduceOp.SUM))
        if not math.isfinite(total_loss):
            raise RunFailed(f"the loss of step {self.engine.steps + 1} is {total_loss}")
        learning_rate = self.engine.learning_rate
        grad_norm = self.engine.step()
        if not math.isfinite(grad_norm):
            raise RunFailed(f"the gradient norm of step {self.engine.steps} is {grad_norm}")
        if self.reference_sync is not None and self.reference is not None:
            self.reference_sync.after_step(self.engine, self.reference)
        return {
            "loss": total_loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            **_named(metrics.reduce(self.world)),
        }

    def _micro_batch(self, slice_: Slice, totals: StepTotals, metrics: TokenMetrics) -> Tensor:
        """Forward of one micro-batch: its share of the step's loss."""
        batch = slice_.batch
        if self.reference is not None and slice_.reference_logprobs is None:
            slice_.reference_logprobs = self._logprobs(self.reference, batch)
        logprobs, entropy = completion_logprobs(self.engine, batch, self.temperature)
        updated = slice_.old_logprobs is not None
        if slice_.old_logprobs is None:
            slice_.old_logprobs = logprobs.detach()
        output = self.step_loss.micro_batch(
            MicroBatchInputs(
                logprobs=logprobs,
                token_mask=batch.token_mask,
                advantages=batch.advantages,
                old_logprobs=slice_.old_logprobs if updated else None,
                sampler_logprobs=batch.sampler_logprobs,
                reference_logprobs=slice_.reference_logprobs,
                entropy=entropy,
            ),
            totals,
        )
        made = output.corrected
        add_mismatch(metrics, self.step_loss.correction, made.old, made.sampler, made.weights, made.keep, batch)
        metrics.add("entropy", entropy, batch.token_mask)
        for name, values in output.diagnostics.items():
            metrics.add_micro_batch(name, values, batch.token_mask)
        return output.loss

    @torch.no_grad()
    def _logprobs(self, model: Engine | FrozenEngine, batch: RolloutBatch) -> Tensor:
        return completion_logprobs(model, batch, self.temperature)[0]


def _named(reduced: dict[str, tuple[float, float, float]]) -> dict[str, float]:
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
