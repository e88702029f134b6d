"""The report of a step to the observers: metrics of update, sampling, speed, memory and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpox.checkpoint.progress import TrainingState
from grpox.contracts import RunContext
from grpox.observing.control import RunControl
from grpox.observing.observers import Observers
from grpox.policy.batch import Sample
from grpox.rollout.collector import Collector, GenerationBatch
from grpox.rollout.metrics import mean_metrics, model_length
from grpox.rollout.rewards.scoring import mean_logged, with_logged
from grpox.runtime.logs import WarnOnce
from grpox.update.mismatch import mismatch_warnings


@dataclass
class StepReport:
    """Calls the observers at each step, and warns of metrics out of their healthy range.

    Args:
        control: for observers that act on the run.
        logprobs_promised: True if the generator declares that it reports every log-probability.
    """

    context: RunContext
    state: TrainingState
    collector: Collector
    observers: Observers
    warn: WarnOnce
    is_main: bool
    control: RunControl | None = None
    logprobs_promised: bool = False

    def rollouts_scored(self, step: int, batches: Sequence[GenerationBatch]) -> None:
        """Report the generation batches that were collected for `step`."""
        for batch in batches if self.is_main else ():
            self.observers.rollouts_scored(self.context, step, self.collector.scored(batch))

    def step_finished(
        self,
        step: int,
        epoch: float,
        new: Sequence[GenerationBatch],
        micro_batches: Sequence[Sequence[Sample]],
        update: Mapping[str, float],
        seconds: float,
    ) -> None:
        """Report a finished step.

        Args:
            new: generation batches collected for the step.
            micro_batches: this rank's samples of the step.
            update: the metrics of `PolicyUpdate.step`.
            seconds: duration of the whole step on this rank.
        """
        phases = self.collector.sampler.times
        times, peak = phases.take(), phases.memory.take()
        for batch in new:
            self.state.num_tokens += sum(len(r.prompt_ids) + len(r.completion_ids) for r in batch.rollouts)
        if not self.is_main:
            return
        tokens = sum(len(sample) for samples in micro_batches for sample in samples)
        own = {
            **update,
            **mean_metrics([self.collector.metrics(batch) for batch in new]),
            **times,
            "step_time": seconds,
            "tokens_per_second/trained": tokens / times["time/update"],
            "memory/peak_gib": peak / 2**30,
        }
        if new:
            rows = [row for batch in new for row in (*batch.rows, *batch.dropped)]
            generated = sum(model_length(row.rollout) for row in rows)
            own["tokens_per_second/generated"] = generated / times["time/generate"]
        own |= {"num_tokens": self.state.num_tokens, "epoch": epoch}
        own |= self.state.control.metrics()
        own["observers/failures"] = sum(self.observers.failures.values())
        metrics, renamed = with_logged(own, mean_logged(batch.logged for batch in new))
        self.warn.all({what: what for what in renamed})
        self.warn.all(mismatch_warnings(metrics, step, promised=self.logprobs_promised))
        self.state.metrics = metrics
        self.observers.step_finished(self.context, step, metrics, self.control)
