"""Scores from a language model as judge: an OpenAI-compatible service receives a request for each
completion."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpox.contracts import FailedScore, Text, completion_text, finite_number, foreign_score
from grpox.errors import ConfigError
from grpox.toolkit import brief, text_of, write_atomically
from grpox_rewards.configs import JudgeConfig
from grpox_rewards.service import Service, ServiceFailed
from grpox_rewards.text import PATTERN_SECONDS, limited

MOST_TOKENS = 1e9
"""Count of tokens from which a service's is not believed."""


class JudgeReply(NamedTuple):
    """One parsed reply of the judge."""

    score: float
    """Score in [0, 1], or a `FailedScore`."""
    tokens_in: int = 0
    tokens_out: int = 0
    is_cached: bool = False
    is_unreadable: bool = False


class Judge:
    """`(score - lowest) / (highest - lowest)` for the score in the judge's reply.

    Equal requests of a call are sent once. A reply without exactly one score in range is a failure, like a
    service that does not answer: it has no default score, and `on_error` decides.

    The cache has a file for each readable reply, named by the SHA-256 of address and request:
    ``ab/abcd....json``. Ranks and runs can share it. It contains texts of prompts and completions, but no keys.

    Raises:
        ConfigError: the key is missing in the environment, or the cache's folder cannot be created.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self.config = config
        self.reads_columns = config.reads_columns
        self._url = config.url.rstrip("/") + "/chat/completions"
        self._service = Service(config, self._url)
        self._cache = None if config.cache is None else Path(config.cache).expanduser().absolute()
        if self._cache is not None:
            try:
                self._cache.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                what, allowed = (
                    f"the judge's cache cannot be made: {text_of(error)}",
                    "a folder that may be written",
                )
                raise ConfigError(what, given=str(config.cache), allowed=f"cache: {allowed}") from error

    async def __call__(
        self,
        *,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Return one score in [0, 1] per completion; `FailedScore` for those without a readable reply."""
        bodies = [
            self._body(
                prompts[place], completions[place], {name: columns[name][place] for name in self.reads_columns}
            )
            for place in range(len(prompts))
        ]
        verdicts = {body: self._cached(body) for body in dict.fromkeys(bodies)}
        unknown = [body for body, verdict in verdicts.items() if verdict is None]
        answers, attempts = await self._service.ask(
            unknown, lambda place, answer: self._read(unknown[place], answer)
        )
        for body, answer in zip(unknown, answers, strict=True):
            verdicts[body] = JudgeReply(answer) if isinstance(answer, FailedScore) else answer
        known = {body: verdict for body, verdict in verdicts.items() if verdict is not None}
        if log_metric is not None:
            self._log(log_metric, [*known.values()], sum(attempts), len(bodies))
        return [known[body].score for body in bodies]

    def _body(self, prompt: Text, completion: Text, row: Mapping[str, Any]) -> bytes:
        """Return the request for one completion, with the same bytes for the same content."""
        config = self.config
        request = config.prompt.format(prompt=plain(prompt), completion=completion_text(completion), **row)
        messages = [{"role": "system", "content": config.system}] if config.system is not None else []
        body = {"model": config.model, "messages": [*messages, {"role": "user", "content": request}]}
        limits = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        body |= {name: value for name, value in limits.items() if value is not None} | config.extra
        return json.dumps(body, sort_keys=True).encode()

    def _file(self, body: bytes) -> Path:
        digest = hashlib.sha256(self._url.encode() + b"\n" + body).hexdigest()
        return (self._cache or Path()) / digest[:2] / f"{digest}.json"

    def _cached(self, body: bytes) -> JudgeReply | None:
        """Return the verdict of a cached reply; None if there is none, or its file is damaged."""
        if self._cache is None:
            return None
        try:
            answer = json.loads(self._file(body).read_text(encoding="utf-8"))["answer"]
            return self._read(body, answer, is_cached=True)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ServiceFailed):
            return None

    def _read(self, body: bytes, answer: Any, is_cached: bool = False) -> JudgeReply:
        """Return the verdict in the answer to `body`, and cache a readable one; raises ServiceFailed."""
        reply, tokens_in, tokens_out = read_answer(answer)
        try:
            score = read_score(reply, self.config)
        except ValueError as error:
            failed = FailedScore(f"the judge's reply {error}")
            return JudgeReply(failed, tokens_in, tokens_out, is_unreadable=True)
        if is_cached:
            return JudgeReply(score, is_cached=True)
        if self._cache is not None:
            file = self._file(body)
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, json.dumps({"request": json.loads(body), "answer": answer}))
        return JudgeReply(score, tokens_in, tokens_out)

    def _log(
        self,
        log_metric: Callable[[str, float], None],
        verdicts: Sequence[JudgeReply],
        attempts: int,
        count: int,
    ) -> None:
        """Log shares of the distinct requests, and tokens and cost per completion."""
        tokens_in, tokens_out = sum(v.tokens_in for v in verdicts), sum(v.tokens_out for v in verdicts)
        cost = (tokens_in * self.config.price_in + tokens_out * self.config.price_out) / 1e6
        log_metric("judge/failures", sum(isinstance(v.score, FailedScore) for v in verdicts) / len(verdicts))
        log_metric("judge/unreadable", sum(v.is_unreadable for v in verdicts) / len(verdicts))
        log_metric("judge/cached", sum(v.is_cached for v in verdicts) / len(verdicts))
        for name, value in zip(
            ("requests", "tokens_in", "tokens_out", "cost"),
            (attempts, tokens_in, tokens_out, cost),
            strict=True,
        ):
            log_metric(f"judge/{name}", value / count)


