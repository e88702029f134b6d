"""A component's parameters that are input paths follow the run file, and are checked while it is read."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.problems import refused

from grpox.errors import ConfigError
from grpox.rollout.rewards.isolation import bind_rewards, reward_functions
from grpox.runfile.load import ResolvedRun, load_run

PLUGIN = """
from pydantic import BaseModel
from grpox.contracts import InputPath, ModelPath


class Words:
    class Config(BaseModel):
        words: InputPath
        judge: ModelPath | None = None
        fallback: InputPath = "/of/its/own"

    def __init__(self, config):
        self.config = config

    def __call__(self, completions, **columns):
        return [0.0] * len(completions)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder with inputs, and another to work in."""
    run = tmp_path / "run"
    for model in ("policy", "judge"):
        (run / model).mkdir(parents=True)
        (run / model / "config.json").write_text("{}")
    (run / "train.jsonl").write_text('{"prompt": "a"}\n' * 8)
    (run / "words.txt").write_text("word\n")
    (run / "reward.py").write_text(PLUGIN)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return run


def read(folder: Path, reward: str, *overrides: str) -> ResolvedRun:
    run_file = folder / "run.yaml"
    run_file.write_text(
        "model: {path: policy}\ndata: {path: train.jsonl}\ntracking: {}\nrewards:\n"
        f"  - {reward}\n"
        "train: {max_steps: 1, num_generations: 2, per_device_train_batch_size: 2}\n"
    )
    return load_run(run_file, overrides, world_size=1)


def test_a_relative_path_starts_from_the_run_file_and_what_is_not_there_is_told(folder: Path) -> None:
    run = read(folder, "{path: 'reward.py:Words', words: words.txt, judge: judge}")
    config = run.build("rewards[0]").config
    assert (config.words, config.judge) == (str(folder / "words.txt"), str(folder / "judge"))
    assert config.fallback == "/of/its/own"
    assert run.config.rewards[0].params == {"words": config.words, "judge": config.judge}
    # One on the command line starts from the working directory.
    Path("mine.txt").write_text("word\n")
    run = read(folder, "{path: 'reward.py:Words', words: words.txt}", "rewards[0].words=mine.txt")
    assert run.build("rewards[0]").config.words == os.path.abspath("mine.txt")
    words, judge = refused(read, folder, "{path: 'reward.py:Words', words: wrods.txt, judge: juge}")
    assert (words.key, words.where) == ("rewards[0].words", f"{folder}/run.yaml:5")
    assert (words.what, words.nearest) == ("no such file or folder", str(folder / "words.txt"))
    assert (judge.key, judge.what) == ("rewards[0].judge", "no such folder")
    assert judge.nearest == str(folder / "judge")


JUDGE = "{name: judge, url: 'http://localhost:1/v1', model: m, cache: %s}"


def test_the_cache_of_a_judge_starts_from_the_run_file_and_need_not_be_there(folder: Path) -> None:
    run = read(folder, JUDGE % "replies")
    assert run.config.rewards[0].params["cache"] == str(folder / "replies")
    run.build("rewards[0]")
    assert (folder / "replies").is_dir()
    assert not os.path.exists("replies")
    run = read(folder, JUDGE % "replies", "rewards[0].cache=here/replies")
    assert run.config.rewards[0].params["cache"] == os.path.abspath("here/replies")
    for name, what in (("words.txt", "is a file, not a folder"), ("words.txt/in", "cannot be created: ")):
        [problem] = refused(read, folder, JUDGE % name)
        assert (problem.key, problem.given) == ("rewards[0].cache", str(folder / name))
        assert problem.what.startswith(what)


def test_what_a_run_file_says_of_failures_reaches_the_function(folder: Path) -> None:
    reward = "{path: 'reward.py:Words', words: words.txt, weight: 2, on_error: abstain, timeout: 3}"
    run = read(folder, reward)
    with reward_functions(run) as functions:
        (named,) = bind_rewards(run.config.rewards, functions, SimpleNamespace(column_names=[], data=""))
    assert (named.label, named.weight, named.on_error, named.timeout) == ("Words", 2.0, "abstain", 3.0)
    with pytest.raises(ConfigError, match=r"rewards\[0\]\.timeout"):
        read(folder, "{name: exact, timeout: 0}")
