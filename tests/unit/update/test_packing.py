"""Steps packed into micro-batches: nothing is lost or doubled, and no gradient is another."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
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
from grpox.update.packing import LossTraits, MicroBatchPacker, count_step
from grpox.update.policy_update import MicroBatches, forward_pass

CPU = torch.device("cpu")
WORLD = World(0, 1, CPU)
SHARED = ForwardMode(chunked=True, shared_width=32)
LONGEST = 9
REGISTRY = Registry(discover([]))
Packed = list[tuple[Sequence[Sample], bool]]


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


def kinds(packed: Packed, micro_batches: MicroBatches) -> list[tuple[bool, list[int]]]:
    """List True for each micro-batch that needs a backward pass, and the places of its samples in the step.

    A filler has no place.
    """
    every = itertools.chain.from_iterable(micro_batches)
    place = {id(sample): number for number, sample in enumerate(every)}
    return [(backward, [place[id(s)] for s in own if id(s) in place]) for own, backward in packed]


def gradients(
    micro_batches: MicroBatches, loss: str, model: Any, packer: MicroBatchPacker, beta: float
) -> torch.Tensor:
    """Gradients of one step, accumulated one micro-batch after the other in float64, as PolicyUpdate does."""
    correction = REGISTRY.build(REGISTRY.parse("correction", ComponentRef(name="none"), "correction"))
    step_loss = StepLoss(loss_of(loss), correction, beta)
    totals = count_step(([s.token_mask for s in samples] for samples in micro_batches), WORLD, LONGEST)
    model.zero_grad()
    for samples, needs_backward in packer.pack(micro_batches, WORLD)[0]:
        with torch.set_grad_enabled(needs_backward):
            made = forward_pass(model, collate(samples, CPU, packer.mode), step_loss, totals, 0.8)
        if needs_backward:
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
    assert packer.pack(micro_batches, WORLD)[1] == 0
    assert far(gradients(micro_batches, loss, model, packer, 0.0), expected) < 1e-12
