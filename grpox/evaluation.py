"""Evaluation on held-out prompts: greedy by default, scored by the run's own reward functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpox.batch_metrics import error_metrics, length_metrics, mean
from grpox.collect import Sampler
from grpox.config import EvaluationConfig, SamplingConfig
from grpox.contracts import TrainerState
from grpox.data.prompts import PromptSet
from grpox.rewards.log import Logged, mean_logged, with_logged
from grpox.scored_rows import ScoredRow


class Evaluator:
    """Samples one completion of every held-out prompt and reports means over all of them."""

    def __init__(
        self, sampler: Sampler, prompts: PromptSet, config: EvaluationConfig, sampling: SamplingConfig
    ) -> None:
        self.sampler = sampler
        self.prompts = prompts
        self.config = config
        # model_copy does not validate: 0 means greedy here, while in training it is refused.
        self.sampling = sampling.model_copy(update={"temperature": config.temperature})
        self.labels = [reward.label for reward in sampler.rewards]

    def evaluate(self, state: TrainerState) -> dict[str, float]:
        """The accuracy, the mean of every reward and the completion lengths, over all ranks."""
        rows: list[ScoredRow] = []
        logs: list[Logged] = []
        per_batch = self.config.batch_size * self.sampler.world.size
        for start in range(0, len(self.prompts), per_batch):
            indices = range(start, min(start + per_batch, len(self.prompts)))
            stream = (1, state.global_step, start)
            scored, logged = self.sampler.sample(self.prompts, indices, 1, self.sampling, stream, state)
            rows += scored
            logs.append(logged)
        metrics, renamed = with_logged(self._metrics(rows), mean_logged(logs))
        if self.sampler.world.is_main:
            self.sampler.warn.all({what: what for what in renamed})
        return metrics

    def _metrics(self, rows: Sequence[ScoredRow]) -> dict[str, float]:
        metrics = {}
        for place, label in enumerate(self.labels):
            given = [reward for row in rows if (reward := row.rewards[place]) is not None]
            metrics[f"rewards/{label}/mean"] = mean(given) if given else math.nan
        accuracy = self.config.accuracy or self.labels[0]
        return {
            "accuracy": metrics[f"rewards/{accuracy}/mean"],
            **metrics,
            **error_metrics(self.sampler.rewards, [row.failed for row in rows]),
            **length_metrics([row.rollout for row in rows]),
        }
