"""Needs of losses, of their terms and of samples of an earlier policy, and the rest of a run file."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpox.cli.app import app
from grpox.errors import ConfigError, Problem
from grpox.runfile.load import load_run

LOSSES = """
from grpox.contracts import Reduction

class Sampled:
    reduction = Reduction.TOKEN_MEAN
    needs = ("sampler_logprobs",)
    def per_token(self, inputs): ...

class Referred(Sampled):
    needs = ("reference_logprobs",)

class OfGroups(Sampled):
    scope = "group"
    needs = ("group_ids",)

class Nameless(OfGroups):
    needs = ()

class OfRows(OfGroups):
    scope = "rows"

class Everything(OfGroups):
    needs = ("entropy_gradient", "reference_logprobs", "sampler_logprobs", "rewards", "group_ids",
             "sequence_ids", "columns")
"""
NEAR = "train.off_policy_mask_threshold=0.5"
ROUNDS = "train.dynamic_sampling_rounds=2"
SERVER = "generator=vllm-server"
AHEAD = "train.max_staleness=1"
MUTE = "class Mute:\n    start = generate = sync = sleep = wake = close = lambda *_: None\n"


@pytest.fixture(autouse=True)
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("losses.py").write_text(LOSSES)
    Path("mute.py").write_text(MUTE)


def loss(name: str) -> str:
    return f"loss={{path: losses.py:{name}}}"


def problems(*overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_run("quickstart", overrides)
    return list(caught.value.problems)


def test_a_loss_may_need_all_of_them() -> None:
    run = load_run("quickstart", [loss("Everything")])
    assert run.needs_reference
    assert not load_run("quickstart", [loss("OfGroups")]).needs_reference
    assert load_run("quickstart", ["train.beta=0.1"]).needs_reference


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (loss("Sampled"), "loss"),
        (NEAR, "train.off_policy_mask_threshold"),
        ("train.old_logprobs=generator", "train.old_logprobs"),
    ],
)
def test_what_reads_the_generators_log_probabilities_needs_them_unchanged(override: str, key: str) -> None:
    (problem,) = problems(override, "generator={path: mute.py:Mute}")
    assert problem.key == key
    assert "does not say that it reports log-probabilities" in problem.what
    (problem,) = problems(override, "sampling.top_p=0.9")
    assert (problem.key, problem.given) == (key, "sampling with top_p 0.9")


def test_a_reference_may_follow_without_a_penalty_if_the_loss_needs_it() -> None:
    load_run("quickstart", [loss("Referred"), "train.sync_ref_model=true"])
    (problem,) = problems(loss("Sampled"), "train.sync_ref_model=true")
    assert (problem.key, problem.given) == ("train.sync_ref_model", "true")


@pytest.mark.parametrize(("size", "nearest"), [(8, "16"), (24, "16 or 32"), (40, "32 or 48")])
def test_a_batch_size_that_parts_groups_of_16_is_refused(size: int, nearest: str) -> None:
    sizes = (f"train.per_device_train_batch_size={size}", "train.gradient_accumulation_steps=2")
    (problem,) = problems(loss("OfGroups"), *sizes)
    assert (problem.key, problem.given) == ("train.per_device_train_batch_size", str(size))
    assert problem.nearest == nearest
    load_run("quickstart", [loss("Sampled"), *sizes])


@pytest.mark.parametrize(
    ("prompt", "least"),
    [("data.max_prompt_length=10", 16 * (10 + 4)), ("data.max_prompt_length=null", 16 * (1 + 4))],
)
def test_a_budget_less_than_a_group_can_need_is_refused(prompt: str, least: int) -> None:
    budget = "train.max_tokens_per_micro_batch={}"
    load_run("quickstart", [loss("OfGroups"), prompt, budget.format(least)])
    (problem,) = problems(loss("OfGroups"), prompt, budget.format(least - 1))
    assert (problem.key, problem.given) == ("train.max_tokens_per_micro_batch", str(least - 1))
    load_run("quickstart", [loss("Sampled"), prompt, budget.format(least - 1)])


def test_the_memory_plan_counts_the_reference_that_a_loss_needs() -> None:
    from grpox.policy.memory_plan.of_run import run_setting

    plain, referred = (
        run_setting(load_run("quickstart", [loss(name)]), False) for name in ("OfGroups", "Referred")
    )
    assert (plain.reference, referred.reference) == (False, True)


# -- Terms of the loss, and groups that are sampled again -------------------------------------------------


def test_all_of_them_together_are_taken() -> None:
    load_run("quickstart", [NEAR, ROUNDS, "train.entropy_coef=0.01", "train.top_entropy_quantile=0.2"])
    load_run("quickstart", ["train.entropy_coef=0.02", "train.adaptive_entropy={min: 0.01, max: 0.02}"])


COEF, ADAPTIVE = "train.entropy_coef={}", "train.adaptive_entropy={{{}}}"


@pytest.mark.parametrize(
    ("overrides", "key", "given", "cure"),
    [
        (["train.old_logprobs=generator", "correction=token-truncate"], "correction", "", "none"),
        ([loss("Nameless")], "loss", "needs ()", "needs = ('group_ids',)"),
        ([loss("OfRows")], "loss", "'rows'", ""),
        (["advantage={path: scaler.py:Mine}"], "advantage", "needs ('rewards',)", "that does without it"),
        ([COEF.format(0), ADAPTIVE.format("min: 0.5, max: 0.2")], "train.adaptive_entropy.min", "0.5", "0.2"),
        ([COEF.format(0), ADAPTIVE.format("min: 0.01")], "train.entropy_coef", "0", "0.01"),
        ([COEF.format(2), ADAPTIVE.format("")], "train.entropy_coef", "2", "1"),
        ([ROUNDS, "train.max_steps=-1"], "train.max_steps", "-1", "at least 0"),
        ([ROUNDS, AHEAD, SERVER], "train.dynamic_sampling_rounds", "2", "null, or train.max_staleness: 0"),
        ([AHEAD, "generator=hf"], "train.max_staleness", "1", "0 or with generator vllm-server"),
        ([AHEAD, "generator=vllm-colocate"], "train.max_staleness", "1", "0 or with generator vllm-server"),
        ([AHEAD, SERVER, "correction=none"], "train.max_staleness", "1", "0, or a correction such as"),
        ([AHEAD, SERVER, "correction=none"], "train.max_staleness", "1", "or train.old_logprobs: generator"),
        ([AHEAD, SERVER, "sampling.top_p=0.9"], "train.max_staleness", "1, sampling with top_p 0.9, ", "0"),
    ],
)
def test_what_does_not_go_together(overrides: list[str], key: str, given: str, cure: str) -> None:
    Path("scaler.py").write_text("class Mine:\n    needs = ('rewards',)\n    def scale(self, *_): ...\n")
    problem = next(problem for problem in problems(*overrides) if problem.key == key)
    assert given in f"{problem.given} {problem.what}"
    assert cure in f"{problem.nearest} {problem.allowed}"


def test_the_plan_says_that_it_replaces_nothing() -> None:
    arguments = ["plan", "quickstart", "--generations", "1"]
    plain, dynamic = (CliRunner().invoke(app, [*arguments, *more]).output for more in ([], [ROUNDS]))
    assert "dynamic sampling" not in plain
    told = " ".join(dynamic.split())
    assert "shown without dynamic sampling" in told
    assert "at most; fewer if dynamic sampling replaces groups" in told


# -- Samples of an earlier policy --------------------------------------------------------------------------


def test_a_generator_that_samples_ahead_and_a_correction_are_taken() -> None:
    assert load_run("quickstart", [SERVER, AHEAD]).config.correction.name == "token-truncate"
    given = load_run("quickstart", [SERVER, AHEAD, "correction=token-mask"])
    assert given.config.correction.name == "token-mask"
    of_generator = load_run("quickstart", [SERVER, AHEAD, "train.old_logprobs=generator"])
    assert of_generator.config.correction.name == "none"
