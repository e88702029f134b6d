"""Entropy bonus, tokens of high entropy, completions that are off-policy: the gradient of whole steps.

A model is updated by `PolicyUpdate` as a run does it, but without DeepSpeed; its gradient is compared with that
of the float64 reference, in which a step is plain loops over tokens.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.patience import patient
from support.reference import step as reference
from support.small_models import far, gradient_of, model_of
from test_packing import ALL_OFF, COMBINATIONS, LONGEST, REGISTRY, WORLD, loss_of, slices_of
from torch import Tensor

from grpox.config import ComponentRef, RunConfig
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.scoring_forward import prepare
from grpox.runtime.world import World
from grpox.update.micro_batch import Slice, merged, rows_of_slice
from grpox.update.policy_update import PolicyUpdate

TEMPERATURE = 0.8
BONUS = {"entropy_coef": 0.3}
HIGH = {"top_entropy_quantile": 0.3}
NEAR = {"off_policy_mask_threshold": 3.8}
ALL = BONUS | HIGH | NEAR
each_term = pytest.mark.parametrize("terms", [BONUS, HIGH, NEAR, ALL], ids=["bonus", "high", "near", "all"])


def small_model() -> Any:
    """A model of one layer: the terms see log-probabilities alone, whatever they come from."""
    return model_of("llama", num_hidden_layers=1)


class PlainEngine:
    """A model on its own: gradients add up in its parameters, and steps change nothing."""

    learning_rate = 0.0
    steps = 0

    def __init__(self, model: Any, train: Any) -> None:
        self.model, self.ways = model, prepare(model, train)
        self.forwards = 0

    def __call__(self, **inputs: Any) -> Any:
        self.forwards += 1
        return self.model(**inputs)

    def begin_micro_batch(self, *, last: bool) -> None: ...

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> float:
        self.steps += 1
        return 1.0

    def finite(self) -> bool:
        return True


def update(model: Any, loss: str, world: Any = WORLD, **train: Any) -> PolicyUpdate:
    config = RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"path": "unused"},
            "rewards": ["exact"],
            "train": train,
            "sampling": {"max_completion_length": LONGEST, "temperature": TEMPERATURE},
        }
    )
    correction = REGISTRY.build(REGISTRY.parse("correction", ComponentRef(name="none"), "correction"))
    engine: Any = PlainEngine(model, config.train)
    return PolicyUpdate(engine, None, loss_of(loss), correction, config, world)


def step_of(slices: Sequence[Slice], loss: str = "grpo", **train: Any) -> tuple[Tensor, dict[str, float]]:
    """Gradient and metrics of one step; the slices are left as they are."""
    model = small_model()
    metrics = update(model, loss, **train).step(copy.deepcopy(slices))
    return gradient_of(model), metrics


def later(slices: list[Slice]) -> list[Slice]:
    """As in a second pass over the batch, the policy having moved, with a reference."""
    for slice_ in slices:
        shape = slice_.batch.token_mask.shape
        slice_.old_logprobs = torch.full(shape, -4.6, dtype=torch.float64)
        slice_.old_logprobs[:, ::2] = -7.5  # ratios below and above 1, for either sign of the advantage
        slice_.reference_logprobs = torch.full(shape, -4.7, dtype=torch.float64)
    return slices


def expected(slices: Sequence[Slice], loss: str, beta: float = 0.0, **terms: float) -> tuple[Tensor, float]:
    """Gradient and loss as the reference has them, of one forward pass by torch's own functions."""
    model = small_model()
    micro_batches, roots, upstream = [], [], []
    tokens = sum(int(slice_.batch.token_mask.sum()) for slice_ in slices)
    for slice_ in slices:
        batch = slice_.batch
        logprobs, _ = completion_logprobs(model, batch, TEMPERATURE)
        logits = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids
        ).logits[:, -batch.token_mask.shape[1] - 1 : -1]
        log_p = torch.log_softmax(logits / TEMPERATURE, dim=-1)
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
        micro_batches.append(
            {
                "logprobs": logprobs.detach(),
                "old_logprobs": logprobs.detach() if slice_.old_logprobs is None else slice_.old_logprobs,
                "ref_logprobs": torch.full_like(logprobs.detach(), -4.7),
                "sampler_logprobs": batch.sampler_logprobs.double(),
                "advantages": batch.advantages.double(),
                "token_mask": batch.token_mask,
                "entropy": entropy.detach(),
            }
        )
        roots += [logprobs, (entropy * batch.token_mask).sum()]
        upstream.append(-terms.get("entropy_coef", 0.0) / tokens)
    options: dict[str, Any] = {"beta": beta, "max_completion_length": LONGEST, **terms}
    value, gradients = reference.step_gradient(loss, micro_batches, **options)
    pairs = zip(gradients, upstream, strict=True)
    torch.autograd.backward(
        roots, [each for gradient, bonus in pairs for each in (gradient, torch.tensor(bonus).double())]
    )
    return gradient_of(model), float(value)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo"])
