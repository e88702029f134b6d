"""Requirements of `train.max_staleness`: a generator that samples ahead, and a correction."""

import pytest

from grpox.config import RunConfig
from grpox.errors import ConfigError
from grpox.runfile.load import load_run

SERVER = "generator=vllm-server"
AHEAD = "train.max_staleness=1"


def problems(*overrides):
    with pytest.raises(ConfigError) as caught:
        load_run("quickstart", [AHEAD, *overrides])
    return caught.value.problems


def test_samples_are_of_the_policy_itself_unless_a_run_file_says_otherwise():
    assert RunConfig.model_fields["train"].default.max_staleness == 0
    assert load_run("quickstart", [SERVER]).config.train.max_staleness == 0


def test_a_generator_that_samples_ahead_and_a_correction_are_taken():
    assert load_run("quickstart", [SERVER, AHEAD]).config.correction.name == "token-truncate"
    given = load_run("quickstart", [SERVER, AHEAD, "correction=token-mask"])
    assert given.config.correction.name == "token-mask"
    of_generator = load_run("quickstart", [SERVER, AHEAD, "train.old_logprobs=generator"])
    assert of_generator.config.correction.name == "none"


@pytest.mark.parametrize("generator", ["hf", "vllm-colocate"])
def test_another_generator_is_refused_by_name(generator):
    told = [problem for problem in problems(f"generator={generator}") if problem.key == "train.max_staleness"]
    assert [(problem.given, problem.allowed) for problem in told] == [("1", "0 or with generator vllm-server")]
    assert f"generator '{generator}'" in told[0].what


def test_a_lag_that_nothing_corrects_is_refused():
    (problem,) = problems(SERVER, "correction=none")
    assert (problem.key, problem.given) == ("train.max_staleness", "1")
    for fact in ("0", "or a correction such as token-truncate", "or train.old_logprobs: generator"):
        assert fact in problem.allowed.split(", ")


def test_where_there_is_no_correction_it_says_so():
    (problem,) = problems(SERVER, "sampling.top_p=0.9")
    assert problem.given.startswith("1, sampling with top_p 0.9")
    assert problem.given.endswith("no correction supports")
    assert problem.allowed == "0"
