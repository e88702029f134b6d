"""What every generator must hold to, on a real model on CPU.

from grpox.testing import GeneratorConformance

class TestMine(GeneratorConformance):
    component = "mine"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar
from unittest import SkipTest

import torch

from grpox.config import SamplingConfig
from grpox.contracts import Capability, Rollout
from grpox.testing.conformance import Conformance, Violation

if TYPE_CHECKING:
    from grpox.testing.generator_stage import Stage

SAMPLING = SamplingConfig(max_completion_length=6, temperature=0.8)
LARGEST_ERROR = {False: 1e-4, True: 1e-2}
"""Nats, in float32: of a generator with the trainer's own forward, and of one that provides other-numerics."""


class GeneratorConformance(Conformance):
    """The checks of a generator. It is started once, and closed by `teardown_class`."""

    kind = "generator"
    _stage: ClassVar[Stage | None] = None

    def test_runs(self) -> None:
        """Returns every sample of every prompt once, with the prompt's own tokens and the version's number."""
        stage = self._on_stage()
        rollouts = stage.sample(SAMPLING)
        made = [(rollout.group_id, rollout.sample) for rollout in rollouts]
        wanted = [(group, sample) for group in range(len(stage.prompts)) for sample in range(4)]
        if made != wanted:
            raise Violation(f"of (group, sample) {wanted} it returned {made}")
        for rollout in rollouts:
            if tuple(rollout.prompt_ids) != stage.prompts[rollout.group_id]:
                advice = "nothing is tokenised twice: return the prompt's ids as they came"
                raise Violation("a rollout has other prompt tokens than its prompt", str(rollout), advice)
            if rollout.policy_version != 0:
                raise Violation(
                    f"after sync(weights, 0) a rollout is of version {rollout.policy_version}", str(rollout)
                )

    def test_ends(self) -> None:
        """A completion ends with its stop token, or at the maximal length, and says which."""
        stage = self._on_stage()
        for length in (SAMPLING.max_completion_length, 1):
            sampling = SAMPLING.model_copy(update={"max_completion_length": length})
            for rollout in stage.sample(sampling):
                self._ends_right(rollout, length, stage.stop_token_ids)

    def test_log_probabilities(self) -> None:
        """Reports the log-probability of each token under the model, at the temperature it was drawn with."""
        if Capability.LOGPROBS not in self.bound.provides:
            raise SkipTest("it does not provide logprobs")
        self._check_log_probabilities(self._on_stage())

    def test_greedy(self) -> None:
        """Nearly at temperature 0 it takes the likeliest token."""
        stage = self._on_stage()
        for rollout in stage.sample(SAMPLING.model_copy(update={"temperature": 1e-4}), samples=1):
            likeliest = stage.logits(rollout).argmax(1).tolist()
            if list(rollout.completion_ids) != likeliest:
                raise Violation(
                    f"it drew {list(rollout.completion_ids)}; likeliest are {likeliest}", str(rollout)
                )

    def test_seeds(self) -> None:
        """The same seed draws the same tokens, and another one others."""
        stage = self._on_stage()
        sampling = SAMPLING.model_copy(update={"temperature": 2.0})
        first, again, other = (_drawn(stage.sample(sampling, seed)) for seed in (1, 1, 2))
        if first != again:
            advice = "draw from a generator seeded by `seed` and the prompt's group_id, not from the global one"
            raise Violation("the same seed draws other tokens a second time", advice=advice)
        if first == other:
            raise Violation("another seed draws the same tokens", advice="use the argument `seed`")

    def test_no_prompts(self) -> None:
        """Takes a share without prompts, as a rank of many has at times."""
        if list(self._on_stage().generator.generate([], SAMPLING, 0)):
            raise Violation("for no prompts it returned rollouts")

    def test_sleep_and_wake(self) -> None:
        """After sleep and wake it samples as before."""
        stage = self._on_stage()
        before = _drawn(stage.sample(SAMPLING))
        stage.generator.sleep()
        stage.generator.wake()
        if _drawn(stage.sample(SAMPLING)) != before:
            raise Violation("after sleep() and wake() it draws other tokens from the same seed")

    def test_versions(self) -> None:
        """After a sync it samples from the new weights, and says so."""
        stage = self._on_stage()
        stage.change_policy()
        stage.sync(7)
        versions = {rollout.policy_version for rollout in stage.sample(SAMPLING)}
        if versions != {7}:
            advice = "keep the version that sync() is given"
            raise Violation(f"after sync(weights, 7) rollouts are of version {sorted(versions)}", advice=advice)
        if Capability.LOGPROBS in self.bound.provides:
            self._check_log_probabilities(stage)

    def test_ahead(self) -> None:
        """What it began before a sync is sampled with the weights of then, as it would have been drawn then."""
        if Capability.AHEAD not in self.bound.provides:
            raise SkipTest("it does not sample ahead")
        stage = self._on_stage()
        stage.sync(8)
        wanted = stage.sample(SAMPLING)
        read = stage.begin(SAMPLING)
        stage.change_policy()
        stage.sync(9)
        rollouts = read()
        if versions := {rollout.policy_version for rollout in rollouts} - {8}:
            advice = "sync() waits for what was begun"
            raise Violation(
                f"begun after sync(weights, 8), rollouts are of version {sorted(versions)}", advice=advice
            )
        if _drawn(rollouts) != _drawn(wanted):
            raise Violation("begin() draws other samples than generate() with the same weights and seed")

    @classmethod
    def teardown_class(cls) -> None:
        """Close the generator."""
        if cls._stage is not None:
            cls._stage.generator.close()
            cls._stage = None

    def _on_stage(self) -> Stage:
        cls = type(self)
        if cls._stage is None:
            # Imported here, as it takes seconds, which the suites of other kinds need not wait for.
            from grpox.testing.generator_stage import set_stage

            cls._stage = set_stage(self.build())
            cls._stage.sync(0)
        return cls._stage

    def _check_log_probabilities(self, stage: Stage) -> None:
        largest, allowed = 0.0, LARGEST_ERROR[Capability.OTHER_NUMERICS in self.bound.provides]
        for rollout in stage.sample(SAMPLING):
            if rollout.sampler_logprobs is None or len(rollout.sampler_logprobs) != len(rollout.completion_ids):
                raise Violation("it provides logprobs and a rollout has none, or not one a token", str(rollout))
            expected = torch.log_softmax(stage.logits(rollout) / SAMPLING.temperature, dim=1)
            chosen = expected.gather(1, torch.tensor(rollout.completion_ids).unsqueeze(1)).squeeze(1)
            error = float((torch.tensor(rollout.sampler_logprobs) - chosen).abs().max())
            if not error <= allowed:
                shown = "  ".join(f"{value:.4f}" for value in chosen.tolist())
                advice = "they are of softmax(logits / temperature), of the weights of the last sync"
                what = f"its log-probabilities are off by {error:.2g} nats; allowed is {allowed:g}"
                raise Violation(what, f"{rollout}\nthe model's: {shown}", advice)
            largest = max(largest, error)
        self.notes.append(f"largest difference from the model's: {largest:.1e} nats")

    def _ends_right(self, rollout: Rollout, length: int, stops: Sequence[int]) -> None:
        ids = rollout.completion_ids
        if not 1 <= len(ids) <= length:
            raise Violation(f"a completion has {len(ids)} tokens of at most {length}", str(rollout))
        stopped = ids[-1] in stops
        if any(token in stops for token in ids[:-1]):
            raise Violation("a completion goes on after its stop token", str(rollout))
        if not stopped and len(ids) < length:
            advice = "the ending EOS belongs to the completion: it is trained on"
            raise Violation("a completion ends early and without a stop token", str(rollout), advice)
        if rollout.finish_reason != ("stop" if stopped else "length"):
            raise Violation(f"its finish_reason is {rollout.finish_reason!r}", str(rollout))


def _drawn(rollouts: Sequence[Rollout]) -> list[tuple[int, ...]]:
    return [tuple(rollout.completion_ids) for rollout in rollouts]
