"""Steps cut into passes: nothing is lost or doubled, and no gradient is another."""

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
from grpox.policy.batch import collate
from grpox.policy.forward_modes import PLAIN, ForwardWays
from grpox.policy.row_layout import lay_out
from grpox.policy.scoring_forward import prepare
from grpox.runtime.world import World
from grpox.update.forward import forward_pass
from grpox.update.micro_batch import Slice
from grpox.update.packing import Arrangement, Passes
from grpox.update.reduction import count_step
from grpox.update.step_loss import StepLoss

CPU = torch.device("cpu")
WORLD = World(0, 1, CPU)
SHARED = ForwardWays(chunked=True, shared_width=32)
LONGEST = 9
REGISTRY = Registry(discover([]))


def loss_of(name: str) -> Any:
    return REGISTRY.build(REGISTRY.parse("loss", ComponentRef(name=name), "loss"))


def slices_of(seed: int, count: int = 3, rows: int = 8, groups: int = 4) -> list[Slice]:
    """Ragged slices of groups of four, a group in three without advantage, some tokens masked."""
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
        batch = collate(rollouts, advantages, 0, CPU)
        batch.token_mask[rng.randrange(rows), :3] = False
        made.append(Slice(batch))
    return made


def arrangement(loss: str = "grpo", ways: ForwardWays = SHARED, **settings: Any) -> Arrangement:
    return Arrangement.of(TrainConfig(**settings), loss_of(loss), ways)


def gradients(slices: list[Slice], loss: str, model: Any, arranged: Arrangement, beta: float) -> torch.Tensor:
    """Of one step, accumulated pass by pass in float64, as PolicyUpdate does."""
    correction = REGISTRY.build(REGISTRY.parse("correction", ComponentRef(name="none"), "correction"))
    step_loss = StepLoss(loss_of(loss), correction, beta)
    totals = count_step((s.batch.token_mask for s in slices), WORLD, LONGEST)
    model.zero_grad()
    passes = arranged.passes(slices, WORLD)
    for each in passes.passes:
        with torch.set_grad_enabled(each.teaches):
            made = forward_pass(model, each.slice, step_loss, totals, 0.8, arranged.ways)
        if each.teaches:
            made.output.loss.backward()
    passes.keep()
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


@pytest.mark.parametrize("loss", OF_LOSS)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_every_saving_alone_and_together_gives_the_same_gradient(loss: str, beta: float) -> None:
    slices = slices_of(1)
    plain = model_of("llama")
    for slice_ in slices:  # the second pass over the batch, the policy having moved
        shape = slice_.batch.token_mask.shape
        slice_.old_logprobs = torch.full(shape, -4.6, dtype=torch.float64)
        slice_.reference_logprobs = torch.full(shape, -4.7, dtype=torch.float64)
    expected = gradients(
        copy.deepcopy(slices), loss, plain, arrangement(loss, PLAIN, **ALL_OFF, beta=beta), beta
    )
    assert expected.abs().max() > 1e-3
    for settings in OF_LOSS[loss]:
        model = copy.deepcopy(plain)
        train = TrainConfig(**settings, beta=beta)
        arranged = Arrangement.of(train, loss_of(loss), prepare(model, train))
        found = gradients(copy.deepcopy(slices), loss, model, arranged, beta)
        assert far(found, expected) < 1e-6, settings


