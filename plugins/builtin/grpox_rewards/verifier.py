"""Scores from the user's own service: completions are posted as JSON, and a list of scores is returned."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from grpox.contracts import FailedScore, Text, foreign_score
from grpox_rewards.configs import HttpConfig
from grpox_rewards.service import Service, ServiceFailed


class Http:
    """Posts ``{"prompts": [...], "completions": [...], "columns": {...}}``, expects ``{"scores": [...]}``.

    Prompts and completions are strings or lists of messages, as in the data. A score is a number, or null to
    abstain. A bare list is accepted, too.

    Raises:
        ConfigError: the key is missing in the environment.
    """

    def __init__(self, config: HttpConfig) -> None:
        self.config = config
        self.reads_columns = config.reads_columns
        self._service = Service(config, config.url)

    async def __call__(
        self,
        *,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return one score per completion; `FailedScore` for those of a failed request."""
        sent = {"prompts": prompts, "completions": completions}
        starts = range(0, len(completions), self.config.batch_size)
        batches = [slice(start, start + self.config.batch_size) for start in starts]
        bodies = [
            {name: values[batch] for name, values in sent.items()}
            | {"columns": {name: columns[name][batch] for name in self.config.columns}}
            for batch in batches
        ]
        sizes = [len(body["completions"]) for body in bodies]
        texts = [json.dumps(body, default=str).encode() for body in bodies]
        parts, attempts = await self._service.ask(
            texts, lambda place, answer: read_scores(answer, sizes[place])
        )
        scores: list[float | None] = []
        for part, size in zip(parts, sizes, strict=True):
            scores += part if isinstance(part, list) else [part] * size
        if log_metric is not None:
            log_metric("http/failures", sum(isinstance(s, FailedScore) for s in scores) / len(scores))
            log_metric("http/attempts", sum(attempts) / len(attempts))
        return scores


def read_scores(answer: Any, count: int) -> list[float | None]:
    """Return the scores of an answer.

    Raises:
        ServiceFailed: the answer is not `count` finite numbers or nulls.
    """
    scores = answer.get("scores") if isinstance(answer, dict) else answer
    if not isinstance(scores, list) or len(scores) != count:
        what = f"{len(scores)} scores" if isinstance(scores, list) else "no list of scores"
        raise ServiceFailed(f"the service answered {what} for {count} completions")
    numbers = [None if score is None else foreign_score(score, "the service answered") for score in scores]
    for number in numbers:
        if isinstance(number, FailedScore):
            raise ServiceFailed(number.reason)
    return numbers
