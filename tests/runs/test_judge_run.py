"""Whole runs with the reward judge: a real service, its replies from the cache, failures, and its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fixtures import GrpoxCommand
from support.run_files import SHORT, metrics_of
from support.scoring_server import Answer, chat, scoring_server

FEW = (*SHORT, "train.max_steps=2")
KEY = "k-0123456789-of-the-judge"


def grade(body: Any, _: int) -> Answer:
    """Give 10 for the right sum, else 0."""
    completion, answer = body["messages"][-1]["content"].split("|")
    return 200, chat(f"Score: {10 if completion.strip() == answer else 0}", tokens_in=30, tokens_out=4)


def rewards(url: str, **more: str) -> str:
    own = {"url": f"{url}/v1", "model": "m", "prompt": "'{completion}|{answer}'", "back_off": "0", **more}
    judge = ", ".join(f"{name}: {value}" for name, value in own.items())
    return f"rewards=[exact, {{name: judge, {judge}}}]"


def test_a_run_is_judged_and_repeated_from_the_cache_without_the_service(
    grpox: GrpoxCommand, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    settings = {"key_env": "JUDGE_KEY", "cache": "cache", "price_in": "2", "price_out": "10"}
    with scoring_server(grade) as server:
        done = grpox("train", "quickstart", *FEW, rewards(server.url, **settings), "output_dir=runs/first")
        assert done.returncode == 0, done.stderr
    again = grpox("train", "quickstart", *FEW, rewards(server.url, **settings), "output_dir=runs/again")
    assert again.returncode == 0, again.stderr

    first, second = (metrics_of(folder / "runs" / name) for name in ("first", "again"))
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert len(first) == 2
    for step, repeated in zip(first, second, strict=True):
        assert step["rewards/judge/mean"] == step["rewards/exact/mean"] > 0
        assert step["judge/failures"] == 0
        # Each request is of 30 and 4 tokens: 30 * 2 + 4 * 10 = 100 millionths.
        assert step["judge/cost"] == pytest.approx(step["judge/requests"] * 100e-6)
        assert (repeated["judge/cached"], repeated["judge/requests"], repeated["judge/cost"]) == (1, 0, 0)
        same = {name for name in step if name.startswith(("reward", "loss", "grad_norm"))}
        assert {name: step[name] for name in same} == {name: repeated[name] for name in same}
    files = [*(folder / "runs").rglob("*"), *(folder / "cache").rglob("*")]
    assert not [file for file in files if file.is_file() and KEY.encode() in file.read_bytes()]
    assert KEY not in done.stdout + done.stderr + again.stdout + again.stderr


def test_what_the_judge_cannot_score_is_counted_or_ends_the_run(grpox: GrpoxCommand, folder: Path) -> None:
    def answer(body: Any, n: int) -> Answer:
        reply = grade(body, n)[1]["choices"][0]["message"]["content"]
        return (200, chat("I like it.")) if reply == "Score: 0" else (200, chat(reply))

    with scoring_server(answer) as server:
        on_error = rewards(server.url, on_error="abstain")
        abstains = grpox("train", "quickstart", *FEW, on_error, "output_dir=runs/abstains")
        fails = grpox("train", "quickstart", *FEW, rewards(server.url), "output_dir=runs/fails")

    assert abstains.returncode == 0, abstains.stderr
    for step in metrics_of(folder / "runs" / "abstains"):
        assert step["rewards/judge/mean"] == 1  # of those that have a score
        assert step["rewards/judge/errors"] == round(256 * (1 - step["rewards/exact/mean"]))
        assert step["judge/unreadable"] == step["judge/failures"] > 0
    assert fails.returncode == 1
    assert "reward 'judge' has no score for completion " in fails.stderr
    assert "the judge's reply has no scores: 'I like it.'" in fails.stderr
    assert "Traceback" not in fails.stderr