def plain(prompt: Text) -> str:
    """Return a prompt as text: the string itself, or one paragraph per message."""
    if isinstance(prompt, str):
        return prompt
    if lost := [each for each in prompt if "content" not in each and not each.get("tool_calls")]:
        raise ValueError(
            f"a message of the prompt has no content, so that the judge would not read it: {lost[0]}"
        )
    of_any_role = [{**message, "role": "assistant"} for message in prompt]
    texts = [
        "\n".join(filter(None, [completion_text([each]), *map(json.dumps, each.get("tool_calls") or ())]))
        for each in of_any_role
    ]
    return "\n\n".join(f"{each.get('role', '')}: {text}" for each, text in zip(prompt, texts, strict=True))


def read_answer(answer: Any) -> tuple[str, int, int]:
    """Return the reply in an answer of the service, and the tokens of request and reply (0 if unknown).

    Raises:
        ServiceFailed: the answer has no reply.
    """
    try:
        reply = answer["choices"][0]["message"]["content"]
        usage = answer.get("usage") or {}
        counts = [finite_number(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ServiceFailed(f"the judge answered no chat completion: {brief(answer, 160)}") from error
    if not isinstance(reply, str):
        raise ServiceFailed("the judge answered a chat completion without text")
    tokens = [int(count) if count and 0 < count < MOST_TOKENS else 0 for count in counts]
    return reply, tokens[0], tokens[1]


def read_score(reply: str, config: JudgeConfig) -> float:
    """Return the score of a reply, in [0, 1].

    Raises:
        ValueError: the reply has no score, several, or one out of range; the text says which.
    """
    score = _in_json(reply, config.json_field) if config.json_field else _by_pattern(reply, config.pattern)
    if not config.lowest <= score <= config.highest:
        raise ValueError(f"has the score {score:g}, not in {config.lowest:g} to {config.highest:g}")
    return (score - config.lowest) / (config.highest - config.lowest)


def _by_pattern(reply: str, pattern: str) -> float:
    try:
        texts = {match or "" for match in limited("findall", pattern)(reply)}
    except TimeoutError:
        raise ValueError(f"took the pattern longer than {PATTERN_SECONDS:g} s: {reply[:100]!r}") from None
    try:
        scores = {float(text) for text in texts}
    except ValueError:
        raise ValueError(f"has a score that is no number: {sorted(texts)!r}"[:200]) from None
    if len(scores) != 1:
        raise ValueError(f"has {len(scores) or 'no'} scores: {reply.strip()[-100:]!r}")
    return scores.pop()


def _in_json(reply: str, name: str) -> float:
    text = reply.strip()
    head, _, rest = text.partition("\n")
    is_fenced = head.rstrip() in ("```", "```json") and rest.endswith("\n```")
    try:
        content = json.loads(rest.removesuffix("```") if is_fenced else text)
    except (ValueError, RecursionError):
        raise ValueError(f"is no JSON: {text[:100]!r}") from None
    score = foreign_score(content.get(name) if isinstance(content, dict) else None, name)
    if isinstance(score, FailedScore):
        raise ValueError(f"has no number {name!r}: {text[:100]!r}")
    return score
