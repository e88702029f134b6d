"""Steps of a loss that is given whole groups: no packing parts one, and fillers are groups too."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from test_packing import Packed

from grpox.config import TrainConfig
from grpox.contracts import Reduction
from grpox.errors import RunFailed
from grpox.policy.batch import FULL_LOGITS, ForwardMode, Sample
from grpox.runtime.world import World
from grpox.update.packing import LossTraits, MicroBatchPacker

GROUP = 4
CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
MODES = {
    "padded": ForwardMode(chunked=True),
    "shared prompts": ForwardMode(chunked=True, shared_width=32),
    "packed": ForwardMode(chunked=True, packed=True),
    "all logits": FULL_LOGITS,
}


class TwoRanks(World):
    """This rank beside one that has `others` micro-batches of each kind."""

    def __init__(self, others: tuple[int, int]) -> None:
        super().__init__(0, 2, CPU)
        object.__setattr__(self, "others", others)

    def gather(self, values: Any) -> Any:
        [value] = values
        return [value, (*self.others, 1, 1) if isinstance(value, tuple) else 0]  # type: ignore[attr-defined]


def step_of(seed: int, groups: int = 6, longest: int = 9) -> list[list[Sample]]:
    """Micro-batches of two groups; of each third group no sequence has an advantage, of others some have."""
    rng = random.Random(seed)
    samples = []
    for group in range(groups):
        prompt = tuple(rng.randrange(3, 100) for _ in range(rng.randint(1, 6)))
        for place in range(GROUP):
            length = rng.randint(1, longest)
            advantage = 0.0 if group % 3 == 0 or place % 2 else rng.choice([-1.0, 0.5])
            mask, logprobs = np.ones(length, np.bool_), np.zeros(length, np.float32)
            sample = Sample(prompt, tuple(range(length)), mask, logprobs, advantage)
            sample.group_id, sample.sequence_id = group, GROUP * group + place
            samples.append(sample)
    size = 2 * GROUP
    return [samples[at : at + size] for at in range(0, len(samples), size)]


def packer_of(mode: ForwardMode = MODES["padded"], silent: bool = True, **settings: Any) -> MicroBatchPacker:
    train = TrainConfig(per_device_train_batch_size=2 * GROUP, num_generations=GROUP, **settings)
    traits = LossTraits(Reduction.TOKEN_MEAN, zero_at_zero_advantage=silent, whole_groups=True)
    return MicroBatchPacker.of(train, traits, mode)


def assert_whole(packed: Packed) -> None:
    for samples, _ in packed:
        assert set(Counter(sample.group_id for sample in samples).values()) == {GROUP}


@pytest.mark.parametrize("budget", [None, 60, 90])
@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_no_group_is_parted_lost_or_doubled(mode: str, silent: bool, budget: int | None) -> None:
    for seed in range(20):
        micro_batches = step_of(seed)
        packed, _ = packer_of(MODES[mode], silent, max_tokens_per_micro_batch=budget).pack(micro_batches, ALONE)
        assert_whole(packed)
        ids = [s.sequence_id for samples, _ in packed for s in samples]
        assert sorted(ids) == list(range(24))  # type: ignore[type-var]


def test_a_group_arrives_in_its_order() -> None:
    packed, _ = packer_of(MODES["shared prompts"]).pack(step_of(1), ALONE)
    for samples, _ in packed:
        ids = [sample.sequence_id for sample in samples]
        assert ids == sorted(ids)  # type: ignore[type-var]


def test_a_group_needs_a_backward_pass_if_one_of_its_sequences_does() -> None:
    packed, _ = packer_of().pack(step_of(2), ALONE)
    silent = [s.group_id for samples, needs_backward in packed if not needs_backward for s in samples]
    assert set(silent) == {0, 3}
    live = [s for samples, needs_backward in packed if needs_backward for s in samples]
    assert any(sample.advantage == 0 for sample in live)


@pytest.mark.parametrize("mode", ["padded", "shared prompts"])
def test_a_filler_is_a_whole_group_in_which_no_token_counts(mode: str) -> None:
    micro_batches = step_of(3)
    packed, _ = packer_of(MODES[mode]).pack(micro_batches, TwoRanks((3, 4)))
    assert [needs_backward for _, needs_backward in packed] == [False] * 3 + [True] * 4
    assert_whole(packed)
    real = {id(sample) for sample in itertools.chain.from_iterable(micro_batches)}
    fillers = [s for samples, _ in packed for s in samples if id(s) not in real]
    assert fillers
    for sample in fillers:
        assert not sample.token_mask.any()
        assert sample.group_id is not None
        assert sample.group_id < 0
        assert sample.sequence_id is not None
        assert sample.sequence_id < 0


def test_a_step_without_advantages_has_a_backward_pass_over_a_group() -> None:
    micro_batches = step_of(4)
    for sample in itertools.chain.from_iterable(micro_batches):
        sample.advantage = 0.0
    packed, _ = packer_of().pack(micro_batches, ALONE)
    [last] = [samples for samples, needs_backward in packed if needs_backward]
    assert len(last) == GROUP


def test_a_group_larger_than_a_micro_batch_may_be_ends_the_run_with_both_numbers() -> None:
    micro_batches = step_of(5)
    samples = list(itertools.chain.from_iterable(micro_batches))
    groups = [samples[at : at + GROUP] for at in range(0, 24, GROUP)]
    largest = max(GROUP * max(map(len, group)) for group in groups)
    packer_of(max_tokens_per_micro_batch=largest).pack(micro_batches, ALONE)
    with pytest.raises(RunFailed, match=f"is {largest - 1}, and a group of 4 completions takes {largest}"):
        packer_of(max_tokens_per_micro_batch=largest - 1).pack(micro_batches, ALONE)


def test_the_scope_of_a_loss_makes_its_groups_whole() -> None:
    class OfGroups:
        reduction = Reduction.TOKEN_MEAN
        scope = "group"

    loss: Any = OfGroups()
    assert LossTraits.of(loss).whole_groups
    assert MicroBatchPacker.of(TrainConfig(), LossTraits.of(loss), FULL_LOGITS).whole_groups
