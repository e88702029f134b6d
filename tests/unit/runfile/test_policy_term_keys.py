"""Run-file rules of entropy, off-policy masks and dynamic sampling, and their lines in `grpox plan`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpox.cli.app import app
from grpox.config import RunConfig
from grpox.errors import ConfigError, Problem
from grpox.runfile.load import load_run

NEAR = "train.off_policy_mask_threshold=0.5"
ROUNDS = "train.dynamic_sampling_rounds=2"


def problems(*overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_run("quickstart", overrides)
    return list(caught.value.problems)


def test_all_of_them_are_off_unless_a_run_file_says_otherwise() -> None:
    train = RunConfig.model_fields["train"].default
    assert (train.entropy_coef, train.top_entropy_quantile) == (0, 1)
    assert train.off_policy_mask_threshold is train.adaptive_entropy is None
    assert train.dynamic_sampling_rounds is None


def test_all_of_them_together_are_taken() -> None:
    load_run("quickstart", [NEAR, ROUNDS, "train.entropy_coef=0.01", "train.top_entropy_quantile=0.2"])


@pytest.mark.parametrize(
    ("start", "adaptive", "key", "given", "nearest"),
    [
        ("0", "{min: 0.5, max: 0.2}", "train.adaptive_entropy.min", "0.5", ""),
        ("0", "{min: 0.01}", "train.entropy_coef", "0", "0.01"),
        ("2", "{}", "train.entropy_coef", "2", "1"),
    ],
)
def test_a_coefficient_outside_its_bounds_is_refused(
    start: str, adaptive: str, key: str, given: str, nearest: str
) -> None:
    (problem,) = problems(f"train.entropy_coef={start}", f"train.adaptive_entropy={adaptive}")
    assert (problem.key, problem.given, problem.nearest) == (key, given, nearest)
    load_run("quickstart", ["train.entropy_coef=0.02", "train.adaptive_entropy={min: 0.01, max: 0.02}"])


def test_a_generator_without_log_probabilities_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "class Mine:\n    start = generate = sync = sleep = wake = close = lambda *_: None\n"
    )
    (problem,) = problems(NEAR, "generator={path: mine.py:Mine}")
    assert (problem.key, problem.given, problem.allowed) == ("train.off_policy_mask_threshold", "0.5", "null")
    assert "does not say that it reports log-probabilities" in problem.what


def test_another_distribution_than_the_trained_one_is_refused() -> None:
    (problem,) = problems(NEAR, "sampling.top_p=0.9")
    assert (problem.key, problem.given) == ("train.off_policy_mask_threshold", "sampling with top_p 0.9")


def test_dynamic_sampling_needs_a_number_of_steps() -> None:
    (problem,) = problems(ROUNDS, "train.max_steps=-1")
    assert (problem.key, problem.given, problem.allowed) == ("train.max_steps", "-1", "at least 0")
    assert "train.dynamic_sampling_rounds" in problem.what


def test_dynamic_sampling_does_not_sample_ahead() -> None:
    (problem,) = problems(ROUNDS, "train.max_staleness=1", "generator=vllm-server")
    assert (problem.key, problem.given) == ("train.dynamic_sampling_rounds", "2")
    assert problem.allowed == "null, or train.max_staleness: 0"


def test_the_plan_says_that_it_replaces_nothing() -> None:
    arguments = ["plan", "quickstart", "--generations", "1"]
    plain, dynamic = (CliRunner().invoke(app, [*arguments, *more]).output for more in ([], [ROUNDS]))
    assert "dynamic sampling" not in plain
    told = " ".join(dynamic.split())
    assert "shown without dynamic sampling" in told
    assert "at most; fewer if dynamic sampling replaces groups" in told
