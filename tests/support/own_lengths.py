"""Completions whose prompts have their own longest length: the draws of a run without limits, cut."""

from collections.abc import Sequence
from dataclasses import replace

from grpox.config import SamplingConfig
from grpox.contracts import Generator, Prompt, Rollout

LIMITS = (1, 3, None, 20)
"""`max_tokens` of four prompts: below the run's longest length, 6, that length, and above it."""


def assert_cut(generator: Generator, prompts: Sequence[Prompt]) -> None:
    """See that each completion of four prompts is cut at its prompt's own limit, with finish_reason length.

    Args:
        generator: with the same draws for the same seed, whatever else is sampled.
    """
    limited = [replace(prompt, max_tokens=most) for prompt, most in zip(prompts, LIMITS, strict=True)]
    for least in (0, 6):  # with 6, each completion is longer than that, and so there is something to cut
        sampling = SamplingConfig(max_completion_length=6, min_completion_length=least, temperature=2.0)
        longest = sampling.model_copy(update={"max_completion_length": 20})
        whole, cut = _sample(generator, prompts, longest), _sample(generator, limited, sampling)
        for one, other in zip(whole, cut, strict=True):
            most = LIMITS[one.group_id] or 6
            assert other.completion_ids == one.completion_ids[:most]
            assert len(other.sampler_logprobs or ()) == len(other.completion_ids)
            assert other.finish_reason == (one.finish_reason if len(one.completion_ids) <= most else "length")
        lengths = [{len(each.completion_ids) for each in cut if each.group_id == group} for group in range(4)]
    assert lengths[:3] == [{1}, {3}, {6}]
    assert min(lengths[3]) > 6


def _sample(generator: Generator, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
    rollouts = generator.generate(prompts, sampling, 5)
    return sorted(rollouts, key=lambda rollout: (rollout.group_id, rollout.sample))
