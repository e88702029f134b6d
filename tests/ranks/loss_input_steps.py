"""Real optimizer steps under ZeRO-3 with losses that need more inputs; run alone or by torchrun.

Usage: loss_input_steps.py OUT.pt BATCH_SIZExACCUMULATION...
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np
import torch
import zero3_step

from grpox.config import RunConfig
from grpox.contracts import LossInputs, LossOutput, Reduction, Rollout
from grpox.policy.batch import Sample, samples_of
from grpox.policy.engine import FrozenEngine
from grpox.policy.models import load_model
from grpox.runtime.world import World

COEFFICIENT = 0.1


class Plain:
    """-w A."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(-torch.exp(inputs.logprobs - inputs.old_logprobs) * inputs.advantages)


class ReferenceKl(Plain):
    """-w A + c (exp(rho) - rho - 1), rho = log ref - log pi."""

    needs = ("reference_logprobs",)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.reference_logprobs is not None
        rho = inputs.reference_logprobs - inputs.logprobs
        return LossOutput(super().per_token(inputs).loss + COEFFICIENT * (torch.exp(rho) - rho - 1))


class EntropyRegularised(Plain):
    """-w A - c H."""

    needs = ("entropy_gradient",)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.entropy is not None
        return LossOutput(super().per_token(inputs).loss - COEFFICIENT * inputs.entropy)


class RewardWeighted(Plain):
    """-(r_1 + 2 r_2) log pi."""

    needs = ("rewards",)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.rewards is not None
        reward = inputs.rewards[:, :1] + 2 * inputs.rewards[:, 1:]
        return LossOutput(-reward * inputs.logprobs)


class Pairwise:
    """For each pair of a group the softplus of s_worse - s_better, s the mean log-probability of a sequence.

    The loss of a pair lies on the better sequence, spread over its tokens.
    """

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_SUM
    scope = "group"
    needs = ("group_ids", "rewards", "sequence_ids")

    def __init__(self) -> None:
        self.sizes: list[tuple[list[int], bool]] = []
        """The sizes of the groups of each call, and true for a filler."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ids, rewards = inputs.group_ids, inputs.rewards
        assert ids is not None
        assert rewards is not None
        self.sizes.append((ids.unique(return_counts=True)[1].tolist(), bool((ids < 0).all())))
        mask = inputs.token_mask.to(inputs.logprobs.dtype)
        tokens = mask.sum(1).clamp(min=1)
        score = (inputs.logprobs * mask).sum(1) / tokens
        better = (ids[:, None] == ids[None]) & (rewards[:, None, 0] > rewards[None, :, 0])
        of_pair = torch.nn.functional.softplus(score[None] - score[:, None])
        of_sequence = torch.where(better, of_pair, 0.0).sum(1)
        return LossOutput((of_sequence / tokens)[:, None] * mask)


GROUP = 4
ROWS = 24
MAX_LENGTH = 7
TEMPERATURE = 2.5
SHRINK = 0.97
"""Factor of the reference's weights."""
PACKINGS: dict[str, dict[str, Any]] = {
    "regrouped": {},
    "scheduled": {"prefix_sharing": False},
    "all logits": {"chunked_logprobs": False, "prefix_sharing": False},
    "budget": {"max_tokens_per_micro_batch": GROUP * (6 + MAX_LENGTH)},
    "budget without sharing": {"max_tokens_per_micro_batch": GROUP * (6 + MAX_LENGTH), "prefix_sharing": False},
}
CASES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "reference": (ReferenceKl, {}),
    "beta": (Plain, {"beta": COEFFICIENT}),
    "entropy": (EntropyRegularised, {}),
    "entropy, all logits": (EntropyRegularised, {"chunked_logprobs": False}),
    "bonus": (Plain, {"entropy_coef": COEFFICIENT}),
    "rewards": (RewardWeighted, {}),
    **{f"pairs, {name}": (Pairwise, settings) for name, settings in PACKINGS.items()},
}
"""Name of a step -> its loss and settings; every step starts from the same weights."""
LEFT_OUT = ("entropy, all logits", "pairs, all logits", "pairs, scheduled", "pairs, budget")
FEWER = [name for name in CASES if name not in LEFT_OUT]
"""The steps of splits into six."""


def rollouts() -> tuple[list[Rollout], list[float], np.ndarray]:
    """Groups of four ragged rollouts of one prompt, with advantages and rewards f32[N, 2]."""
    rng = random.Random(11)
    rows, advantages, rewards = [], [], []
    for row in range(ROWS):
        if row % GROUP == 0:
            prompt = tuple(rng.randrange(3, 17) for _ in range(rng.randint(1, 6)))
        # The groups of the first half are long, so that ranks differ in their micro-batches under a budget.
        length = MAX_LENGTH if row < ROWS // 2 else rng.randint(1, 2)
        completion = tuple(rng.randrange(3, 17) for _ in range(length))
        rows.append(Rollout(row // GROUP, row % GROUP, prompt, completion, "stop", 0))
        advantages.append(0.0 if row // GROUP == 3 else rng.choice([-1.3, 0.0, 0.7]))
        rewards.append([rng.choice([0.0, 0.5, 1.0]), rng.random()])
    return rows, advantages, np.array(rewards, np.float32)


def samples() -> list[Sample]:
    """The rows of all ranks, each with its rewards and numbers."""
    rows, advantages, rewards = rollouts()
    of_all = samples_of(rows, advantages)
    of_all[9].token_mask[:] = False
    for row, sample in enumerate(of_all):
        sample.rewards, sample.group_id, sample.sequence_id = rewards[row], row // GROUP, row
    return of_all


def config_for(split: str, settings: dict[str, Any]) -> RunConfig:
    config = zero3_step.config_for("dapo", 0.0, *zero3_step.numbers(split))
    config = config.model_copy(update={"train": config.train.model_copy(update=settings)})
    sampling = config.sampling.model_copy(update={"temperature": TEMPERATURE})
    return config.model_copy(update={"sampling": sampling})


def reference_model(config: RunConfig) -> Any:
    model = load_model(config.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SHRINK)
    return model


def step(name: str, split: str, world: World) -> dict[str, Any]:
    """Take one step; returns the whole gradient, the metrics, and what the loss saw of groups."""
    (build, settings), loss = CASES[name], CASES[name][0]()
    config, needs = config_for(split, settings), getattr(build, "needs", ())
    reference: Any = None
    if config.train.beta or "reference_logprobs" in needs:
        reference = FrozenEngine(reference_model(config), config, world)
    engine = zero3_step.engine_of(config, world)
    gradients = zero3_step.captured(engine)
    update = zero3_step.update_of(engine, reference, config, world, loss=loss, needs=needs)
    metrics = update.step(zero3_step.micro_batches_for(config, world, samples()))
    return {"gradient": gradients[0], "metrics": metrics, "sizes": world.gather(getattr(loss, "sizes", []))}


def results(world: World, *splits: str) -> dict[str, Any]:
    return {
        split: {name: step(name, split, world) for name in (CASES if split == splits[0] else FEWER)}
        for split in splits
    }


if __name__ == "__main__":
    zero3_step.save_results(results)
