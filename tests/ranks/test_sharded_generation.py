"""Generation through ZeRO-3 shards on two ranks with uneven prompts is generation on a whole copy.

A single rank has no copy: its generator samples from the policy's own memory.
"""

import pytest
from rank_scripts import results_of


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the samples of each of two ranks, before and after an optimizer step."""
    return results_of("zero3_generation.py", folder=tmp_path_factory.mktemp("sharded"), ranks=2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the samples of a single rank."""
    [results] = results_of("zero3_generation.py", folder=tmp_path_factory.mktemp("alone"))
    return results


@pytest.mark.parametrize("way", ["sharded", "sharded static"])
@pytest.mark.parametrize("case", ["greedy", "long", "one idle", "after a step"])
def test_completions_and_logprobs_are_those_of_a_whole_copy(ranks, alone, case, way):
    for results in (*ranks, alone):
        whole, sharded = results[case, "whole"], results[case, way]
        for one, other in zip(sharded, whole, strict=True):
            assert one["completion_ids"] == other["completion_ids"]
            assert one["finish_reason"] == other["finish_reason"]
            assert one["policy_version"] == int(case == "after a step")
            assert one["sampler_logprobs"] == pytest.approx(other["sampler_logprobs"], abs=2e-5)


def test_ranks_had_uneven_work(ranks):
    assert [len(results["greedy", "sharded"]) for results in ranks] == [12, 4]
    assert [len(results["one idle", "sharded"]) for results in ranks] == [0, 12]
    longest = [max(len(r["completion_ids"]) for r in results["greedy", "sharded"]) for results in ranks]
    assert longest[0] > longest[1]


def test_training_goes_on_as_if_nothing_had_been_generated(ranks, alone):
    for results in (*ranks, alone):
        assert results["norm"] == pytest.approx(results["norm of another engine"], rel=1e-6)
        before, after = (results[case, "sharded"] for case in ("greedy", "after a step"))
        assert [r["sampler_logprobs"] for r in before] != [r["sampler_logprobs"] for r in after]
    for results in ranks:
        assert (results["shard"], results["left whole"]) == (0.5, [])
        assert results["restored"] == (True, True)
        assert results["checkpointing"]


def test_a_single_rank_generates_from_the_policys_own_memory(alone, ranks):
    assert set(alone["shared"]) == {True}
    assert set(ranks[0]["shared"]) == {False}
