"""A real optimizer step under ZeRO-3 with entropy bonus and both masks; run alone or by torchrun.

Usage: zero3_policy_terms.py OUT.pt BATCH_SIZExACCUMULATION
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zero3_step

from grpox.config import RunConfig
from grpox.policy.batch import Sample
from grpox.runtime.world import World

TERMS = {"entropy_coef": 0.1, "top_entropy_quantile": 0.3, "off_policy_mask_threshold": 0.4}
STEPS: dict[str, dict[str, Any]] = {
    "all": TERMS,
    "plain forward": TERMS | {"chunked_logprobs": False, "skip_zero_advantage": False},
}
"""Settings of each step; every step starts from the same weights."""


def micro_batches_for(config: RunConfig, world: World) -> list[list[Sample]]:
    """Samples of `zero3_step`, with a mu that depends on the token alone: some are far from the policy."""
    made = zero3_step.micro_batches_for(config, world)
    for sample in (sample for samples in made for sample in samples):
        sample.sampler_logprobs = -2 - np.array(sample.completion, dtype=np.float32) / 10
    return made


def step(settings: dict[str, Any], split: str, world: World) -> dict[str, Any]:
    config = zero3_step.config_for("dapo", 0.0, *zero3_step.numbers(split))
    train = config.train.model_copy(update=settings)
    return zero3_step.step(config.model_copy(update={"train": train}), world, micro_batches_for)


if __name__ == "__main__":
    zero3_step.save_results(
        lambda world, split: {name: step(settings, split, world) for name, settings in STEPS.items()}
    )
