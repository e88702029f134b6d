"""Steps packed into micro-batches: nothing is lost or doubled, and no gradient is another."""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.small_models import far, gradient_of, model_of

from grpox.config import ComponentRef, TrainConfig
from grpox.contracts import Rollout
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry
from grpox.policy.attention import VARLEN
from grpox.policy.batch import FULL_LOGITS, ForwardMode, Sample, collate, samples_of
from grpox.policy.scoring_forward import install_scoring_forward
from grpox.runtime.world import World
from grpox.update.objective import StepLoss
from grpox.update.packing import LossTraits, MicroBatchPacker, PackedStep, count_step
from grpox.update.policy_update import MicroBatches, forward_pass

CPU = torch.device("cpu")
WORLD = World(0, 1, CPU)
SHARED = ForwardMode(chunked=True, shared_width=32)
LONGEST = 9
REGISTRY = Registry(discover([]))


def loss_of(name: str) -> Any:
    return REGISTRY.build(REGISTRY.parse("loss", ComponentRef(name=name), "loss"))


def micro_batches_of(seed: int, count: int = 3, rows: int = 8, groups: int = 4) -> list[list[Sample]]:
    """Ragged samples of groups of four, a group in three without advantage, some tokens masked."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(3, 100) for _ in range(rng.randint(1, 6))) for _ in range(groups)]
    made = []
    for _ in range(count):
        rollouts, advantages = [], []
        for row in range(rows):
            length = rng.randint(1, LONGEST)
            completion = tuple(rng.randrange(3, 100) for _ in range(length))
            logprobs = tuple(rng.uniform(-3, -1) for _ in range(length))
            rollouts.append(Rollout(row, 0, prompts[row // 4], completion, "stop", 0, logprobs))
            advantages.append(0.0 if row // 4 % 3 == 0 else rng.choice([-1.3, 0.0, 0.7]))
        samples = samples_of(rollouts, advantages)
        samples[rng.randrange(rows)].token_mask[:3] = False
        made.append(samples)
    return made


def packer_of(loss: str = "grpo", mode: ForwardMode = SHARED, **settings: Any) -> MicroBatchPacker:
    return MicroBatchPacker.of(TrainConfig(**settings), LossTraits.of(loss_of(loss)), mode)


def numbers(packed: PackedStep, micro_batches: MicroBatches) -> list[list[int]]:
    """List for each packed micro-batch the places of its samples in the step; a filler has none."""
    every = itertools.chain.from_iterable(micro_batches)
    place = {id(sample): number for number, sample in enumerate(every)}
    return [[place[id(s)] for s in each.samples if id(s) in place] for each in packed.micro_batches]


def gradients(
    micro_batches: MicroBatches, loss: str, model: Any, packer: MicroBatchPacker, beta: float
) -> torch.Tensor:
    """Gradients of one step, accumulated one micro-batch after the other in float64, as PolicyUpdate does."""
    correction = REGISTRY.build(REGISTRY.parse("correction", ComponentRef(name="none"), "correction"))
    step_loss = StepLoss(loss_of(loss), correction, beta)
    totals = count_step(([s.token_mask for s in samples] for samples in micro_batches), WORLD, LONGEST)
    model.zero_grad()
    for each in packer.pack(micro_batches, WORLD).micro_batches:
        with torch.set_grad_enabled(each.needs_backward):
            made = forward_pass(model, collate(each.samples, CPU), step_loss, totals, 0.8, packer.mode)
        if each.needs_backward:
            made.loss.backward()
    return gradient_of(model)


ALL_OFF = {"prefix_sharing": False, "chunked_logprobs": False, "skip_zero_advantage": False}
BUDGETS = (None, 40)
COMBINATIONS = [
    {**dict(zip(ALL_OFF, on, strict=True)), "max_tokens_per_micro_batch": budget}
    for on in itertools.product([False, True], repeat=3)
    for budget in BUDGETS
]
PAIRS = [
    {**dict(zip(ALL_OFF, on, strict=True)), "max_tokens_per_micro_batch": budget}
    for *on, budget in (
        (False, False, False, None),
        (False, True, True, 40),
        (True, False, True, 40),
        (True, True, False, 40),
        (True, True, True, None),
    )
]
"""Every two values of two settings are together in one of these."""
OF_LOSS = {
    "grpo": COMBINATIONS,
    "bnpo": COMBINATIONS,  # its micro-batches stay as they are
    "dr_grpo": PAIRS,
    "dapo": PAIRS,
    "cispo": PAIRS,
    "sapo": PAIRS,
}


def test_the_combinations_have_every_value_and_every_pair_of_values() -> None:
    values = {**dict.fromkeys(ALL_OFF, (False, True)), "max_tokens_per_micro_batch": BUDGETS}
    for settings in PAIRS:
        assert settings in COMBINATIONS
    for made, size in ((COMBINATIONS, len(values)), (PAIRS, 2)):
        for names in itertools.combinations(values, size):
            found = {tuple(settings[name] for name in names) for settings in made}
            assert found == set(itertools.product(*(values[name] for name in names))), names


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
"""A model that computes all in float64; llama's norms are float32."""


