"""Folders of runs for tests of the page, with the files that a run writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from grpox.contracts import Rollout, ScoredRollout
from grpox.observing.record_files import write_completions
from grpox.observing.token_files import token_file, write_tokens
from grpox.policy.batch import TokenRecord
from grpox.update.token_metrics import TokenFacts

VERSIONS = {"versions": {"grpox": "0.1.0"}, "git_commit": "abc", "source": "run.yaml", "total_steps": 10}
CONFIG = """model: {path: m}
train: {max_steps: 10}
rewards: [{name: exact, weight: 1}]
hub: {token: hf_aaaaaaaaaaaa}
"""


def write_record(folder: Path) -> Path:
    """Write the config and the versions of a run that begins."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "versions.json").write_text(json.dumps(VERSIONS | {"world_size": 2}))
    return folder


def metrics_line(step: int, values: Mapping[str, float | str], kind: str = "metrics", time: float = 0.0) -> str:
    """A line of ``metrics.jsonl``."""
    return json.dumps({"step": step, "time": time or 1000.0 + step, kind: values}) + "\n"


def append_metrics(folder: Path, *lines: str) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(lines)


def write_batch(folder: Path, step: int, rows: Sequence[tuple[str, str, float]], part: str = "") -> Path:
    """Write a file of completions from (prompt, completion, reward)."""
    rollouts = [
        ScoredRollout(
            Rollout(place // 2, place % 2, (1,), (2, 3), "stop", policy_version=step),
            prompt,
            completion,
            {"exact": reward},
            reward=reward,
            advantage=reward - 0.5,
            columns={"answer": len(completion)},
        )
        for place, (prompt, completion, reward) in enumerate(rows)
    ]
    path = folder / "completions" / f"step_{step:06d}{part}.parquet"
    write_completions(path, step, rollouts)
    return path


def token_facts(
    step: int = 1, part: int = 1, group: int = 0, sample: int = 0, ids: Sequence[int] = (7, 8, 9, 0)
) -> TokenFacts:
    """Facts of a completion whose second token is an observation, and whose numbers ascend from 0."""
    numbers = np.arange(len(ids), dtype=np.float32)
    written = np.arange(len(ids)) != 1
    turns = np.where(written, np.arange(len(ids)) // 2, -1).astype(np.int32)
    return TokenFacts(
        TokenRecord(step, part, group, sample, turns),
        ids=np.array(ids, np.int32),
        is_scored=written,
        is_counted=written & (np.arange(len(ids)) != 2),
        sampler_logprob=-numbers,
        advantage=numbers + 0.5,
        logprob=-numbers - 0.25,
        ratio=numbers + 1,
        entropy=numbers / 4,
        correction=np.ones(len(ids), np.float32),
    )


def record_tokens(folder: Path, step: int, *completions: TokenFacts) -> None:
    """Write the tokens of a step as texts such as ``<7>``; 0 is a special token."""
    texts: Any = SimpleNamespace(
        of=lambda ids: ["" if each == 0 else f"<{each}>" for each in ids],
        special=lambda token: None if token else "<end>",
    )
    write_tokens(token_file(folder, step), completions, texts)
