"""The suites of all kinds but environments: right components pass, and each fault is found by its check."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.mlflow_store import migrated_store
from support.scoring_server import Answer, chat, scoring_server

from grpox.errors import RunFailed
from grpox.plugins.registry import installed
from grpox.testing import observers
from grpox.testing.conformance import Conformance, Violation
from grpox.testing.runner import SUITES, Outcome, outcomes

HERE = Path(__file__).parent
REWARDS: dict[str, dict[str, Any]] = {
    "exact": {"column": "answer"},
    "math": {},
    "code": {},
    "regex": {"pattern": r"\d+"},
    "format": {},
    "length": {"target": 10},
    "soft_overlong": {"max_length": 8, "buffer": 4},
    "cosine": {"max_length": 8},
    "repetition": {},
    "environment": {},
}
"""All but those that need a model or a server: name -> parameters."""
SERVED: dict[str, dict[str, Any]] = {"http": {}, "judge": {"model": "m", "prompt": "{prompt}: {completion}"}}
"""Rewards of a server: name -> parameters beside its address."""
INSTALLED = [
    *sorted(
        {
            (offer.kind, offer.qualified_name)
            for offer in installed().plugins.offers
            if offer.kind in ("loss", "advantage", "correction")
        }
    ),
    *(("reward", {"name": name, **parameters}) for name, parameters in REWARDS.items()),
]
"""Kind and component of all that is installed and needs neither model nor server."""
RIGHT = {
    ("loss", "losses"): "Right EntropyAsConstant EntropyWithGradient OwnColumns OfGroups OtherSign AnyDevice",
    ("advantage", "scalers"): "Right OfInputs OfTurns OfTokens DeclaredWrongSign OfTheirDevice",
    ("correction", "scalers"): "RightCorrection DeclaredInverted",
    ("loss", "states"): "Right",
    ("reward", "states"): "RightReward",
    ("reward", "rewards"): "right asks_for_an_answer UsesOrder compares_with_others never_the_same",
    ("optimizer", "training"): "RightOptimizer Plain DeclaredNorm",
    ("scheduler", "training"): "RightSchedule",
    ("dataset", "training"): "RightData Stream",
    ("observer", "observers"): "Right",
}
"""Kind and file broken_*.py -> components without a fault."""
FAULTS = {
    ("loss", "losses"): (
        ("NeedsUndeclared", "runs_on_what_it_declares", r"needs=\('entropy',\)"),
        ("OneNumber", "runs_on_what_it_declares", r"\[B, T\]"),
        ("OfOneDtype", "dtype", "float64"),
        ("DrawsNumbers", "pure", "random"),
        ("TrainsItself", "gradient_reaches_log_probabilities_only", "of its own"),
        ("HiddenGradient", "gradient_is_that_of_its_value", "gradient = 'surrogate'"),
        ("SurrogateOfAnother", "gradient_is_that_of_its_value", "expected_gradient says"),
        ("ZeroOnlySaid", "zero_advantage", "advantage is 0"),
        ("MixesRows", "rows_are_independent", "by itself"),
        ("NeedsAToken", "all_masked", "wholly masked"),
        ("Overflows", "extreme_ratios", "not finite"),
        ("LosesDigits", "bfloat16", "bfloat16"),
        ("AveragesDiagnostics", "diagnostics", "micro-batch"),
        ("FirstSequenceOnly", "permutation", "another order"),
        ("WrongSign", "sign", "lowers the probability of a token with advantage 1"),
        ("PositiveOnly", "sign", "does not train on a token with advantage -1"),
        ("RemembersTheLargest", "call_order", "other batches"),
        ("EntropyWithoutGradient", "entropy", "entropy_as_constant = True"),
        ("HiddenEntropyGradient", "entropy", "by the entropy"),
        ("ZeroButForEntropy", "zero_advantage", "advantage is 0"),
        ("NeedsRewards", "runs_on_what_it_declares", r"needs=\('rewards',\)"),
        ("NeedsColumns", "runs_on_what_it_declares", r"needs=\('columns',\)"),
        ("MisspeltNeed", "runs_on_what_it_declares", "'entropi'.*\n.*'entropy'"),
        ("MisspeltStatistic", "runs_on_what_it_declares", "the statistic 'ratoi', which no step has"),
        ("NotANumber", "runs_on_what_it_declares", "its loss is not finite"),
        ("OfPartedGroups", "rows_are_independent", "scope = 'group'"),
        ("OfNamelessGroups", "runs_on_what_it_declares", r"needs = \('group_ids',\)"),
        ("GroupsByPlace", "permutation", "another order"),
        ("SequenceOnlySaid", "level", "'sequence', and its tokens do not depend"),
        ("TokenOnlySaid", "level", "'token', and its tokens depend"),
    ),
    ("loss", "handlers"): (
        ("HidesErrors", "exceptions", "raised at broken_handlers.py:19 is lost"),
        ("RemarksAndHidesErrors", "exceptions", "raised at broken_handlers.py:19 is lost"),
    ),
    ("advantage", "scalers"): (
        ("OneNumber", "runs", "one number for each"),
        ("ScalesInPlace", "pure", "in place"),
        ("Distance", "direction", "not around 0|smaller advantage"),
        ("OnlyZeros", "direction", "not around 0"),
        ("EqualWeights", "weights", "other weights"),
        ("OneForAllTurns", "turns", "one number per turn"),
        ("TurnsAsSums", "signal", "equal rewards in different turns .*"),
        ("EnlargesRounding", "signal", "a group of equal rewards has advantages of 7e-05"),
    ),
    ("correction", "scalers"): (
        ("WeightsAlone", "runs", r"\(weights, keep\)"),
        ("CarriesGradient", "runs", "gradient"),
        ("ChangesSampler", "pure", "in place"),
        ("NeverOne", "identity", "weigh by 1"),
        ("NeverOne", "missing_log_probabilities", "weigh by 1"),
        ("Overflows", "extreme_differences", "not finite"),
        ("NeedsAToken", "all_masked", "raised"),
    ),
    ("reward", "rewards"): (
        ("one_number", "runs", "not a list"),
        ("one_too_few", "runs", "6 scores for 7 completions"),
        ("not_finite", "runs", "finite"),
        ("needs_a_word", "runs", "IndexError"),
        ("strips_in_place", "pure", "changes completions"),
        ("KeepsState", "two_at_once", "two calls at once"),
        ("first_is_best", "alignment", "scores of others"),
    ),
    ("optimizer", "training"): (
        ("OwnRate", "runs", "no group has it"),
        ("RemembersItsRate", "learning_rate", "moves weights"),
        ("DividesByNorm", "partitions", "on 1 rank it takes other steps"),
        ("NeedsMatrices", "partitions", "fails on a flat part"),
    ),
    ("scheduler", "training"): (
        ("BelowZero", "runs", "not finite and at least 0"),
        ("AlwaysZero", "runs", "has learning rate 0"),
        ("AboveTheRate", "learning_rate", "the largest rate is 1, more than"),
        ("EndsEarly", "runs", "step 6 of 12 raises IndexError"),
        ("FirstGroupOnly", "groups", "before step 2 two groups"),
    ),
    ("dataset", "training"): (
        ("AList", "runs", r"load\(\) returned a list"),
        ("NoRows", "runs", "no row"),
        ("NoPrompts", "runs", "no column 'prompt' but question, answer"),
        ("EmptyPrompt", "prompts", "neither text nor messages"),
        ("TakesAnArgumentsName", "columns", "column 'completions'"),
        ("OfItsProcess", "other_process", "on rank 1 it has other rows"),
    ),
    ("observer", "observers"): (
        ("WantsMore", "runs", "no such server"),
        ("DividesByRewards", "runs", "grpox_rollouts_scored: TypeError"),
        ("FailsOnFailure", "failed_runs", "grpox_run_failed: IndexError"),
        ("FormatsIntegers", "odd_numbers", "NaN"),
    ),
    ("loss", "states"): (
        ("FailsOnNothing", "state", "end_step raises for a step that was skipped: RuntimeError"),
        ("CountsTokens", "state", r"calls on other rows leave another state, at \['mean'\]"),
    ),
    ("reward", "states"): (("LoadsOther", "state", r"returns another one, at \['calls'\]"),),
}
"""Kind and file broken_*.py -> class, the check meant for its fault, and what that says."""


def of(file: str, name: str) -> dict[str, str]:
    return {"path": f"{HERE}/broken_{file}.py:{name}"}


def suite_of(kind: str, component: Any, **own: Any) -> Conformance:
    return type("Suite", (SUITES[kind],), {"component": component, **own})()


def checked(kind: str, component: Any, **own: Any) -> dict[str, Outcome]:
    return {each.check.removeprefix("test_"): each for each in outcomes(suite_of(kind, component, **own))}


def failed(kind: str, component: Any, **own: Any) -> dict[str, str]:
    made = checked(kind, component, **own)
    return {check: outcome.what for check, outcome in made.items() if outcome.status == "failed"}


@pytest.mark.parametrize(("kind", "component"), INSTALLED, ids=str)
def test_every_installed_one_conforms(kind: str, component: Any) -> None:
    assert failed(kind, component) == {}


def test_all_rewards_but_a_model_are_checked_here() -> None:
    names = {offer.spec.name for offer in installed().plugins.offers if offer.kind == "reward"}
    assert names - set(REWARDS) - set(SERVED) == {"reward_model"}


@pytest.mark.parametrize("name", SERVED)
def test_rewards_of_a_server_conform_with_one(name: str) -> None:
    def answer(body: Any, _: int) -> Answer:
        texts = body.get("completions") or [body["messages"][-1]["content"]]
        scores = [float(len(str(text)) % 10) for text in texts]
        return 200, {"scores": scores} if name == "http" else chat(f"Score: {scores[0]:g}")

    with scoring_server(answer) as server:
        made = checked("reward", {"name": name, "url": server.url, **SERVED[name]})
    assert [outcome.what for outcome in made.values() if outcome.status == "failed"] == []
    assert {"alignment", "direction"} <= made.keys()


def test_the_tracker_conforms(monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder = observers._folder

    @contextmanager
    def folder_with_a_store() -> Iterator[Path]:
        with run_folder() as folder:
            migrated_store(Path.cwd())
            yield folder

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(observers, "_folder", folder_with_a_store)
    assert failed("observer", "mlflow") == {}


@pytest.mark.parametrize(
    ("kind", "file", "name"), [(*place, name) for place, names in RIGHT.items() for name in names.split()]
)
def test_what_is_right_passes(kind: str, file: str, name: str) -> None:
    assert failed(kind, of(file, name)) == {}


def test_exceptions_may_be_reported_expected_or_hidden_on_purpose(tmp_path: Path) -> None:
    for name in ("Reports", "Warns", "Expects", "Notes", "Keeps"):
        suite_of("loss", of("handlers", name)).test_exceptions()
    source = (HERE / "broken_handlers.py").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(source.replace("Exception:", "Exception:  # noqa: BLE001 - so", 1))
    suite_of("loss", {"path": f"{tmp_path}/mine.py:HidesErrors"}).test_exceptions()
    other = source.replace("caught as error:", "caught as error:  # noqa: BLE001 - another one")
    (tmp_path / "other.py").write_text(other)
    with pytest.raises(Violation, match=r"raised at other\.py:19 is lost"):
        suite_of("loss", {"path": f"{tmp_path}/other.py:HidesErrors"}).test_exceptions()


@pytest.mark.parametrize(
    ("kind", "file", "name", "check", "words"),
    [(*place, *fault) for place, faults in FAULTS.items() for fault in faults],
)
def test_each_fault_is_found_by_the_check_meant_for_it(
    kind: str, file: str, name: str, check: str, words: str
) -> None:
    with pytest.raises((Violation, RunFailed)) as caught:
        getattr(suite_of(kind, of(file, name)), f"test_{check}")()
    error = caught.value
    text = f"{error.what}\n{error.advice}" if isinstance(error, Violation) else str(error)
    assert re.search(words, text), text


def test_the_smallest_example_is_shown() -> None:
    """A mixture of rows shows on two sequences of one token, and not on one."""
    example = checked("loss", of("losses", "MixesRows"))["rows_are_independent"].example
    assert [line.split()[1] for line in example.splitlines() if line.startswith("logprobs")] == ["[0]", "[1]"]
    assert all(len(line.split()) == 3 for line in example.splitlines())
    assert "group " in checked("advantage", of("scalers", "OnlyZeros"))["direction"].example
    assert "sampler" in checked("correction", of("scalers", "NeverOne"))["identity"].example


def test_completions_that_the_author_ranks_are_scored_in_that_order() -> None:
    ranked = ("short", "rather long")
    assert not failed("reward", of("rewards", "the_shorter_the_better"), ranked=ranked)
    outcome = checked("reward", of("rewards", "right"), ranked=ranked)["direction"]
    assert (outcome.status, outcome.example.splitlines()[-1]) == ("failed", "scores [5.0, 11.0]")


def test_odd_completions_are_tried_beside_those_of_the_author() -> None:
    made = checked("reward", of("rewards", "needs_a_word"), completions=("two words",))
    assert [check for check, outcome in made.items() if outcome.status == "failed"] == ["odd_completions"]
    assert made["odd_completions"].example == "completion 0: ''"


@pytest.mark.parametrize(
    ("name", "check", "words"),
    [
        ("of_other_data", "runs", "abstained from all"),
        ("never_the_same", "the_same_twice", "second time"),
        ("compares_with_others", "the_same_twice", "other completions"),
    ],
)
def test_a_remark_on_a_reward_is_no_failure(name: str, check: str, words: str) -> None:
    outcome = checked("reward", of("rewards", name))[check]
    assert (outcome.status, words in outcome.what) == ("passed", True)


def test_a_component_that_does_not_run_is_told_once_also_of_a_relative_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(HERE)
    assert list(checked("loss", {"path": "broken_losses.py:OneNumber"})) == ["runs_on_what_it_declares"]
    suite_of("observer", {"path": "broken_observers.py:Right"}).test_runs()


def test_a_loss_that_declares_to_mix_rows_is_not_asked_for_what_it_cannot() -> None:
    made = checked("loss", of("losses", "FirstSequenceOnly"))
    skipped = {check for check, outcome in made.items() if outcome.status == "skipped"}
    assert skipped == {"rows_are_independent", "micro_batches_and_ranks"}


def test_that_it_runs_is_checked_first_and_its_state_last() -> None:
    names = [check.name for check in suite_of("loss", of("states", "Right")).checks()]
    assert (names[0], names[-1]) == ("test_runs_on_what_it_declares", "test_state")
    assert next(iter(suite_of("advantage", "group").checks())).name == "test_runs"


def test_a_check_in_which_the_component_exits_has_failed() -> None:
    class Exits(Conformance):
        def test_runs(self) -> None:
            """Runs."""
            sys.exit(0)

    [outcome] = outcomes(Exits())
    assert outcome.status == "failed"
    assert outcome.what.startswith("SystemExit: 0 (test_conformance.py:")


def test_a_loss_is_checked_without_importing_transformers() -> None:
    code = (
        "import sys; from grpox.cli import main\n"
        "sys.argv = ['grpox', 'plugins', 'check', 'dapo']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print({'transformers', 'deepspeed', 'datasets', 'mlflow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
