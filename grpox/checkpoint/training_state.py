"""The part of a run under way that a checkpoint saves beside the engine, and restores as one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from grpox.data.prompt_cursor import PromptCursor
from grpox.observing.early_stop import EarlyStop
from grpox.policy.batch import Sample
from grpox.rollout.sampler import PrefetchedBatch
from grpox.update.nonfinite import SkippedSteps


@dataclass
class TrainingState:
    """State of the loop; the trainer owns it, and its parts move it on."""

    samples: dict[tuple[int, int], Sample] = field(default_factory=dict)
    """This rank's samples of the generation batches in use, by generation and row."""
    prefetched: dict[int, PrefetchedBatch] = field(default_factory=dict)
    """Generation batches that are sampled while the policy is updated; none at max_staleness 0."""
    cursor: PromptCursor | None = None
    """Chooses the prompts of a generation batch in place of the schedule, with dynamic sampling."""
    early_stop: EarlyStop | None = None
    skipped: SkippedSteps = field(default_factory=SkippedSteps)
    num_tokens: int = 0
    """Tokens of prompts and completions so far."""
    evaluation_before: dict[str, float] = field(default_factory=dict)
    """Metrics of the evaluation before the first step."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """Metrics of the last evaluation; of a run that goes on, of the step it goes on from."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step, those of its evaluation below ``evaluation/``; on rank 0."""
    seconds_before: float = 0.0
    """Seconds of training before the checkpoint that the run went on from."""
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before a resumed checkpoint included."""
        return self.seconds_before + time.perf_counter() - self.started