@pytest.mark.parametrize("loss", OF_LOSS)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_every_saving_alone_and_together_gives_the_same_gradient(loss: str, beta: float) -> None:
    micro_batches = micro_batches_of(1)
    plain = model_of("gpt2", **GPT2)
    for sample in itertools.chain.from_iterable(micro_batches):  # a later step: the policy has moved
        length = len(sample.completion)
        sample.old_logprobs = torch.full((length,), -4.6, dtype=torch.float64)
        sample.reference_logprobs = torch.full((length,), -4.7, dtype=torch.float64)
    packer = packer_of(loss, FULL_LOGITS, **ALL_OFF, beta=beta)
    expected = gradients(micro_batches, loss, plain, packer, beta)
    assert expected.abs().max() > 1e-3
    for settings in OF_LOSS[loss]:
        model = copy.deepcopy(plain)
        mode = install_scoring_forward(model, TrainConfig(**settings, beta=beta))
        found = gradients(micro_batches, loss, model, packer_of(loss, mode, **settings, beta=beta), beta)
        assert far(found, expected) < 1e-12, settings


@pytest.mark.parametrize("loss", ["grpo", "bnpo"])
@pytest.mark.parametrize("budget", [None, 40])
def test_packing_gives_the_same_gradient_without_padding(loss: str, budget: int | None) -> None:
    micro_batches, plain = micro_batches_of(1), model_of("gpt2", **GPT2)
    expected = gradients(micro_batches, loss, plain, packer_of(loss, FULL_LOGITS, **ALL_OFF), 0.0)
    model, train = copy.deepcopy(plain), TrainConfig(prefix_sharing=False, max_tokens_per_micro_batch=budget)
    model.set_attn_implementation(VARLEN)
    mode = install_scoring_forward(model, train)
    packer = MicroBatchPacker.of(train, LossTraits.of(loss_of(loss)), mode)
    assert packer.mode.packed
    assert packer.pack(micro_batches, WORLD).padding_fraction == 0
    assert far(gradients(micro_batches, loss, model, packer, 0.0), expected) < 1e-12


def test_every_sample_is_in_one_micro_batch() -> None:
    micro_batches = micro_batches_of(2)
    packed = packer_of(max_tokens_per_micro_batch=30).pack(micro_batches, WORLD)
    assert sorted(itertools.chain.from_iterable(numbers(packed, micro_batches))) == list(range(24))
    assert sum(len(each.samples) for each in packed.micro_batches) == 24


def test_a_sample_that_is_twice_in_a_step_is_trained_on_twice() -> None:
    micro_batches = micro_batches_of(2)
    micro_batches[2][3] = micro_batches[0][1]
    packed = packer_of(max_tokens_per_micro_batch=30).pack(micro_batches, WORLD)
    every = [id(sample) for each in packed.micro_batches for sample in each.samples]
    assert sorted(every) == sorted(id(sample) for samples in micro_batches for sample in samples)


