"""The reward judge, against a real server with /v1/chat/completions: requests, replies, cache and failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.scoring_server import Answer, chat, scoring_server

from grpox.contracts import FailedScore
from grpox.errors import ConfigError
from grpox_rewards.configs import JudgeConfig, template_fields
from grpox_rewards.judge import Judge, plain, read_score

TEMPLATE = "{prompt}|{completion}|{answer}"


def judge(url: str, completions: list[Any], data: dict[str, Any] | None = None, **parameters: Any) -> Any:
    """Score completions of the prompt p; returns the scores and the metrics that were logged."""
    metrics: dict[str, float] = {}
    own = {"url": f"{url}/v1", "model": "m", "back_off": 0, "prompt": "{prompt}|{completion}", **parameters}
    prompts = ["p"] * len(completions)
    reward = Judge(JudgeConfig(**own))
    call = reward(prompts=prompts, completions=completions, log_metric=metrics.__setitem__, **(data or {}))
    return asyncio.run(call), metrics


def asked(answer: Callable[[Any, int], Answer], completions: list[Any], **arguments: Any) -> Any:
    with scoring_server(answer) as server:
        scores, metrics = judge(server.url, completions, **arguments)
    return scores, metrics, server


def by_length(body: Any, _: int) -> Answer:
    """Give as many points as the completion has letters."""
    return 200, chat(f"Let me see.\nScore: {len(body['messages'][-1]['content'].split('|')[1])}")


def reason(score: Any) -> str:
    assert isinstance(score, FailedScore)
    return score.reason


def test_a_request_by_hand_and_scores_from_0_to_1() -> None:
    own = {"prompt": TEMPLATE, "system": "Be strict.", "extra": {"reasoning_effort": "low"}}
    scores, _, server = asked(by_length, ["abc", ""], data={"answer": ["42", "43"]}, **own)
    assert scores == [0.3, 0.0]
    assert server.paths == ["/v1/chat/completions"] * 2
    assert {
        "model": "m",
        "messages": [{"role": "system", "content": "Be strict."}, {"role": "user", "content": "p|abc|42"}],
        "temperature": 0.0,
        "max_tokens": 1024,
        "reasoning_effort": "low",
    } in server.bodies
    # Limits that are null are left to the service.
    _, _, server = asked(by_length, ["a"], temperature=None, max_tokens=None)
    assert set(server.bodies[0]) == {"model", "messages"}


def test_conversations_and_templates_become_text() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 x 7?"}]
    assert plain(messages) == "system: Be brief.\n\nuser: 6 x 7?"
    braces = "{x}"  # are text
    assert asked(by_length, [[{"role": "assistant", "content": "abcd"}], braces])[0] == [0.4, 0.3]
    config = JudgeConfig(url="http://h/v1", model="m", prompt="{prompt} {{x}} {answer} {completion} {answer}")
    assert Judge(config).reads_columns == ("answer",)
    assert template_fields("{{}} none") == []


def test_equal_completions_are_judged_once_and_cost_their_share() -> None:
    scores, metrics, server = asked(by_length, ["abc", "ab", "abc", "abc"])
    assert scores == [0.3, 0.2, 0.3, 0.3]
    assert len(server.bodies) == 2
    assert metrics["judge/requests"] == 0.5
    # Two requests of 100 + 20 tokens for four completions: 50 and 10 each; 50 * 3 + 10 * 15 = 300 millionths.
    metrics = asked(by_length, ["a", "b", "a", "b"], price_in=3.0, price_out=15.0)[1]
    assert {name: metrics[f"judge/{name}"] for name in ("tokens_in", "tokens_out", "cost")} == pytest.approx(
        {"tokens_in": 50, "tokens_out": 10, "cost": 300e-6}
    )


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 7", 0.7),
        ("It is fine.\n\n**Score: 7.5**\n", 0.75),
        ("Score: 10.", 1.0),
        ("score 3 of 10 steps.\nScore: 0", 0.0),
        ("Score: 7\nI repeat:\nScore: 7.0", 0.7),
    ],
)
def test_replies_that_can_be_read(reply: str, score: float) -> None:
    assert read_score(reply, JudgeConfig(url="http://h/v1", model="m")) == pytest.approx(score)


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ("", "has no scores"),
        ("It is good.", "has no scores"),
        ("Score: high", "has no scores"),
        ("Score: 3\nScore: 9", "has 2 scores"),
        ("Score: 11", "score 11, not in 0 to 10"),
        ("**Score: -1**", "score -1, not in 0 to 10"),
        ("The Score: 7 is what you want", "has no scores"),
    ],
)
def test_malformed_replies_have_no_score(reply: str, told: str) -> None:
    scores, metrics, server = asked(lambda body, n: (200, chat(reply)), ["a"])
    assert told in reason(scores[0])
    assert metrics["judge/failures"] == metrics["judge/unreadable"] == 1.0
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"why": "x", "grade": 2}', 0.25),
        ('```json\n{"grade": 5}\n```', 1.0),
        ('Sure: {"grade": 2}', None),
        ("[2]", None),
        ("{}", None),
    ],
)
def test_json_replies(reply: str, score: float | None) -> None:
    [given], _, _ = asked(lambda b, n: (200, chat(reply)), ["a"], json_field="grade", lowest=1, highest=5)
    assert given == score if score is not None else isinstance(given, FailedScore)


@pytest.mark.parametrize(
    "content", [{}, [], {"choices": []}, {"choices": [{"message": {}}]}, chat(None), {"error": "x"}, 7]
)
def test_answers_that_are_no_chat_completion(content: Any) -> None:
    [given], metrics, _ = asked(lambda body, n: (200, content), ["a"])
    assert "the judge answered" in reason(given)
    assert metrics["judge/failures"] == 1.0


def test_failures_are_retried_and_then_fail_alone() -> None:
    def answer(body: Any, n: int) -> Answer:
        return (503, "busy") if "|bad" in body["messages"][-1]["content"] else by_length(body, n)

    scores, metrics, _ = asked(answer, ["abc", "bad"], retries=2)

    assert scores[0] == 0.3
    assert "(3 attempts)" in reason(scores[1])
    assert metrics["judge/failures"] == 0.5
    assert metrics["judge/requests"] == 2.0  # 1 and 3, for two completions


def test_a_second_run_takes_replies_from_the_cache(tmp_path: Path) -> None:
    with scoring_server(by_length) as server:
        cache = str(tmp_path / "new" / "cache")
        first, before = judge(server.url, ["abc", "ab"], cache=cache)
        second, after = judge(server.url, ["abc", "abcd", "ab"], cache=cache)
    assert first == [0.3, 0.2]
    assert second == [0.3, 0.4, 0.2]
    assert len(server.bodies) == 3
    assert (before["judge/cached"], after["judge/cached"]) == (0.0, pytest.approx(2 / 3))
    assert after["judge/tokens_in"] == pytest.approx(100 / 3)
    # One that cannot be made is an error before training.
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cache"):
        Judge(JudgeConfig(url="http://h/v1", model="m", cache=str(tmp_path / "file" / "cache")))


def test_the_cache_tells_requests_apart_and_a_damaged_file_is_asked_for_again(tmp_path: Path) -> None:
    with scoring_server(by_length) as server:
        judge(server.url, ["abc"], cache=str(tmp_path))
        changes = {"model": "other", "temperature": 0.5, "system": "x", "prompt": "{completion}|ab"}
        for name, value in changes.items():
            judge(server.url, ["abc"], cache=str(tmp_path), **{name: value})
        assert len(server.bodies) == 5
    # A damaged file of the cache is asked for again.
    damaged = tmp_path / "damaged"
    with scoring_server(by_length) as server:
        judge(server.url, ["abc"], cache=str(damaged))
        [file] = damaged.rglob("*.json")
        file.write_text(file.read_text()[:40])
        assert judge(server.url, ["abc"], cache=str(damaged))[0] == [0.3]
        assert json.loads(file.read_text())["answer"]["choices"]
        assert len(server.bodies) == 2


def test_neither_failures_nor_malformed_replies_are_cached(tmp_path: Path) -> None:
    def answer(body: Any, n: int) -> Answer:
        return [(400, "no"), (200, chat("Hm.")), by_length(body, n)][n]

    with scoring_server(answer) as server:
        scores = [judge(server.url, ["abc"], cache=str(tmp_path))[0][0] for _ in range(4)]
    assert [isinstance(score, FailedScore) for score in scores] == [True, True, False, False]
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": "no text to judge: {prompt}"},
        {"prompt": "{completion} {0}"},
        *({"prompt": f"{{completion{more}"} for more in (".x}", "!r}", "} {")),
        *({"pattern": pattern} for pattern in ("(", "Score", "(a)(b)")),
        {"lowest": 10},
        {"json_field": "a", "pattern": "(b)"},
        {"extra": {"messages": []}},
        {"url": "http://h/v1?key=x"},
        {"url": "http://me:word@h/v1"},
    ],
)
def test_refused_parameters(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        JudgeConfig(**{"url": "http://h/v1", "model": "m", **wrong})