@pytest.mark.parametrize("loss", ["grpo", "bnpo"])
@pytest.mark.parametrize("budget", [None, 40])
def test_packing_gives_the_same_gradient_without_padding(
    loss: str, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpox.policy.scoring_forward._attends_by_positions", lambda model: True)
    slices, plain = slices_of(1), model_of("llama")
    expected = gradients(copy.deepcopy(slices), loss, plain, arrangement(loss, PLAIN, **ALL_OFF), 0.0)
    model, train = copy.deepcopy(plain), TrainConfig(prefix_sharing=False, max_tokens_per_micro_batch=budget)
    arranged = Arrangement.of(train, loss_of(loss), prepare(model, train))
    assert arranged.ways.packed
    assert arranged.passes(copy.deepcopy(slices), WORLD).padding_fraction == 0
    assert far(gradients(slices, loss, model, arranged, 0.0), expected) < 1e-6


def test_every_row_is_in_one_pass_with_its_own_numbers() -> None:
    slices = slices_of(2)
    passes = arrangement(max_tokens_per_micro_batch=30).passes(slices, WORLD)
    assert sorted(n for each in passes.passes for n in each.numbers) == list(range(24))
    expected = torch.cat([s.batch.advantages for s in slices])
    for each in passes.passes:
        assert torch.equal(each.slice.batch.advantages, expected[list(each.numbers)])
    rows = [row for s in slices for row in zip(s.batch.input_ids, s.batch.attention_mask, strict=True)]
    for each in passes.passes:
        batch = each.slice.batch
        for number, ids, mask in zip(each.numbers, batch.input_ids, batch.attention_mask, strict=True):
            assert torch.equal(ids[mask.bool()], rows[number][0][rows[number][1].bool()])


def test_only_rows_with_an_advantage_teach_and_they_come_last() -> None:
    passes = arrangement().passes(slices_of(3), WORLD)
    kinds = [each.teaches for each in passes.passes]
    assert kinds == sorted(kinds)
    assert set(kinds) == {False, True}
    for each in passes.passes:
        live = (each.slice.batch.advantages != 0) & each.slice.batch.token_mask.any(dim=1)
        assert bool(live.all()) if each.teaches else not bool(live.any())


@pytest.mark.parametrize("settings", [{"beta": 0.1}, {"skip_zero_advantage": False}])
def test_all_rows_teach_where_a_kl_needs_them_or_the_run_says_so(settings: dict[str, Any]) -> None:
    assert all(each.teaches for each in arrangement(**settings).passes(slices_of(3), WORLD).passes)


def test_a_step_that_teaches_nothing_has_a_backward_pass_all_the_same() -> None:
    slices = slices_of(4)
    for slice_ in slices:
        slice_.batch.advantages.zero_()
    passes = arrangement().passes(slices, WORLD)
    assert [each.teaches for each in passes.passes].count(True) == 1
    assert not passes.passes[-1].slice.batch.token_mask.any()
    assert sorted(n for each in passes.passes for n in each.numbers) == list(range(24))


def test_a_pass_holds_no_more_positions_than_its_budget() -> None:
    slices = slices_of(5)
    for width in (0, 32):
        ways = ForwardWays(chunked=True, shared_width=width)
        made = arrangement(ways=ways, max_tokens_per_micro_batch=30).passes(slices, WORLD)
        for each in made.passes:
            assert lay_out(each.slice.batch, width).input_ids.numel() <= 30


def test_without_a_budget_a_pass_holds_no_more_completions_than_a_micro_batch() -> None:
    made = arrangement(per_device_train_batch_size=5).passes(slices_of(6), WORLD)
    assert max(len(each.numbers) for each in made.passes) <= 5


def test_a_loss_of_single_micro_batches_keeps_those_of_the_schedule() -> None:
    slices = slices_of(7)
    passes = arrangement("bnpo", max_tokens_per_micro_batch=30).passes(slices, WORLD)
    assert [list(each.numbers) for each in passes.passes] == [list(range(n, n + 8)) for n in (0, 8, 16)]


@dataclass(frozen=True)
class BesideOthers(World):
    """A rank whose others tell what they were given."""

    told: list[Any] = field(default_factory=list)

    def gather(self, items: Any) -> Any:
        return [*items, *self.told]


def test_every_rank_has_as_many_passes_of_each_kind_as_the_one_with_most() -> None:
    world = BesideOthers(0, 2, CPU, [(9, 11, 100, 150)])
    passes = arrangement().passes(slices_of(8), world)
    kinds = [each.teaches for each in passes.passes]
    assert (kinds.count(False), kinds.count(True)) == (9, 11)
    for each in passes.passes:
        if not each.numbers:
            assert not each.slice.batch.token_mask.any()


def test_what_passes_fix_goes_back_to_the_rows_it_is_of() -> None:
    slices = slices_of(9)
    world = BesideOthers(0, 2, CPU, [(9, 11, 100, 150)])
    passes: Passes = arrangement(max_tokens_per_micro_batch=30).passes(slices, world)
    for each in passes.passes:  # the token itself, as if it were a log-probability
        each.slice.old_logprobs = each.slice.batch.completion_ids.float()
    passes.keep()
    for slice_ in slices:
        assert slice_.old_logprobs is not None
        assert torch.equal(slice_.old_logprobs, slice_.batch.completion_ids.float())
        assert slice_.reference_logprobs is None


def test_padding_is_told_as_the_part_of_positions_without_a_token() -> None:
    rollouts = [Rollout(0, 0, (5, 6), (7,) * n, "stop", 0) for n in (4, 2)]
    slices = [Slice(collate(rollouts, [1.0, -1.0], 0, CPU))]
    apart = arrangement(ways=ForwardWays(chunked=True)).passes(slices, WORLD)
    assert apart.padding_fraction == pytest.approx(2 / 12)
    assert arrangement().passes(slices, WORLD).padding_fraction == 0
