"""Text from models, tools and services: read in linear time, or by a user's pattern within a limit."""

import asyncio
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.scoring_server import scoring_server

from grpox.contracts import FailedScore, ToolCall, foreign_score
from grpox.environments.tools import Tool
from grpox.errors import RunFailed, plain, shorten
from grpox.errors.redaction import redact
from grpox.observing.page.data import cut_text
from grpox.rollout.episodes import calls
from grpox.rollout.episodes.plain_values import NotPlain, plain_value
from grpox.rollout.episodes.plain_values import number as plain_number
from grpox.rollout.rewards.call import checked_scores
from grpox.rollout.rewards.scoring import weighted_sum
from grpox.runtime.child import Restarted
from grpox_environments.calculator import CALL, SUM
from grpox_environments.lake import Lake
from grpox_rewards import math_worker, text
from grpox_rewards.code import code_in
from grpox_rewards.configs import FormatConfig, HttpConfig, JudgeConfig, RegexConfig, RepetitionConfig
from grpox_rewards.judge import Judge, read_score
from grpox_rewards.service import Http
from grpox_rewards.text import Repetition

SHORT, LONG, MOST = 50_000, 200_000, 8.0
NOISE = 0.03
"""Seconds of CPU time below which a ratio says nothing."""

JUDGE = {"url": "http://h/v1", "model": "m"}


def add(a: int) -> int:
    """Add.

    Args:
        a: a number
    """
    return a


def xml(reply: str) -> Any:
    chat: Any = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, **_: reply))
    return calls.ResponseReader(chat, calls._QWEN_XML, "<|im_start|>assistant\n")(reply)


