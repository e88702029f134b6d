"""Levels of losses and corrections, tokens or whole sequences: the warnings of runs, and wrong declarations."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpox.cli.app import app
from grpox.errors import ConfigError
from grpox.runfile.load import load_run

CORRECTIONS = {
    "none": None,
    "token-truncate": "token",
    "token-mask": "token",
    "geometric-mask": "token",
    "sequence-truncate": "sequence",
    "sequence-mask": "sequence",
}
LOSSES = {
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "dppo"), "token"),
    **dict.fromkeys(("luspo", "gspo-token", "topr"), "sequence"),
}
OWN = """
from grpox.contracts import Reduction

class Silent:
    reduction = Reduction.TOKEN_MEAN
    def per_token(self, inputs): ...

class OfTokens(Silent):
    level = "token"

class OfWords(Silent):
    level = "word"
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)


def warnings(loss: str, correction: str) -> tuple[str, ...]:
    return load_run("quickstart", [f"loss={loss}", f"correction={correction}"]).warnings


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_correction_of_sequences_in_a_loss_of_tokens_is_told(loss: str, correction: str) -> None:
    told = warnings(loss, correction)
    is_mixed = (LOSSES[loss], CORRECTIONS[correction]) == ("token", "sequence")
    assert len(told) == is_mixed
    if is_mixed:
        facts = (f"correction: {correction} ", f"loss: {loss} ", "token-truncate", "level: sequence")
        assert [fact for fact in facts if fact not in told[0]] == []
        assert "\n" not in told[0]


def test_the_level_of_a_loss_is_also_a_parameter() -> None:
    assert warnings("{name: grpo, level: sequence}", "sequence-mask") == ()


@pytest.mark.parametrize(("loss", "told"), [("grpo", 0), ("dr_grpo", 1), ("dapo", 1), ("bnpo", 1)])
def test_a_ratio_of_sequences_in_a_sum_over_tokens_is_told_as_in_trl(loss: str, told: int) -> None:
    lines = warnings(f"{{name: {loss}, level: sequence}}", "none")
    assert len(lines) == told
    assert all(f"loss: {loss} with level: sequence" in line for line in lines)


def test_losses_in_files_declare_theirs_too_and_silence_is_no_warning() -> None:
    assert len(warnings("{path: own.py:OfTokens}", "sequence-mask")) == 1
    assert warnings("{path: own.py:Silent}", "sequence-mask") == ()


def test_a_level_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        warnings("{path: own.py:OfWords}", "none")
    (problem,) = caught.value.problems
    assert problem.key == "loss"
    assert "'word'" in problem.what


def test_validate_prints_it_once_and_is_content() -> None:
    arguments = ["validate", "quickstart", "loss=dapo", "correction=sequence-mask"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    assert done.stderr.count("warning: correction: sequence-mask") == 1
    assert CliRunner().invoke(app, ["validate", "quickstart"]).stderr == ""