@each_term
def test_a_later_step_has_the_gradient_of_the_reference(terms: dict[str, float], loss: str) -> None:
    slices = later(slices_of(1))
    wanted, value = expected(slices, loss, beta=0.1, **terms)
    found, metrics = step_of(slices, loss, beta=0.1, **terms)
    assert far(found, wanted) < 1e-6
    assert metrics["loss"] == pytest.approx(value, rel=1e-6)
    without, _ = step_of(slices, loss, beta=0.1)
    assert far(found, without) > 1e-3  # it does something


@each_term
def test_the_first_step_on_a_batch_too(terms: dict[str, float]) -> None:
    slices = slices_of(2)
    wanted, value = expected(slices, "dapo", **terms)
    found, metrics = step_of(slices, "dapo", **terms)
    assert far(found, wanted) < 1e-6
    assert metrics["loss"] == pytest.approx(value, rel=1e-6, abs=1e-6)
    assert (metrics["ratio/min"], metrics["ratio/max"], metrics["kl_old"]) == (1, 1, 0)


@pytest.fixture(scope="module")
def whole_step() -> tuple[list[Slice], Tensor, float]:
    """Slices of a later step, which nobody changes, and their gradient and loss with all terms."""
    slices = later(slices_of(1))
    return slices, *expected(slices, "grpo", **ALL)


@pytest.mark.parametrize("settings", COMBINATIONS, ids=str)
def test_no_saving_changes_it(settings: dict[str, Any], whole_step: tuple[list[Slice], Tensor, float]) -> None:
    slices, wanted, _ = whole_step
    found, _ = step_of(slices, "grpo", **settings, **ALL)
    assert far(found, wanted) < 1e-6


@pytest.mark.parametrize("count", [1, 2, 6, 12], ids="{} micro-batches".format)
def test_no_split_into_micro_batches_changes_it(
    count: int, whole_step: tuple[list[Slice], Tensor, float]
) -> None:
    """The same 24 rows, as the schedule cuts them and nothing sorts them anew."""
    slices, wanted, value = whole_step
    whole = merged(slices)
    size = 24 // count
    cut = [rows_of_slice(whole, range(first, first + size)) for first in range(0, 24, size)]
    found, metrics = step_of(cut, "grpo", **ALL_OFF, **ALL)
    assert far(found, wanted) < 1e-6
    assert metrics["loss"] == pytest.approx(value, rel=1e-6)


