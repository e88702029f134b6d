"""Entropy bonus, tokens of high entropy, completions that are off-policy: the gradient of whole steps.

A model is updated by `PolicyUpdate` as a run does it, but without DeepSpeed; its gradient is compared with that
of the float64 reference, in which a step is plain loops over tokens.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from support.reference import step as reference
from support.small_models import far, gradient_of, model_of
from test_packing import ALL_OFF, COMBINATIONS, LONGEST, REGISTRY, WORLD, loss_of, micro_batches_of
from torch import Tensor

from grpox.config import ComponentRef, RunConfig
from grpox.policy.batch import Sample, collate
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.scoring_forward import install_scoring_forward
from grpox.update.policy_update import MicroBatches, PolicyUpdate

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
    is_adapted = False

    def __init__(self, model: Any, train: Any) -> None:
        self.model, self.mode = model, install_scoring_forward(model, train)
        self.forwards = 0

    def __call__(self, **inputs: Any) -> Any:
        self.forwards += 1
        return self.model(**inputs)

    def begin_micro_batch(self, *, last: bool) -> None: ...

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, loss: Tensor) -> Tensor:
        self.steps += 1
        return 1 + (loss - loss).double()

    def sample_weights(self) -> list[Tensor]:
        return []

    def measure_weights(self, before: list[Tensor] | None = None) -> Tensor:
        return torch.ones(3, dtype=torch.float64)


def update(
    model: Any,
    loss: str,
    world: Any = WORLD,
    correction: dict[str, Any] | None = None,
    statistics: Any = None,
    **train: Any,
) -> PolicyUpdate:
    """The update of a run with these settings; by default without a correction."""
    run: dict[str, Any] = {"model": {"path": "unused"}, "data": {"path": "unused"}, "rewards": ["exact"]}
    sampling = {"max_completion_length": LONGEST, "temperature": TEMPERATURE}
    config = RunConfig.model_validate(run | {"train": train, "sampling": sampling})
    chosen = ComponentRef(**(correction or {"name": "none"}))
    corrects = REGISTRY.build(REGISTRY.parse("correction", chosen, "correction"))
    engine: Any = PlainEngine(model, config.train)
    return PolicyUpdate(engine, None, loss_of(loss), corrects, config, world, statistics=statistics)


def step_of(micro_batches: MicroBatches, loss: str = "grpo", **train: Any) -> tuple[Tensor, dict[str, float]]:
    """Gradient and metrics of one step; the samples are left as they are."""
    model = small_model()
    metrics = update(model, loss, **train).step(copy.deepcopy(micro_batches))
    return gradient_of(model), metrics


def later(micro_batches: list[list[Sample]]) -> list[list[Sample]]:
    """As in a second pass over the batch, the policy having moved, with a reference."""
    for sample in itertools.chain.from_iterable(micro_batches):
        length = len(sample.completion)
        sample.old_logprobs = torch.full((length,), -4.6, dtype=torch.float64)
        sample.old_logprobs[::2] = -7.5  # ratios below and above 1, for either sign of the advantage
        sample.reference_logprobs = torch.full((length,), -4.7, dtype=torch.float64)
    return micro_batches


def expected(micro_batches: MicroBatches, loss: str, beta: float = 0.0, **terms: float) -> tuple[Tensor, float]:
    """Gradient and loss as the reference has them, of one forward pass by torch's own functions."""
    model = small_model()
    told, roots, upstream = [], [], []
    tokens = sum(int(s.token_mask.sum()) for s in itertools.chain.from_iterable(micro_batches))
    for samples in micro_batches:
        batch = collate(samples, WORLD.device)
        logprobs, _ = completion_logprobs(model, batch, TEMPERATURE)
        logits = model(**batch.model_inputs()).logits[:, -batch.token_mask.shape[1] - 1 : -1]
        log_p = torch.log_softmax(logits / TEMPERATURE, dim=-1)
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
        old = logprobs.detach().clone()
        for row, sample in enumerate(samples):
            if sample.old_logprobs is not None:
                old[row, : len(sample.completion)] = sample.old_logprobs
        told.append(
            {
                "logprobs": logprobs.detach(),
                "old_logprobs": old,
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
    value, gradients = reference.step_gradient(loss, told, **options)
    pairs = zip(gradients, upstream, strict=True)
    torch.autograd.backward(
        roots, [each for gradient, bonus in pairs for each in (gradient, torch.tensor(bonus).double())]
    )
    return gradient_of(model), float(value)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo"])
@each_term
def test_a_step_has_the_gradient_of_the_reference(terms: dict[str, float], loss: str) -> None:
    micro_batches = later(micro_batches_of(1))
    wanted, value = expected(micro_batches, loss, beta=0.1, **terms)
    found, metrics = step_of(micro_batches, loss, beta=0.1, **terms)
    assert far(found, wanted) < 1e-6
    assert metrics["loss"] == pytest.approx(value, rel=1e-6)
    without, _ = step_of(micro_batches, loss, beta=0.1)
    assert far(found, without) > 1e-3  # it does something
    micro_batches = micro_batches_of(2)  # the first step on a batch
    wanted, value = expected(micro_batches, loss, **terms)
    found, metrics = step_of(micro_batches, loss, **terms)
    assert far(found, wanted) < 1e-6
    assert metrics["loss"] == pytest.approx(value, rel=1e-6, abs=1e-6)
    assert (metrics["ratio/min"], metrics["ratio/max"], metrics["kl_old"]) == (1, 1, 0)


WholeStep = tuple[list[list[Sample]], Tensor, float]


@pytest.fixture(scope="module")
def whole_step() -> WholeStep:
    """Micro-batches of a later step, which nobody changes, and their gradient and loss with all terms."""
    micro_batches = later(micro_batches_of(1))
    return micro_batches, *expected(micro_batches, "grpo", **ALL)


@pytest.mark.parametrize("settings", COMBINATIONS, ids=str)
def test_no_saving_changes_it(settings: dict[str, Any], whole_step: WholeStep) -> None:
    micro_batches, wanted, _ = whole_step
    found, _ = step_of(micro_batches, "grpo", **settings, **ALL)
    assert far(found, wanted) < 1e-6


@pytest.mark.parametrize("count", [1, 2, 6, 12], ids="{} micro-batches".format)
def test_no_split_into_micro_batches_changes_it(count: int, whole_step: WholeStep) -> None:
    """The same 24 rows, as the schedule cuts them and nothing sorts them anew."""
    micro_batches, wanted, value = whole_step
    every = list(itertools.chain.from_iterable(micro_batches))
    size = 24 // count
    cut = [every[first : first + size] for first in range(0, 24, size)]
    found, metrics = step_of(cut, "grpo", **ALL_OFF, **ALL)
    assert far(found, wanted) < 1e-6
    assert metrics["loss"] == pytest.approx(value, rel=1e-6)


def test_what_is_left_out_is_measured() -> None:
    micro_batches = micro_batches_of(1)
    _, metrics = step_of(micro_batches, **HIGH, **NEAR)
    every = list(itertools.chain.from_iterable(micro_batches))
    tokens = sum(int(sample.token_mask.sum()) for sample in every)
    negative = sum(sample.advantage < 0 for sample in every)
    assert metrics["top_entropy/kept"] == pytest.approx(0.3, abs=1 / tokens)
    # Two of four with a negative advantage, of the 23 completions that have a token that counts.
    assert negative == 4
    assert metrics["off_policy_masked"] == pytest.approx(2 / 23)
    assert metrics["entropy"] < metrics["top_entropy/threshold"]
    _, off = step_of(micro_batches)
    assert not {"off_policy_masked", "top_entropy/kept", "top_entropy/threshold"} & off.keys()


def test_completions_without_an_advantage_have_the_bonus() -> None:
    micro_batches = micro_batches_of(4)
    for sample in itertools.chain.from_iterable(micro_batches):
        sample.advantage = 0.0
    wanted, _ = expected(micro_batches, "dapo", **BONUS)
    found, metrics = step_of(micro_batches, "dapo", **BONUS)
    assert wanted.abs().max() > 1e-4
    assert far(found, wanted) < 1e-6
    assert metrics["loss"] == pytest.approx(-0.3 * metrics["entropy"], rel=1e-6)


def test_a_step_of_which_all_tokens_are_masked_has_a_gradient_of_zero() -> None:
    micro_batches = micro_batches_of(5)
    for sample in itertools.chain.from_iterable(micro_batches):
        sample.token_mask[:] = False
    found, metrics = step_of(micro_batches, **ALL)
    assert not found.any()
    assert metrics["loss"] == 0
    assert "top_entropy/kept" not in metrics


def test_tokens_are_chosen_for_one_step_and_cost_one_forward_of_it() -> None:
    micro_batches = micro_batches_of(6)
    counts = []
    for part in (1.0, 0.2):
        taken = update(small_model(), "grpo", **ALL_OFF, top_entropy_quantile=part)
        taken.step(micro_batches)
        engine: Any = taken.engine
        counts.append(engine.forwards)
    assert counts == [3, 6]
    assert all(s.policy_keep is None for s in itertools.chain.from_iterable(micro_batches))
