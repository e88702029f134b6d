"""Text from models, tools and services: read in linear time, or by a user's pattern within a limit."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from grpox.environments.tools import Tool
from grpox.errors import plain, shorten
from grpox.errors.redaction import redact
from grpox.observing.page.data import cut_text
from grpox.rollout.episodes import calls
from grpox_environments.calculator import CALL, SUM
from grpox_environments.lake import Lake
from grpox_rewards import math_worker, text
from grpox_rewards.code import code_in
from grpox_rewards.configs import FormatConfig, JudgeConfig, RegexConfig, RepetitionConfig
from grpox_rewards.judge import read_score
from grpox_rewards.repetition import Repetition

SHORT, LONG, MOST = 50_000, 200_000, 8.0
NOISE = 0.02
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
    return calls.ResponseReader(chat, calls._QWEN_XML, "<|im_start|>assistant\n").read(reply, (), ())


def quietly(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def call(reply: str) -> Any:
        try:
            return read(reply)
        except ValueError:
            return None

    return call


READERS: dict[str, Callable[[str], Any]] = {
    "calls of Hermes": lambda reply: calls.HermesReader().read(reply, (), ()),
    "calls of Llama": lambda reply: calls.JsonReader().read(reply, (), ()),
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
HEADS = [
    "",
    "<tool_call>\n<function=a>",
    '{"name": "a", "parameters": {"a": "',
    "```json",
    "Score: 1",
    "<think>",
]


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
    for head in HEADS:
        for unit in UNITS:
            with limit(20.0):
                long = seconds_of(READERS[name], head, unit, LONG)
                if long > MOST * NOISE:
                    short = min(seconds_of(READERS[name], head, unit, SHORT) for _ in range(2))
                    if long > MOST * max(short, NOISE):
                        slow.append((head, unit, short, long))
    assert not slow
