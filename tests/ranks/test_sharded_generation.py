"""Generation through ZeRO-3 shards on two ranks with uneven prompts is generation on a whole copy.

A single rank has no copy: its generator samples from the policy's own memory.
"""

import pytest
from rank_scripts import run_script


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the samples of each of two ranks, before and after an optimizer step."""
    import torch

    folder = tmp_path_factory.mktemp("sharded")
    run_script("zero3_generation.py", "out", folder=folder, ranks=2)
    return [torch.load(folder / f"out.{rank}", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("way", ["sharded", "sharded static"])
@pytest.mark.parametrize("case", ["greedy", "long", "one idle", "after a step"])
def test_completions_and_logprobs_are_those_of_a_whole_copy(ranks, case, way):
    for results in ranks:
        whole, sharded = results[case, "whole"], results[case, way]
        assert [r.completion_ids for r in sharded] == [r.completion_ids for r in whole]
        assert [r.finish_reason for r in sharded] == [r.finish_reason for r in whole]
        assert {r.policy_version for r in sharded} <= {int(case == "after a step")}
        for one, other in zip(sharded, whole, strict=True):
            assert one.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=2e-5)


def test_ranks_had_uneven_work(ranks):
    assert [len(results["greedy", "sharded"]) for results in ranks] == [12, 4]
    assert [len(results["one idle", "sharded"]) for results in ranks] == [0, 12]
    longest = [max(len(r.completion_ids) for r in results["greedy", "sharded"]) for results in ranks]
    assert longest[0] > longest[1]


def test_the_step_between_changed_the_policy(ranks):
    before, after = (ranks[0][case, "sharded"] for case in ("greedy", "after a step"))
    assert [r.sampler_logprobs for r in before] != [r.sampler_logprobs for r in after]


def test_training_goes_on_as_if_nothing_had_been_generated(ranks):
    for results in ranks:
        assert results["shard"] == 0.5
        assert results["restored"] == (True, True)
        assert results["checkpointing"]
        assert results["norm"] == pytest.approx(results["norm of another engine"], rel=1e-6)


def test_no_layer_is_left_whole(ranks):
    assert [results["left whole"] for results in ranks] == [[], []]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the samples of a single rank."""
    import torch

    folder = tmp_path_factory.mktemp("alone")
    run_script("zero3_generation.py", "out", folder=folder)
    return torch.load(folder / "out.0", weights_only=False)


def test_a_single_rank_generates_from_the_policys_own_memory(alone, ranks):
    assert set(alone["shared"]) == {True}
    assert set(ranks[0]["shared"]) == {False}


@pytest.mark.parametrize("case", ["greedy", "long", "after a step"])
def test_own_memory_samples_as_the_shards_do(alone, case):
    whole, sharded = alone[case, "whole"], alone[case, "sharded"]
    assert [r.completion_ids for r in sharded] == [r.completion_ids for r in whole]
    for one, other in zip(sharded, whole, strict=True):
        assert one.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=2e-5)


def test_own_memory_is_that_of_the_policy_after_a_step(alone):
    assert alone["norm"] == pytest.approx(alone["norm of another engine"], rel=1e-6)
    before, after = (alone[case, "whole"] for case in ("greedy", "after a step"))
    assert [r.sampler_logprobs for r in before] != [r.sampler_logprobs for r in after]
