"""A loss that needs more inputs, or whole groups, and the rest of a run file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpox.config import RunConfig
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


def test_a_generator_that_reports_no_log_probabilities_is_refused() -> None:
    (problem,) = problems(loss("Sampled"), "generator={path: mute.py:Mute}")
    assert problem.key == "loss"
    assert "does not say that it reports log-probabilities" in problem.what
    assert "Sampled" in str(problem.given)


def test_log_probabilities_of_another_distribution_are_refused() -> None:
    (problem,) = problems(loss("Sampled"), "sampling.top_p=0.9")
    assert problem.key == "loss"
    assert "top_p 0.9" in str(problem.given)


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


def test_a_loss_of_groups_has_to_know_them() -> None:
    (problem,) = problems(loss("Nameless"))
    assert problem.key == "loss"
    assert "group_ids" in problem.allowed


def test_a_scope_that_is_none_is_refused() -> None:
    (problem,) = problems(loss("OfRows"))
    assert problem.key == "loss"
    assert "'rows'" in problem.what


def test_another_component_cannot_need_what_only_losses_are_given() -> None:
    Path("scaler.py").write_text("class Mine:\n    needs = ('rewards',)\n    def scale(self, *_): ...\n")
    (problem,) = problems("advantage={path: scaler.py:Mine}")
    assert problem.key == "advantage"
    assert "needs 'rewards'" in problem.what


def test_the_memory_plan_counts_the_reference_that_a_loss_needs() -> None:
    from grpox.policy.memory_plan.of_run import run_setting

    plain, referred = (
        run_setting(load_run("quickstart", [loss(name)]), False) for name in ("OfGroups", "Referred")
    )
    assert (plain.reference, referred.reference) == (False, True)


def test_the_section_alone_allows_a_reference_that_follows() -> None:
    """A loss that needs the reference is known only to the checks of the whole run."""
    given: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": ["exact"]}
    assert RunConfig.model_validate(given | {"train": {"sync_ref_model": True}}).train.sync_ref_model