def quietly(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def call(reply: str) -> Any:
        with suppress(ValueError):
            return read(reply)

    return call


READERS: dict[str, Callable[[str], Any]] = {
    "calls of Hermes": calls.read_hermes,
    "calls of Llama": calls.read_json,
    "calls of Qwen": xml,
    "arguments of tools": quietly(lambda reply: Tool("add", add).arguments(reply)),
    "judge": quietly(lambda reply: read_score(reply, JudgeConfig(**JUDGE))),
    "judge, JSON": quietly(lambda reply: read_score(reply, JudgeConfig(**JUDGE, json_field="score"))),
    "format": lambda reply: text.Format(FormatConfig())(completions=[reply]),
    "format, opened": lambda reply: text.Format(FormatConfig(opened=True))(completions=[reply]),
    "regex": lambda reply: text.Regex(RegexConfig(pattern=r"(\d+)\D*$"))(completions=[reply]),
    "repetition": lambda reply: Repetition(RepetitionConfig())(completions=[reply], completion_ids=[[]]),
    "code": code_in,
    "answer tags": math_worker.ANSWER_TAG.findall,
    "prose": math_worker.PROSE.search,
    "lake": Lake.WORD.findall,
    "calculator": lambda reply: (CALL.fullmatch(reply), SUM.search(reply)),
    "redaction": redact,
    "messages": lambda reply: (plain(reply), shorten(reply, 2000)),
    "page": lambda reply: cut_text(reply, 10**9),
}
UNITS = [
    *(" ", "\n", "\t", "\r\n", " \n", "\u00a0", "a", "a ", "1", ".", ",", "\\", '"', "'", "`", "```", "```\n"),
    *("{", "[", "}", "<", ">", "*", "_", ":", "://", "http://a:", "@", "=", "-", "\x1b[", "\u202e", "é", "日"),
    *("<tool_call>", "</tool_call>", "<tool_call> ", "<tool_call><function=", "<function=a>", "</function> "),
    *("<parameter=", "<parameter=a>", "<parameter=a>\n</parameter>", "<|python_tag|> ", "<|im_end|>"),
    *("<think>", "</think> ", "<answer>", "</answer>", "<answer>1</answer>", "Score: ", "Score: 1", "Score:\n"),
    *('{"name": ', '{"name": "a", "parameters": {}};', '"name": "', '{"a":', "[1+", "1+1= ", "up ", "$x$ "),
    *("key=", "api_key=", "token: ", "--token ", "cookie: a", "Bearer ", "machine a ", "eyJ", "-eyJ-", "sk-"),
    *("-----BEGIN PRIVATE KEY-----", "-----BEGIN ", "SG.a", "?a=b&", "authorization: digest "),
]
HEADS = "", "<tool_call>\n<function=a>", '{"name": "a", "parameters": {"a": "', "```json", "Score: 1", "<think>"


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Interrupt a block that needs more CPU time: `re` looks for signals."""

    def late(*_: object) -> None:
        raise TimeoutError(f"takes more than {seconds:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def seconds_of(read: Callable[[str], Any], head: str, unit: str, length: int) -> float:
    reply = head + unit * (length // len(unit))
    begun = time.process_time()
    read(reply)
    return time.process_time() - begun


@pytest.mark.parametrize("name", READERS)
def test_text_of_models_and_services_is_read_in_linear_time(name: str) -> None:
    slow = []
    READERS[name]("a")  # which imports what it needs
    for head in HEADS if name not in ("messages", "redaction") else [""]:
        for unit in UNITS:
            with limit(20.0):
                long = seconds_of(READERS[name], head, unit, LONG)
                if long > MOST * NOISE:  # measured again: the machine may be busy
                    long = min(long, *(seconds_of(READERS[name], head, unit, LONG) for _ in range(3)))
                    short = max(NOISE, seconds_of(READERS[name], head, unit, SHORT))
                    if long > MOST * short:
                        slow.append((head, unit, short, long))
    assert not slow


def test_a_pattern_of_the_user_has_a_time_limit() -> None:
    metrics: dict[str, float] = {}
    reward = text.Regex(RegexConfig(pattern=r"(a|aa)+$", no_match=-1.0))
    with limit(60.0):
        scores = reward(completions=["a" * 60 + "b", "aaa"], log_metric=metrics.__setitem__)
        with pytest.raises(ValueError, match="took the pattern longer than 1 s"):
            read_score("a" * 60 + "b", JudgeConfig(**JUDGE, pattern=r"(a|aa)+$"))
    assert (scores, metrics) == ([-1.0, 1.0], {"regex/timeouts": 0.5})


@pytest.mark.parametrize(
    "pattern", [r"\\boxed{e}", r"x{2}{3", r"{s}", r"a{,2}b{1,}", r"\N{BULLET}{i}", r"[{e}]{d}"]
)
def test_a_pattern_means_what_it_means_to_re(pattern: str) -> None:
    for reply in ("\\boxed{e}", "\\boxed", "xx{3", "xx", "{s}", "aab", "b", "\u2022{i}", "\u2022", "e{d}", "e"):
        assert bool(text.limited("search", pattern)(reply)) == bool(re.search(pattern, reply)), reply


def test_a_response_template_of_the_tokenizer_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PARSE_SECONDS", 5.0)
    own = {**calls._QWEN_XML, "fields": dict(calls._QWEN_XML["fields"])}
    own["fields"]["tool_calls"] = {**own["fields"]["tool_calls"], "open_pattern": r"(?P<name>(?:a|aa)+)<call>"}
    tokenizer = SimpleNamespace(decode=lambda ids, **_: ids[0])
    restarted = Restarted(calls._start)
    reader = calls.ResponseReader(cast(Any, SimpleNamespace(tokenizer=tokenizer)), own, "", restarted)
    slow, quick = "a" * 60 + "b", "So. aa<call></function></tool_call>"
    try:
        assert reader(slow, cast(Any, [slow])).calls == (ToolCall("", slow),)
        read = reader(quick, cast(Any, [quick]))
        assert (read.text, len(read.calls)) == ("So.", 1)  # another process reads on
    finally:
        restarted.close()


NUMBERS = [
    "1" + "0" * 400, "1e999", "-1e999", "NaN", "1e39", "true", '"1"', "[" * 100_000, "[1]", "{}", "1" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_of_a_service_is_a_score_or_a_failure_that_names_it(number: str) -> None:
    def served(body: Any, _: int) -> Any:
        if "completions" in body:
            return 200, f'{{"scores": [{number}]}}'.encode()
        reply, usage = json.dumps(f'{{"score": {number}}}'), f'{{"prompt_tokens": {number}}}'
        return 200, f'{{"choices": [{{"message": {{"content": {reply}}}}}], "usage": {usage}}}'.encode()

    with scoring_server(served) as server:
        http = Http(HttpConfig(url=server.url, retries=0))
        judge = Judge(JudgeConfig(url=server.url, model="m", json_field="score", retries=0))
        for reward in (http, judge):
            (score,) = asyncio.run(
                reward(prompts=["p"], completions=["c"], log_metric=lambda name, value: None)
            )
            assert isinstance(score, FailedScore)
            assert any(word in score.reason for word in ("service", "judge", server.url))


@pytest.mark.parametrize("value", [10**400, 10**5000, 1e39, float("inf"), "1", None, [1]], ids=type)
def test_a_foreign_value_is_a_finite_float_or_a_failed_score_with_its_source(value: Any) -> None:
    score = foreign_score(value, "the service answered")
    assert isinstance(score, FailedScore)
    assert score.reason.startswith("the service answered ")
    assert foreign_score(3, "") == 3.0
    with pytest.raises(NotPlain, match="reward"):
        plain_number(value, "reward")
    if isinstance(value, int):
        with pytest.raises(NotPlain, match=r"info\['a'\] is a whole number"):
            plain_value({"a": value}, "info")
        assert checked_scores([value, 1.0], 2).values == [None, 1.0]


def test_what_nests_deep_is_no_plain_value() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(NotPlain, match="deeper than 100 levels"):
        plain_value({"a": deep}, "info")


def test_scores_whose_sum_is_beyond_float32_are_told() -> None:
    rewards = torch.tensor([[1.0, 2.0], [3e38, 3e38]])
    with pytest.raises(RunFailed, match=r"weighted sum of the rewards \[3.*, 3.*\] is 6e\+38"):
        weighted_sum(rewards, torch.ones(2))
    assert weighted_sum(rewards, torch.tensor([1.0, -1.0])).tolist() == [-1.0, 0.0]
