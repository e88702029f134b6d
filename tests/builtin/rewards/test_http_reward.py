"""The reward http, against a real server: the requests, retries, failures, and the key."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError
from support.patience import patient
from support.ports import free_port
from support.scoring_server import Answer, ScoringServer, scoring_server

from grpox.contracts import FailedScore
from grpox.errors import ConfigError
from grpox_rewards.configs import HttpConfig
from grpox_rewards.service import Http, Service

KEY = "k-0123456789-abcdef"


def score(url: str, count: int = 3, data: dict[str, list[Any]] | None = None, **parameters: Any) -> Any:
    """Score completions c0, c1, ...; returns the scores and the metrics that were logged."""
    metrics: dict[str, float] = {}
    reward = Http(HttpConfig(url=url, **{"back_off": 0, **parameters}))
    scores = asyncio.run(
        reward(
            prompts=[f"p{n}" for n in range(count)],
            completions=[f"c{n}" for n in range(count)],
            log_metric=metrics.__setitem__,
            **(data or {}),
        )
    )
    return scores, metrics


def asked(answer: Callable[[Any, int], Answer], **arguments: Any) -> tuple[Any, Any, ScoringServer]:
    with scoring_server(answer) as server:
        scores, metrics = score(f"{server.url}/verify", **arguments)
    return scores, metrics, server


def by_number(body: Any, _: int) -> Answer:
    """Score each completion by the number in its name; c1 abstains."""
    return 200, {"scores": [None if text == "c1" else float(text[1:]) for text in body["completions"]]}


def reasons(scores: list[Any]) -> list[str]:
    assert all(isinstance(score, FailedScore) for score in scores)
    return [score.reason for score in scores]


def test_batches_come_back_in_order_with_the_columns_that_are_named() -> None:
    scores, metrics, server = asked(by_number, batch_size=2)
    assert scores == [0.0, None, 2.0]
    assert metrics == {"http/failures": 0.0, "http/attempts": 1.0}
    assert sorted(server.bodies, key=str) == [
        {"prompts": ["p0", "p1"], "completions": ["c0", "c1"], "columns": {}},
        {"prompts": ["p2"], "completions": ["c2"], "columns": {}},
    ]
    assert server.paths == ["/verify"] * 2
    # Columns that it names are sent, and a bare list is taken.
    data = {"answer": ["a", "b", "c"], "secret": [1, 2, 3]}
    scores, _, server = asked(lambda body, _: (200, [1, 2.5, None]), data=data, columns=["answer"])
    assert scores == [1, 2.5, None]
    assert server.bodies[0]["columns"] == {"answer": ["a", "b", "c"]}
    assert Http(HttpConfig(url="http://h", columns=["answer"])).reads_columns == ("answer",)


@pytest.mark.parametrize(
    ("status", "attempts"),
    [*((status, 3) for status in (408, 425, 429, 500, 503)), *((status, 1) for status in (302, 400, 401, 404))],
)
def test_what_may_pass_is_asked_again_and_what_will_not_is_asked_once(status: int, attempts: int) -> None:
    busy: Answer = (status, "no", {"Location": "/elsewhere"})
    scores, metrics, server = asked(lambda body, n: by_number(body, n) if n == 2 else busy)
    assert metrics["http/attempts"] == attempts
    assert server.paths == ["/verify"] * attempts  # no redirection is followed: it would take the key along
    if attempts == 1:
        assert f"answered {status}" in reasons(scores)[0]
    else:
        assert scores == [0.0, None, 2.0]


def test_retries_end_and_a_failed_request_costs_no_other_its_scores() -> None:
    scores, metrics, server = asked(lambda body, n: (503, b"so busy"), retries=2)
    assert set(reasons(scores)) == {f"{server.url}/verify answered 503 so busy (3 attempts)"}
    assert metrics == {"http/failures": 1.0, "http/attempts": 3.0}
    scores, _ = score(f"http://127.0.0.1:{free_port()}/", retries=1)  # where nobody listens
    assert "cannot be asked" in reasons(scores)[0]
    assert "(2 attempts)" in reasons(scores)[0]

    def answer(body: Any, n: int) -> Answer:
        return (400, "no") if "c1" in body["completions"] else by_number(body, n)

    scores, metrics, _ = asked(answer, batch_size=1)

    assert scores[0::2] == [0.0, 2.0]
    assert len(reasons(scores[1:2])) == 1
    assert metrics["http/failures"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"<html>", "something else than JSON"),
        ({"scores": [1, 2]}, "2 scores for 3 completions"),
        ({"score": [1, 2, 3]}, "no list of scores"),
        ([1, 2, "3"], "'3', which is no finite number"),
    ],
)
def test_malformed_answers_are_failures_and_never_scores(content: Any, told: str) -> None:
    scores, _metrics, server = asked(lambda body, n: (200, content))
    assert told in reasons(scores)[0]
    assert len(server.bodies) == 1


def test_a_silent_service_times_out() -> None:
    ended = threading.Event()

    def answer(body: Any, n: int) -> Answer:
        ended.wait(patient(60))
        return 200, []

    with scoring_server(answer) as server:
        scores, _ = score(server.url, request_timeout=0.2, retries=0)
        ended.set()
    assert "did not answer within 0.2 s" in reasons(scores)[0]


def test_requests_are_no_more_and_no_faster_than_allowed() -> None:
    under_way, most, lock, barrier = [0], [0], threading.Lock(), threading.Barrier(2)

    def answer(body: Any, n: int) -> Answer:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        barrier.wait(patient(60))
        with lock:
            under_way[0] -= 1
        return by_number(body, n)

    asked(answer, count=6, batch_size=1, concurrency=2)

    assert most == [2]
    service = Service(HttpConfig(url="http://h", requests_per_second=2.0), "http://h")
    starts = [service._seconds_to_start(now) for now in (10.0, 10.0, 10.2, 13.0)]
    assert starts == pytest.approx([0, 0.5, 0.8, 0])


def test_back_off_doubles_with_a_seeded_factor_and_keeps_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    wait = Service._wait

    def recorded(service: Service, *arguments: Any) -> float:
        waits.append(wait(service, *arguments))
        return 0.0

    monkeypatch.setattr(Service, "_wait", recorded)

    def waits_of(seed: int, header: dict[str, str]) -> list[float]:
        waits.clear()
        asked(lambda body, n: (503, "", header), retries=3, back_off=1.0, seed=seed)
        return list(waits)

    first = waits_of(1, {})
    assert len(first) == 3
    assert all(0.5 * 2**n <= wait <= 2**n for n, wait in enumerate(first))
    assert waits_of(1, {}) == first != waits_of(2, {})
    assert waits_of(1, {"Retry-After": "17"}) == [17.0] * 3
    assert waits_of(1, {"Retry-After": "999"}) == [60.0] * 3


def test_a_missing_key_is_an_error_and_a_key_is_in_no_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VERIFIER_KEY", KEY)
    echo = {"error": f"key {KEY} is not welcome"}
    scores, _, server = asked(lambda body, n: (403, echo), key_env="VERIFIER_KEY")
    bare, _, other = asked(lambda body, n: (403, echo), key_env="VERIFIER_KEY", key_header="X-API-Key")
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert other.headers[0]["X-API-Key"] == KEY
    assert "key *** is not welcome" in reasons(scores)[0]
    assert KEY not in str(reasons(scores) + reasons(bare))
    assert KEY not in str(HttpConfig(url=server.url, key_env="VERIFIER_KEY").model_dump())
    monkeypatch.delenv("VERIFIER_KEY", raising=False)
    with pytest.raises(ConfigError) as error:
        Http(HttpConfig(url="http://h", key_env="VERIFIER_KEY"))
    assert "VERIFIER_KEY" in str(error.value)


@pytest.mark.parametrize(
    "url",
    ["", "h:80", "ftp://h", "http://", "http://h:0", "http://me:secret@h", "http://h:99999", "http://h/#x"],
)
def test_an_address_that_is_none_or_holds_a_password_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        HttpConfig(url=url)
