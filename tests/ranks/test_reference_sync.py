"""The reference follows the policy under real ZeRO-3, shards and whole parameters alike."""

import importlib.resources

import pytest
from rank_scripts import run_script

SHARDS, WHOLE = "0", "1000000"
"""Sizes up to which parameters stay whole on each rank."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of each rank, for each number of ranks and each threshold."""
    import torch

    folder = tmp_path_factory.mktemp("reference")
    run_script("reference_sync_step.py", "one", SHARDS, folder=folder)
    run_script("reference_sync_step.py", "two", SHARDS, WHOLE, folder=folder, ranks=2)
    one, *two = (torch.load(folder / name) for name in ("one.0", "two.0", "two.1"))
    return {
        (1, SHARDS): [one[SHARDS]],
        **{(2, threshold): [each[threshold] for each in two] for threshold in (SHARDS, WHOLE)},
    }


@pytest.mark.parametrize(("ranks", "threshold"), [(1, SHARDS), (2, SHARDS), (2, WHOLE)])
def test_the_reference_becomes_the_mixture_every_ref_sync_steps(results, ranks, threshold):
    import torch

    made = results[ranks, threshold]
    assert len(made) == ranks
    for result in made:
        assert result["whole"] == (threshold == WHOLE)
        before, after_one, after_two = result["reference"]
        for name, policy in result["policy"].items():
            assert torch.equal(after_one[name], before[name])
            torch.testing.assert_close(after_two[name], 0.25 * policy + 0.75 * before[name])
            assert torch.equal(after_two[name], made[0]["reference"][2][name])
    assert_forward_uses(made[0]["reference"][2], made[0]["logits"])


def assert_forward_uses(weights, logits):
    """The reference's next forward sees the mixture: that of a plain model with these weights."""
    import torch

    from grpox.config import ModelConfig
    from grpox.policy.models import load_model

    folder = importlib.resources.files("grpox.runfile.recipes") / "quickstart" / "model"
    model = load_model(ModelConfig(path=str(folder)))
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[3, 4, 5, 6]])).logits
    torch.testing.assert_close(logits, expected)