class ThreadedWorld(World):
    """Two ranks as two threads that meet in each collective."""

    held: list[Any]
    meeting: threading.Barrier

    @classmethod
    def two(cls) -> list[ThreadedWorld]:
        held: list[Any] = [None, None]
        meeting = threading.Barrier(2, timeout=patient(120))
        worlds = [cls(rank, 2, torch.device("cpu")) for rank in range(2)]
        for world in worlds:
            vars(world).update(held=held, meeting=meeting)
        return worlds

    def gather(self, items: Any) -> Any:
        self.held[self.rank] = list(items)
        self.meeting.wait()
        every = [item for part in self.held for item in part]
        self.meeting.wait()
        return every

    def reduce(self, values: Tensor, op: Any) -> Tensor:
        every = torch.stack(self.gather([values.clone()]))
        return values.copy_(every.amax(dim=0) if op == torch.distributed.ReduceOp.MAX else every.sum(dim=0))


@pytest.mark.parametrize("settings", [{}, ALL_OFF, {"max_tokens_per_micro_batch": 40}], ids=str)
def test_no_number_of_ranks_changes_it(settings: dict[str, Any]) -> None:
    slices = later(slices_of(3, count=4))
    wanted, _ = expected(slices, "grpo", **ALL)
    _, alone = step_of(slices, "grpo", **settings, **ALL)

    models = [small_model() for _ in range(2)]  # not in the threads: their random numbers are global

    def rank(world: ThreadedWorld) -> tuple[Tensor, dict[str, float]]:
        taken = update(models[world.rank], "grpo", world, **settings, **ALL)
        metrics = taken.step(copy.deepcopy(slices[world.rank :: 2]))
        return gradient_of(models[world.rank]), metrics

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(rank, ThreadedWorld.two()))
    assert far(done[0][0] + done[1][0], wanted) < 1e-6
    for _, metrics in done:
        for name in ("loss", "entropy", "off_policy_masked", "top_entropy/threshold", "top_entropy/kept"):
            assert metrics[name] == pytest.approx(alone[name], rel=1e-9), name


def test_what_is_left_out_is_measured() -> None:
    slices = slices_of(1)
    _, metrics = step_of(slices, **HIGH, **NEAR)
    tokens = sum(int(slice_.batch.token_mask.sum()) for slice_ in slices)
    negative = sum(int((slice_.batch.advantages < 0).sum()) for slice_ in slices)
    assert metrics["top_entropy/kept"] == pytest.approx(0.3, abs=1 / tokens)
    # Two of four with a negative advantage, of the 23 completions that have a token that counts.
    assert negative == 4
    assert metrics["off_policy_masked"] == pytest.approx(2 / 23)
    assert metrics["entropy"] < metrics["top_entropy/threshold"]
    _, off = step_of(slices)
    assert not {"off_policy_masked", "top_entropy/kept", "top_entropy/threshold"} & off.keys()


def test_completions_without_an_advantage_have_the_bonus() -> None:
    slices = slices_of(4)
    for slice_ in slices:
        slice_.batch.advantages.zero_()
    wanted, _ = expected(slices, "dapo", **BONUS)
    found, metrics = step_of(slices, "dapo", **BONUS)
    assert wanted.abs().max() > 1e-4
    assert far(found, wanted) < 1e-6
    assert metrics["loss"] == pytest.approx(-0.3 * metrics["entropy"], rel=1e-6)


def test_a_step_of_which_all_tokens_are_masked_has_a_gradient_of_zero() -> None:
    slices = slices_of(5)
    for slice_ in slices:
        slice_.batch.token_mask[:] = False
    found, metrics = step_of(slices, **ALL)
    assert not found.any()
    assert metrics["loss"] == 0
    assert "top_entropy/kept" not in metrics


def test_tokens_are_chosen_for_one_step_and_cost_one_forward_of_it() -> None:
    slices = slices_of(6)
    counts = []
    for part in (1.0, 0.2):
        taken = update(small_model(), "grpo", **ALL_OFF, top_entropy_quantile=part)
        taken.step(slices)
        engine: Any = taken.engine
        counts.append(engine.forwards)
    assert counts == [3, 6]
    assert all(slice_.policy_keep is None for slice_ in slices)
