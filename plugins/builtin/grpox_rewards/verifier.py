"""Scores from the user's own service: completions are posted as JSON, and a list of scores is returned."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from grpox.contracts import FailedScore, Text, foreign_score
from grpox_rewards.configs import HttpConfig
from grpox_rewards.service import Service, ServiceFailed, Session


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
        self._service = Service(config)

    async def __call__(
        self,
        *,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return one score per completion; `FailedScore` for those of a failed request."""
        size, scores = self.config.batch_size, list[float | None]()
        async with self._service.session() as session:
            batches = [slice(start, start + size) for start in range(0, len(completions), size)]
            sent = {name: columns[name] for name in self.config.columns}
            requests = [self._ask(session, prompts[at], completions[at], cut(sent, at)) for at in batches]
            for part in await asyncio.gather(*requests):
                scores += part
        if log_metric is not None:
            log_metric("http/failures", sum(isinstance(s, FailedScore) for s in scores) / len(scores))
            log_metric("http/attempts", sum(session.attempts) / len(session.attempts))
        return scores

    async def _ask(
        self, session: Session, prompts: Sequence[Text], completions: Sequence[Text], columns: dict[str, Any]
    ) -> Sequence[float | None]:
        body = {"prompts": prompts, "completions": completions, "columns": columns}
        try:
            answer = await self._service.post(session, self.config.url, json.dumps(body, default=str).encode())
            return checked(answer, len(completions))
        except ServiceFailed as error:
            return [FailedScore(str(error))] * len(completions)


def cut(columns: dict[str, Sequence[Any]], part: slice) -> dict[str, Sequence[Any]]:
    """Return the rows `part` of every column."""
    return {name: values[part] for name, values in columns.items()}


def checked(answer: Any, count: int) -> list[float | None]:
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
