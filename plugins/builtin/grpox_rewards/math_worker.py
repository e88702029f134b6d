"""The program that `grpox_rewards.math` runs: it reads requests as JSON and writes words."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import resource
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from grpox.runtime.child import connect_to_parent

MEMORY_BYTES = 4 * 1024**3
"""Limit of the address space in bytes: an expression such as 9**9**9**9 raises MemoryError before it fills the
machine."""
DELIMITERS = ("$", "\\boxed", "\\(", "\\[")
# Three letters in a row outside braces that are no LaTeX command: a sentence, not an expression.
PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}")
ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
"""Without another one inside: each opening would be searched to the end of the text."""
TARGETS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def expressions(text: str) -> list[Any]:
    """Return math-verify's reading of running text: a sympy expression and its string, or fewer items."""
    # math-verify's own time limit is off, because the requesting process kills this one.
    parsed: list[Any] = parse(text, TARGETS, extraction_mode="first_match", parsing_timeout=None)
    return parsed


@functools.lru_cache(maxsize=1024)
def answer_expressions(answer: str) -> list[Any]:
    """Return expressions like `expressions` does, from text that is only an answer and may be LaTeX without
    delimiters."""
    answer = answer.replace("\\$", "")  # the sign of dollars, which marks no formula
    bare = not any(mark in answer for mark in DELIMITERS) and not PROSE.search(answer)
    parsed = expressions(f"${answer}$") if bare else []
    return parsed if _readable(parsed) else expressions(answer)


def judge(answer: str, completion: str) -> str:
    r"""Return the verdict: "right" or "wrong", or "unreadable" if the answer contains no expression.

    From a completion with ``<answer>...</answer>``, the last such answer counts; otherwise its last expression,
    preferably one in \boxed.
    """
    gold = answer_expressions(answer)
    if not _readable(gold):
        return "unreadable"
    tagged = ANSWER_TAG.findall(completion)
    given = answer_expressions(tagged[-1]) if tagged else expressions(completion)
    return "right" if verify(gold, given, timeout_seconds=None) else "wrong"


def _readable(parsed: list[Any]) -> bool:
    return any(not isinstance(expression, str) for expression in parsed)


def main() -> None:
    """Report that a first judgement has succeeded, then answer each request until the parent ends."""
    parent = connect_to_parent()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if judge("\\frac{1}{2}", "It is $0.5$.") != "right":
        raise RuntimeError("math-verify does not find 1/2 and 0.5 equal")
    parent.send_bytes(b"ready")
    with contextlib.suppress(EOFError):
        while True:
            request = json.loads(parent.recv_bytes())
            parent.send_bytes(judge(request["answer"], request["completion"]).encode())


if __name__ == "__main__":
    main()
