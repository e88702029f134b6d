"""One optimizer step: micro-batches -> objective -> backward -> step, and the metrics of all three."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from grpox.config import RunConfig
from grpox.contracts import Correction, PolicyLoss
from grpox.errors import RunFailed
from grpox.policy.adapter_reference import BaseAsReference
from grpox.policy.engine import Engine, FrozenEngine
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.reference_sync import ReferenceSync
from grpox.runtime.world import World
from grpox.update.forward import ForwardPass, forward_pass, terms_of
from grpox.update.micro_batch import Slice
from grpox.update.mismatch import StepMismatch, mismatch_metrics
from grpox.update.nonfinite import NonFinitePolicy
from grpox.update.packing import Arrangement, Passes
from grpox.update.reduction import StepTotals, count_step
from grpox.update.step_loss import StepLoss
from grpox.update.token_masks import choose
from grpox.update.token_metrics import TokenMetrics


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
    ) -> None:
        """
        Args:
            nonfinite: what becomes of a step that is not finite; default: as the config says, keeping no batch.
        """
        self.engine = engine
        self.reference = reference
        self.step_loss = StepLoss.of(policy_loss, correction, config.train)
        self.top_entropy = config.train.top_entropy_quantile
        self.reference_sync = ReferenceSync(config.train) if config.train.sync_ref_model else None
        self.temperature = config.sampling.temperature
        self.max_completion_length = config.sampling.max_completion_length
        self.world = world
        self.nonfinite = nonfinite or NonFinitePolicy(config.train, world)
        self.arrangement = Arrangement.of(config.train, policy_loss, engine.ways)

    def score_old(self, slices: Sequence[Slice]) -> None:
        """Fix pi_old of slices that only later steps train on, before this step moves the policy.

        The slices of this step need no forward of their own for it: `step` keeps what it computes anyway.
        """
        unknown = [slice_ for slice_ in slices if slice_.old_logprobs is None]
        if not unknown:
            return
        passes = self.arrangement.passes(unknown, self.world, teach=False)
        for each in passes.passes:
            each.slice.old_logprobs = self._logprobs(self.engine, each.slice)
        passes.keep()

    def step(self, slices: Sequence[Slice]) -> dict[str, float]:
        """Take one optimizer step on this rank's micro-batches; a collective.

        Where the loss or the gradient is not finite the step is not taken: weights, optimizer states and
        learning-rate schedule stay as they are, on all ranks.

        Returns:
            metrics over the micro-batches of all ranks; of a step that was not taken the finite ones.

        Raises:
            RunFailed: the step was not taken, and the run should end; or the weights are not finite after it.
        """
        totals = count_step((s.batch.token_mask for s in slices), self.world, self.max_completion_length)
        chosen = self._choose_tokens(slices)
        passes = self.arrangement.passes(slices, self.world)
        metrics = TokenMetrics()
        loss, terms = self._gradient(passes, totals, metrics)
        total_loss = float(self.world.reduce(loss, dist.ReduceOp.SUM))
        measured = {"loss": total_loss, "learning_rate": self.engine.learning_rate}
        measured["grad_norm"] = grad_norm = self._step(total_loss)
        measured |= _named(metrics.reduce(self.world)) | chosen | {"padding_fraction": passes.padding_fraction}
        if math.isfinite(grad_norm):
            passes.keep()
            self.nonfinite.taken()
        else:
            passes.keep(["reference_logprobs"])  # no matter of this step, and a replay lacks the model
            what = f"the loss is {total_loss}"
            what = "the gradient is not finite" if math.isfinite(total_loss) else what
            self.nonfinite.not_taken(self.engine.steps, what, slices, _spread(passes, terms))
            measured = {name: value for name, value in measured.items() if math.isfinite(value)}
        for slice_ in slices:
            slice_.policy_keep = None
        if self.reference_sync is not None and isinstance(self.reference, FrozenEngine):
            self.reference_sync.after_step(self.engine, self.reference)
        return measured | self.nonfinite.metrics()

    def _choose_tokens(self, slices: Sequence[Slice]) -> dict[str, float]:
        """Where not all tokens of a step make up its policy loss, tell the slices which do; a collective."""
        if self.top_entropy == 1:
            return {}
        passes = self.arrangement.passes(slices, self.world, teach=False)
        entropies = passes.spread([self._scored(self.engine, each.slice)[1] for each in passes.passes])
        masks = [slice_.batch.token_mask for slice_ in slices]
        chosen = choose(entropies, masks, self.top_entropy, self.world)
        for slice_, keep in zip(slices, chosen.keep, strict=True):
            slice_.policy_keep = keep
        return chosen.metrics

    def _gradient(
        self, passes: Passes, totals: StepTotals, metrics: TokenMetrics
    ) -> tuple[Tensor, list[Mapping[str, Tensor]]]:
        """Accumulate the step's gradient; this rank's part of the loss, f64, and the terms of each pass."""
        loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        terms, mismatch = [], StepMismatch(self.step_loss.correction)
        for place, each in enumerate(passes.passes, start=1):
            if each.teaches:
                self.engine.begin_micro_batch(last=place == len(passes.passes))
            with torch.set_grad_enabled(each.teaches):
                passed = self._forward(each.slice, totals, metrics, mismatch)
            if each.teaches:
                self.engine.backward(passed.output.loss)
            loss += passed.output.loss.detach()
            terms.append(terms_of(each.slice, passed))
        mismatch.add_to(metrics)
        return loss, terms

    def _step(self, loss: float) -> float:
        """Take the step if `loss` is finite; returns the gradient's norm, infinite if it was not taken."""
        if math.isfinite(loss):
            grad_norm = self.engine.step()
            if not self.engine.finite():
                raise RunFailed(
                    f"the optimizer made weights that are not finite in step {self.engine.steps}, of a "
                    f"gradient of norm {grad_norm:.4g}; they are not saved. Is train.learning_rate too large?"
                )
            return grad_norm
        self.engine.discard()
        return math.inf

    def _forward(
        self, slice_: Slice, totals: StepTotals, metrics: TokenMetrics, mismatch: StepMismatch
    ) -> ForwardPass:
        """Forward of one micro-batch, measured."""
        batch = slice_.batch
        if self.reference is not None and slice_.reference_logprobs is None:
            slice_.reference_logprobs = self._logprobs(self.reference, slice_)
        passed = forward_pass(self.engine, slice_, self.step_loss, totals, self.temperature, self.engine.ways)
        mismatch.add(passed.output.corrected, batch)
        metrics.add_micro_batch({**passed.output.diagnostics, "entropy": passed.entropy}, batch.token_mask)
        if (near := passed.output.off_policy_keep) is not None:
            left_out = (batch.token_mask & ~near).any(dim=1, keepdim=True)
            metrics.add({"off_policy_masked": left_out}, batch.token_mask.any(dim=1, keepdim=True))
        return passed

    def _logprobs(self, model: Engine | FrozenEngine | BaseAsReference, slice_: Slice) -> Tensor:
        return self._scored(model, slice_)[0]

    @torch.no_grad()
    def _scored(self, model: Engine | FrozenEngine | BaseAsReference, slice_: Slice) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, f32[B, T] each."""
        return completion_logprobs(model, slice_.batch, self.temperature, model.ways)


def _spread(passes: Passes, terms: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The terms of each slice of the step, out of those of its passes."""
    names = dict.fromkeys(name for each in terms for name in each)
    spread = {name: passes.spread([each.get(name) for each in terms]) for name in names}
    return [{name: spread[name][place] for name in names} for place in range(len(passes.slices))]


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