def test_only_samples_with_an_advantage_need_a_backward_pass_and_they_come_last() -> None:
    packed = packer_of().pack(micro_batches_of(3), WORLD)
    kinds = [each.needs_backward for each in packed.micro_batches]
    assert kinds == sorted(kinds)
    assert set(kinds) == {False, True}
    for each in packed.micro_batches:
        live = [sample.advantage != 0 and bool(sample.token_mask.any()) for sample in each.samples]
        assert all(live) if each.needs_backward else not any(live)


@pytest.mark.parametrize("settings", [{"beta": 0.1}, {"skip_zero_advantage": False}])
def test_all_need_a_backward_pass_where_a_kl_needs_them_or_the_run_says_so(settings: dict[str, Any]) -> None:
    packed = packer_of(**settings).pack(micro_batches_of(3), WORLD)
    assert all(each.needs_backward for each in packed.micro_batches)


def test_a_step_without_advantages_has_a_backward_pass_all_the_same() -> None:
    micro_batches = micro_batches_of(4)
    for sample in itertools.chain.from_iterable(micro_batches):
        sample.advantage = 0.0
    packed = packer_of().pack(micro_batches, WORLD)
    assert [each.needs_backward for each in packed.micro_batches].count(True) == 1
    [filler] = packed.micro_batches[-1].samples
    assert not filler.token_mask.any()
    assert sorted(itertools.chain.from_iterable(numbers(packed, micro_batches))) == list(range(24))


def test_a_micro_batch_holds_no_more_positions_than_its_budget() -> None:
    micro_batches = micro_batches_of(5)
    for width in (0, 32):
        mode = ForwardMode(chunked=True, shared_width=width)
        packed = packer_of(mode=mode, max_tokens_per_micro_batch=30).pack(micro_batches, WORLD)
        for each in packed.micro_batches:
            assert collate(each.samples, CPU).layout(mode).input_ids.numel() <= 30


def test_without_a_budget_a_micro_batch_holds_no_more_completions_than_one_of_the_schedule() -> None:
    packed = packer_of(per_device_train_batch_size=5).pack(micro_batches_of(6), WORLD)
    assert max(len(each.samples) for each in packed.micro_batches) <= 5


def test_a_loss_of_single_micro_batches_keeps_those_of_the_schedule() -> None:
    micro_batches = micro_batches_of(7)
    packed = packer_of("bnpo", max_tokens_per_micro_batch=30).pack(micro_batches, WORLD)
    assert numbers(packed, micro_batches) == [list(range(n, n + 8)) for n in (0, 8, 16)]


@dataclass(frozen=True)
class BesideOthers(World):
    """A rank whose others tell what they were given."""

    told: list[Any] = field(default_factory=list)

    def gather(self, items: Any) -> Any:
        return [*items, *self.told]


def test_every_rank_has_as_many_micro_batches_of_each_kind_as_the_one_with_most() -> None:
    world, micro_batches = BesideOthers(0, 2, CPU, [(9, 11, 100, 150)]), micro_batches_of(8)
    packed = packer_of().pack(micro_batches, world)
    kinds = [each.needs_backward for each in packed.micro_batches]
    assert (kinds.count(False), kinds.count(True)) == (9, 11)
    for each, places in zip(packed.micro_batches, numbers(packed, micro_batches), strict=True):
        if not places:
            assert not any(sample.token_mask.any() for sample in each.samples)


def test_padding_is_told_as_the_part_of_positions_without_a_token() -> None:
    rollouts = [Rollout(0, 0, (5, 6), (7,) * n, "stop", 0) for n in (4, 2)]
    micro_batches = [samples_of(rollouts, [1.0, -1.0])]
    apart = packer_of(mode=ForwardMode(chunked=True)).pack(micro_batches, WORLD)
    assert apart.padding_fraction == pytest.approx(2 / 12)
    assert packer_of().pack(micro_batches, WORLD).padding_fraction == 0
