"""The conformance suite of losses: what is right passes, and each fault is found by the check meant for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpox.plugins.registry import installed
from grpox.testing import LossConformance
from grpox.testing.runner import Outcome, outcomes

BROKEN = Path(__file__).with_name("broken_losses.py")
BUILT_IN = sorted({offer.spec.name for offer in installed().plugins.offers if offer.kind == "loss"})


def checked(component: str | dict[str, str]) -> dict[str, Outcome]:
    suite = type("Suite", (LossConformance,), {"component": component})
    return {outcome.check.removeprefix("test_"): outcome for outcome in outcomes(suite())}


def failed(name: str) -> dict[str, Outcome]:
    made = checked({"path": f"{BROKEN}:{name}"})
    return {check: outcome for check, outcome in made.items() if outcome.status == "failed"}


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_installed_loss_conforms(name: str) -> None:
    made = checked(name)
    assert {"sign", "device", "call_order", "exceptions", "state"} <= made.keys()
    assert {check: o for check, o in made.items() if o.status == "failed"} == {}


@pytest.mark.parametrize(
    "name", ["Right", "EntropyAsConstant", "EntropyWithGradient", "OwnColumns", "OfGroups"]
)
def test_what_is_right_passes(name: str) -> None:
    assert failed(name) == {}


@pytest.mark.parametrize(
    ("name", "check", "told"),
    [
        ("NeedsUndeclared", "runs_on_what_it_declares", r"needs=\('entropy',\)"),
        ("OneNumber", "runs_on_what_it_declares", r"\[B, T\]"),
        ("OfOneDtype", "dtype", "float64"),
        ("Remembers", "pure", "called twice"),
        ("ChangesInputs", "pure", r"inputs\.advantages in place"),
        ("DrawsNumbers", "pure", "random"),
        ("TrainsItself", "gradient_reaches_log_probabilities_only", "of its own"),
        ("HiddenGradient", "gradient_is_that_of_its_value", "gradient = 'surrogate'"),
        ("SurrogateOfNothing", "gradient_is_that_of_its_value", "no method expected_gradient"),
        ("SurrogateOfAnother", "gradient_is_that_of_its_value", "expected_gradient says"),
        ("ZeroOnlySaid", "zero_advantage", "advantage is 0"),
        ("CountsPadding", "padding", "at the end"),
        ("LooksAtNeighbours", "padding", "neighbours"),
        ("DividesByItsCount", "micro_batches_and_ranks", "the core divides"),
        ("DividesByItsCount", "rows_are_independent", "by itself"),
        ("MixesRows", "rows_are_independent", "by itself"),
        ("NeedsAToken", "all_masked", "wholly masked"),
        ("Overflows", "extreme_ratios", "not finite"),
        ("LosesDigits", "bfloat16", "bfloat16"),
        ("AveragesDiagnostics", "diagnostics", "micro-batch"),
        ("FirstSequenceOnly", "permutation", "another order"),
        ("WrongSign", "sign", "lowers the probability of a token with advantage 1"),
        ("AbsoluteAdvantage", "sign", "raises the probability of a token with advantage -1"),
        ("PositiveOnly", "sign", "does not train on a token with advantage -1"),
        ("ClipsOtherSide", "sign", "torch.min"),
        ("OfTheCpu", "device", "mixes"),
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
        ("MixesGroups", "rows_are_independent", "group 0"),
        ("MixesGroups", "micro_batches_and_ranks", "1 groups"),
        ("GroupsByPlace", "permutation", "another order"),
        ("SequenceOnlySaid", "level", "'sequence', and its tokens do not depend"),
        ("TokenOnlySaid", "level", "'token', and its tokens depend"),
    ],
)
def test_each_fault_is_found_by_the_check_meant_for_it(name: str, check: str, told: str) -> None:
    outcome = failed(name)[check]
    text = f"{outcome.what}\n{outcome.advice}"
    assert re.search(told, text), text


@pytest.mark.parametrize("name", ["OtherSign", "OfTheirDevice"])
def test_a_declared_sign_and_tensors_of_the_inputs_device_pass(name: str) -> None:
    assert failed(name) == {}


def test_an_exception_that_a_loss_hides_is_shown_with_its_line() -> None:
    path = BROKEN.with_name("broken_handlers.py")
    outcome = checked({"path": f"{path}:HidesErrors"})["exceptions"]
    assert (outcome.status, outcome.what.rpartition("at ")[2]) == ("failed", "broken_handlers.py:18 is lost")
    for name in ("Reports", "Warns", "Expects"):
        assert checked({"path": f"{path}:{name}"})["exceptions"].status == "passed"
    assert checked({"path": f"{path.with_name('broken_losses.py')}:Right"})["exceptions"].status == "passed"


def test_exceptions_may_be_hidden_on_purpose(tmp_path: Path) -> None:
    source = BROKEN.with_name("broken_handlers.py").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(
        source.replace("except Exception:", "except Exception:  # noqa: BLE001 - so", 1)
    )
    assert checked({"path": f"{tmp_path}/mine.py:HidesErrors"})["exceptions"].status == "passed"


def test_the_smallest_example_is_shown() -> None:
    """A mixture of rows shows on two sequences of one token, and not on one."""
    example = failed("MixesRows")["rows_are_independent"].example
    assert [line.split()[1] for line in example.splitlines() if line.startswith("logprobs")] == ["[0]", "[1]"]
    assert all(len(line.split()) == 3 for line in example.splitlines())


def test_a_loss_that_does_not_run_is_told_once() -> None:
    made = checked({"path": f"{BROKEN}:OneNumber"})
    assert list(made) == ["runs_on_what_it_declares"]


def test_a_loss_that_declares_to_mix_rows_is_not_asked_for_what_it_cannot() -> None:
    made = checked({"path": f"{BROKEN}:FirstSequenceOnly"})
    assert {check for check, o in made.items() if o.status == "skipped"} == {
        "rows_are_independent",
        "micro_batches_and_ranks",
    }


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
